"""The events file of one process of a vLLM instance, for `pdflow check --trace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.vllm.instance import Instance


@contextmanager
def writing_events_of(node: LiveNode, instance: Instance, incarnation: int, folder: str | None) -> Iterator[None]:
    """Write every event into the endpoints of this node, and their effects, while the context is open."""
    yield

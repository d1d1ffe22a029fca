"""Common parts of the engines in a transfer method's world, and the effects that their bodies add to their cores'.

The protocol names room in staging memory as it would name blocks in this world: the number that the memory gave it
depends on earlier requests, and means nothing.
"""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.methods.method import MemoryKind, Method, PipelinePolicy
from pdflow.methods.staging import KvSize, Staging, staging_of
from pdflow.protocol.values import Allocation, Value
from pdflow.serving.events import Handle
from pdflow_sim.check.scopes.scope import TOKENS, Scope

LAYER_BYTES = 4096
"""Bytes of one layer of a prompt, as small as a ring has them."""


class WaitsForRoom(Value, frozen=True, gc=False):
    """Effect: a prompt or request waits for room in the staging memory of this engine."""


class Copied(Value, frozen=True, gc=False):
    """Event: a copy of this request, or prompt, has ended."""

    handle: Handle


@attrs.frozen(kw_only=True)
class EnginePlan:
    """The method of a world, the shape of its engines, and the names of staged prompts."""

    scope: Scope
    method: Method
    pipeline_policy: PipelinePolicy
    layers: int
    """Layers of the model: as few as show what the method's pieces are."""
    ranks: int
    """Ranks of P."""
    staged: dict[Handle, Allocation]
    """The protocol's names of the blocks of each prompt at P and of each request at D, or of the room instead of
    them."""

    @property
    def layered(self) -> bool:
        """Whether P's core gets more events than that a prompt is computed."""
        return self.pipeline_policy.early or self.method.staged_at_p

    def memory(self, memory: MemoryKind, prompts: int) -> Staging:
        """Create an empty staging memory with room for so many prompts."""
        size = KvSize(self.layers, LAYER_BYTES // TOKENS)
        whole = size.layers * LAYER_BYTES
        split = memory is MemoryKind.BUFFER  # Each prompt has a layer on the GPU and one in the host's pool.
        return staging_of(
            memory, size, prompts * whole, prompts * (LAYER_BYTES if split else whole), prompts * LAYER_BYTES
        )


def kept(staging: Staging | None) -> dict[str, Any]:
    """Return, by name, the requests that wait for room or have some."""
    return {} if staging is None else {**staging.waiting, **dict(staging.held.values())}


def holder(staging: Staging, staged: Allocation) -> Handle:
    """Return the name that holds this room; "" if none does."""
    return staging.held.get(staged.generation, ("", ()))[0]


def as_it_is(staging: Staging | None) -> tuple[Any, ...]:
    """Return the state of a staging memory as a value, with the head of a ring."""
    if staging is None:
        return ()
    ring = getattr(staging, "ring", None)
    return staging.fingerprint(), None if ring is None else ring.head

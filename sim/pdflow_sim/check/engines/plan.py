"""What the engines of a transfer method's world have in common, and what their bodies say beside their cores' effects.

The protocol knows a place beside the blocks by the name that blocks would have in this world: which number the memory
gave it depends on who came before, and means nothing.
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
    """Somebody has no room beside the blocks of this engine yet."""


class Copied(Value, frozen=True, gc=False):
    """A copy of this request, or prompt, has ended."""

    handle: Handle


@attrs.frozen(kw_only=True)
class EnginePlan:
    """See the module."""

    scope: Scope
    method: Method
    pipeline_policy: PipelinePolicy
    layers: int
    """Of the model: as few as show what the method's pieces are."""
    ranks: int
    """Of P."""
    staged: dict[Handle, Allocation]
    """What the protocol calls the blocks of each prompt at P and of each request at D, or what is instead of them."""

    @property
    def layered(self) -> bool:
        """P's core hears of more than that a prompt is computed."""
        return self.pipeline_policy.early or self.method.staged_at_p

    def memory(self, memory: MemoryKind, prompts: int) -> Staging:
        """An empty one with room for so many."""
        size = KvSize(self.layers, LAYER_BYTES // TOKENS)
        whole = size.layers * LAYER_BYTES
        split = memory is MemoryKind.BUFFER  # Each prompt has a layer on the GPU and one in the host's pool.
        return staging_of(
            memory, size, prompts * whole, prompts * (LAYER_BYTES if split else whole), prompts * LAYER_BYTES
        )


def kept(staging: Staging | None) -> dict[str, Any]:
    """By name, who waits for room or has some."""
    return {} if staging is None else {**staging.waiting, **dict(staging.held.values())}


def holder(staging: Staging, staged: Allocation) -> Handle:
    """Who has room there; "" if nobody does."""
    return staging.held.get(staged.generation, ("", ()))[0]


def as_it_is(staging: Staging | None) -> tuple[Any, ...]:
    """As a value, with where a ring goes on."""
    if staging is None:
        return ()
    ring = getattr(staging, "ring", None)
    return staging.fingerprint(), None if ring is None else ring.head

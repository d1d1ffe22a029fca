"""An agent over memory that somebody else has allocated: segments of it, and behind them some of the agent's own.

The region's offsets count through the segments, one behind the other, whatever their addresses. The agent's own memory
begins at the next page. No piece crosses a border of a segment: one that does is refused like one beyond the region.

A transport that shares only memory of its own making, as shm and NCCL's stand-in do, adopts none.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pdflow.protocol.values import Value
from pdflow_runtime.transports.base import Transport, TransportError


class Segment(Value, frozen=True, gc=False):
    """A run of bytes at an address of this process, or of one of its GPUs. It must outlive the agent that adopts it."""

    address: int
    nbytes: int
    gpu: int | None = None
    """The number of the GPU that it lies on; None for the memory of this process."""


@runtime_checkable
class Adopting(Protocol):
    """A kind of agent that can use memory which it has not allocated."""

    def adopt(self, segments: Sequence[Segment], own_bytes: int) -> memoryview:
        """Use these segments as this agent's region, once, in place of `allocate`. Return `own_bytes` of zeroed memory
        of the agent's own, which begin at the offset `own_start(segments)`. TransportError."""


def adopt(transport: Transport, segments: Sequence[Segment], own_bytes: int) -> memoryview:
    """Have a transport use memory that somebody else has allocated; see `Adopting.adopt`. TransportError."""
    if not isinstance(transport, Adopting):
        raise TransportError(f"{transport.name} shares only memory that it has allocated itself; use nixl or tcp")
    return transport.adopt(segments, own_bytes)


def own_start(segments: Sequence[Segment]) -> int:
    """Return the offset at which the agent's own memory begins: that of the first page behind the segments."""
    return -(-sum(segment.nbytes for segment in segments) // mmap.PAGESIZE) * mmap.PAGESIZE

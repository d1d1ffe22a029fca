"""An agent over memory that somebody else has allocated: segments of it, and behind them some of the agent's own.

The region's offsets count through the segments, one behind the other, whatever their addresses. The agent's own memory
begins at the next page. No piece crosses a border of a segment: one that does is refused like one beyond the region.

A transport that shares only memory of its own making, as shm and NCCL's stand-in do, adopts none.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from pdflow.protocol.values import Value
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports.base import Transport, TransportError
from pdflow_runtime.transports.copying import RegionBase
from pdflow_runtime.transports.segments import DescribedSegment, parse_segments
from pdflow_runtime.transports.streams.messages import WORD_BYTES


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
        raise cannot_adopt(transport.name)
    return transport.adopt(segments, own_bytes)


def cannot_adopt(name: str) -> TransportError:
    return TransportError(
        f"transport {name} cannot adopt memory: it shares only what it has allocated; use nixl, tcp, or cuda-ipc for "
        "memory of a GPU"
    )


def own_start(segments: Sequence[Segment]) -> int:
    """Return the offset at which the agent's own memory begins: that of the first page behind the segments."""
    return -(-_starts(segments)[-1] // mmap.PAGESIZE) * mmap.PAGESIZE


def is_within_one(segments: Sequence[Segment], offset: int, nbytes: int) -> bool:
    """True if so many bytes from an offset on lie within one segment."""
    starts = _starts(segments)
    number = bisect_right(starts, offset)
    return 0 < number < len(starts) and offset + nbytes <= starts[number]


def _starts(segments: Sequence[Segment]) -> list[int]:
    """Return the offset at which each segment begins, and the one at which the last one ends."""
    return list(accumulate((segment.nbytes for segment in segments), initial=0))


class AdoptedRegion(RegionBase):
    """A region of adopted segments, with memory of the agent's own behind them. TransportError for what cannot be
    one."""

    __slots__ = ("adopted", "described", "host_views", "map", "own")

    def __init__(self, segments: Sequence[Segment], own: memoryview) -> None:
        if not segments:
            raise TransportError("no segment to adopt")
        described = [
            DescribedSegment(start, segment.nbytes, segment.address, segment.gpu)
            for start, segment in zip(_starts(segments), segments, strict=False)
        ]
        if len(own):
            described.append(DescribedSegment(own_start(segments), len(own), address_of(own)))
        found = parse_segments(described, described[-1].start + described[-1].nbytes)
        if isinstance(found, Malformed):
            raise TransportError(f"cannot adopt this memory: {found.reason}")
        super().__init__(found.nbytes, found)
        self.adopted: Final = tuple(segments)
        self.own: Final = own
        self.described: Final = tuple(described)
        self.map: Final = found
        self.host_views: Final = [*(_foreign(segment) if segment.gpu is None else None for segment in segments), own]
        """The memory of each segment, and the agent's own; None for a segment on a GPU."""

    def word_value(self, address: int) -> int | None:
        """Return the word at this address; None where no word can be, and on a GPU: words lie in memory of the
        process."""
        if address % WORD_BYTES or not 0 <= address <= self.nbytes - WORD_BYTES:
            return None
        if self.map.is_crossed([address], [WORD_BYTES]):
            return None
        index = self.map.index(address)
        view, at = self.host_views[index], address - self.map.starts[index]
        return None if view is None else int.from_bytes(view[at : at + WORD_BYTES], "little")


class MappedSegments(AdoptedRegion):
    """The same where all of it is memory of this process."""

    __slots__ = ("_views",)

    def __init__(self, segments: Sequence[Segment], own: memoryview) -> None:
        super().__init__(segments, own)
        self._views: Final = [view for view in self.host_views if view is not None]
        assert len(self._views) == len(self.host_views), "a segment lies on a GPU"

    def views(self, offsets: list[int], lengths: list[int]) -> Iterable[memoryview]:
        """Return these pieces of it, but for those of no length."""
        found, starts, views = self.map.indices(offsets), self.map.starts, self._views
        return (
            views[index][at - starts[index] : at - starts[index] + length]
            for index, at, length in zip(found, offsets, lengths, strict=True)
            if length
        )


def address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _foreign(segment: Segment) -> memoryview:
    """Return a view of memory that is not ours, by its address."""
    raw: Any = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
    array: Any = np.frombuffer(raw, np.uint8)  # A view of `raw` has a format that no stream takes.
    return memoryview(array)

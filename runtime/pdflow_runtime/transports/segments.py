"""The segments of a region: which of its offsets lie in which, and at what addresses these are.

A region in one segment is bounded by its length alone. One in several is bounded by each of them: a piece that crosses
a border, or lies between two segments, is outside the region. What a peer says of its segments is checked here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import add
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from pdflow.protocol.values import Value
from pdflow.protocol.wire.limits import MAX_U63, MAX_U64
from pdflow.protocol.wire.malformed import Malformed, malformed

MAX_SEGMENTS: Final = 4_096
"""The most segments of one region. A model with 128 layers, K and V apart, in allocations of their own, has 257."""
MAX_GPU: Final = 999
FEW: Final = 32
"""The number of pieces up to which bisecting for each is faster than a search in an array."""


class DescribedSegment(Value, frozen=True, gc=False, array_like=True):
    """A segment as peers are told of it: its first offset in the region, and where its bytes lie if they can be fetched
    from there."""

    start: int
    nbytes: int
    address: int = 0
    gpu: int | None = None


DescribedSegments: TypeAlias = Annotated[tuple[DescribedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class SegmentMap:
    """The segments of a region, in ascending order and without overlap, the first at offset 0."""

    __slots__ = ("_ends", "_gpus", "_last", "_shifts", "_starts", "ends", "nbytes", "starts")

    def __init__(self, described: Sequence[DescribedSegment]) -> None:
        self.starts: Final = [segment.start for segment in described]
        self.ends: Final = [segment.start + segment.nbytes for segment in described]
        self.nbytes: Final = self.ends[-1]
        self._last: Final = len(described) - 1
        self._starts: Final = np.array(self.starts, np.uint64)
        self._ends: Final = np.array(self.ends, np.uint64)
        # Modulo 2**64, as an address may be less than an offset.
        shifts = [(segment.address - segment.start) & MAX_U64 for segment in described]
        self._shifts: Final = np.array(shifts, np.uint64)
        self._gpus: Final = np.array([-1 if s.gpu is None else s.gpu for s in described], np.int64)

    def index(self, offset: int) -> int:
        """Return which segment an offset lies in, or behind which."""
        return bisect_right(self.starts, offset) - 1

    def indices(self, offsets: list[int]) -> list[int]:
        """Return the same of several offsets."""
        if len(offsets) <= FEW:
            return [self.index(offset) for offset in offsets]
        found: list[int] = self._indices(np.array(offsets, np.uint64)).tolist()
        return found

    def _indices(self, offsets: Any) -> Any:
        return np.searchsorted(self._starts, offsets, "right") - 1

    def is_crossed(self, offsets: Any, lengths: Any) -> bool:
        """True if one of these pieces is not within one segment. All are known to end within the region, so that no sum
        passes 64 bits. Lists, or arrays of u64."""
        if not self._last:
            return False
        if isinstance(offsets, list):
            ends = self.ends
            return any(end > ends[self.index(at)] for at, end in zip(offsets, map(add, offsets, lengths), strict=True))
        return bool((offsets + lengths > self._ends[self._indices(offsets)]).any())

    def addresses(self, offsets: Any) -> tuple[Any, Any]:
        """Return the addresses of these offsets, as an array of u64, and the GPU of each, -1 for a process's memory."""
        if not self._last:
            return offsets + self._shifts[0], np.full(len(offsets), self._gpus[0])
        index = self._indices(offsets)
        return offsets + self._shifts[index], self._gpus[index]


Extent: TypeAlias = int | SegmentMap
"""The bounds of pieces: the length of a region in one segment, or the segments of one in several."""


def parse_segments(described: Sequence[DescribedSegment], nbytes: int) -> SegmentMap | Malformed:
    """Return the segments of a region of so many bytes; Malformed if a peer describes what cannot be."""
    if not 0 < len(described) <= MAX_SEGMENTS:
        return malformed(f"a memory of {len(described)} segments; 1 to {MAX_SEGMENTS:,} are allowed")
    end = 0
    for number, segment in enumerate(described):
        if segment.start < end or (number == 0 and segment.start):
            return malformed(f"segment {number} of a memory begins at {segment.start}, expected {end} or later")
        end = segment.start + segment.nbytes
        if segment.nbytes < 1 or end > MAX_U63:
            return malformed(f"segment {number} of a memory has {segment.nbytes} bytes")
        if segment.address < 0 or segment.address + segment.nbytes > MAX_U64:
            return malformed(f"segment {number} of a memory cannot begin at {segment.address}")
        if segment.gpu is not None and not 0 <= segment.gpu <= MAX_GPU:
            return malformed(f"segment {number} of a memory lies on GPU {segment.gpu}")
    if end != nbytes:
        return malformed(f"a memory of {nbytes} bytes whose segments end at {end}")
    return SegmentMap(described)

"""Copying pieces between two mapped regions, in a thread where it is long, so that it can be halted; in two where
pieces are large, since one core moves less than memory bears.

A copy that was halted must be waited for all the same: only after its end does no byte of it land. Between two looks at
`halted` some BATCH_BYTES are copied, or one piece.

The KV of a prompt is the same list of pieces for each layer, at equal distances: so many layers of one block are one
array with a stride on each side, and numpy copies them in one call. What is no such list goes piece by piece.

Python's lock is kept but for large pieces. Giving it up for every piece lets an engine's thread that computes in Python
take it for 5 ms each time, and a thousand pieces take seconds; kept, it is asked for and given between batches. numpy
keeps it for arrays of up to 500 elements, however large each of them is.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from operator import add
from typing import Final

import numpy as np
import trio

from pdflow_runtime.transports.segments import Extent
from pdflow_runtime.transports.streams.messages import FEW_PIECES, PackedPieces, word_at

INLINE_BYTES: Final = 512 << 10
INLINE_PIECES: Final = 256
"""The most pieces of a copy that takes no longer than handing it to a thread."""
BATCH_PIECES: Final = 16
LARGE_BYTES: Final = 2 << 20
"""The size of a large piece, which takes some 0.1 ms."""
HANDS: Final = min(2, os.cpu_count() or 1)
"""Threads that share large pieces."""
BATCH_BYTES: Final = BATCH_PIECES * LARGE_BYTES
WORTH_REPEATS: Final = 8
"""The least repeats of a list of pieces with which one call for all of them is cheaper than one for each."""
LOCKED_ELEMENTS: Final = 500
"""numpy's own bound (NPY_BEGIN_THREADS_THRESHOLDED)."""


class RegionBase:
    """A region by its length, and the bounds of what may be moved to and from it."""

    __slots__ = ("extent", "nbytes")

    def __init__(self, nbytes: int, extent: Extent) -> None:
        self.nbytes: Final = nbytes
        self.extent: Final = extent


class Mapped(RegionBase):
    """A region in one segment that is mapped in this process."""

    __slots__ = ("address", "view")

    def __init__(self, view: memoryview) -> None:
        super().__init__(len(view), len(view))
        self.address: Final = np.frombuffer(view, np.uint8).ctypes.data
        self.view: Final = view

    def views(self, offsets: list[int], lengths: list[int]) -> Iterable[memoryview]:
        """Return these pieces of it, but for those of no length."""
        view = self.view
        return (view[at : at + length] for at, length in zip(offsets, lengths, strict=True) if length)

    def word_value(self, address: int) -> int | None:
        """Return the word at this address; None where no word can be."""
        return word_at(self.view, address)


class Motion(ABC):
    """A transfer of bytes into our memory, for a guest or a link. Bounds have been checked."""

    __slots__ = ("failed", "generation", "halted", "owner", "peer")

    def __init__(self, owner: object, peer: str, generation: int) -> None:
        self.owner: Final = owner
        self.peer: Final = peer
        self.generation: Final = generation
        self.halted = False
        """True if the bytes are not wanted any more: the motion ends as soon as it can."""
        self.failed = False
        """True if the bytes were wanted and could not be had: their owner cannot be reached as it was."""

    def halt(self) -> None:
        self.halted = True

    @property
    def landed(self) -> bool:
        """True if all of it has landed without being halted in between. To be asked when the motion has ended."""
        return not (self.halted or self.failed)

    @abstractmethod
    async def run(self) -> None:
        """Move the bytes. Returns when none moves any more; `halted` then, if not all have landed, or `failed`."""


class Copy(Motion):
    __slots__ = ("_pieces", "_source", "_target")

    def __init__(
        self, owner: object, peer: str, generation: int, source: Mapped, target: Mapped, pieces: PackedPieces
    ) -> None:
        super().__init__(owner, peer, generation)
        self._source, self._target, self._pieces = source, target, pieces

    async def run(self) -> None:
        if self._pieces.nbytes <= INLINE_BYTES and self._pieces.number <= INLINE_PIECES:
            self.copy()
        elif are_large(self._pieces):
            async with trio.open_nursery() as nursery:
                for hand in range(HANDS):
                    nursery.start_soon(trio.to_thread.run_sync, self._copy_share, hand)
        else:
            await trio.to_thread.run_sync(self.copy)

    def copy(self) -> None:
        count = repeats(self._pieces)
        if count < WORTH_REPEATS:
            self._copy_each()
        else:
            self._copy_repeated(count)

    def _copy_each(self) -> None:
        source, target = self._source.view, self._target.view
        sources, targets, lengths = self._pieces.lists()
        for start in range(0, len(lengths), BATCH_PIECES):
            if self.halted:
                return
            batch = slice(start, start + BATCH_PIECES)
            at, to, sizes = sources[batch], targets[batch], lengths[batch]
            if max(sizes) < LARGE_BYTES:
                found = map(source.__getitem__, map(slice, at, map(add, at, sizes)))
                deque(map(target.__setitem__, map(slice, to, map(add, to, sizes)), found), maxlen=0)
                continue
            for piece in zip(at, to, sizes, strict=True):
                if self.halted:
                    return
                self._copy_large(*piece)

    def _copy_share(self, hand: int) -> None:
        """Copy one thread's share, of HANDS, of each piece; the pieces are large."""
        for at, to, size in zip(*self._pieces.lists(), strict=True):
            if self.halted:
                return
            begin, end = size * hand // HANDS, size * (hand + 1) // HANDS
            self._copy_large(at + begin, to + begin, end - begin)

    def _copy_large(self, at: int, to: int, size: int) -> None:
        """Copy bytes as elements, so that numpy gives up the lock."""
        np.copyto(np.ndarray(size, np.uint8, self._target.view, to), np.ndarray(size, np.uint8, self._source.view, at))

    def _copy_repeated(self, count: int) -> None:
        """Copy the same pieces `count` times."""
        source, target = self._source.view, self._target.view
        lists = self._pieces.columns().reshape(3, count, -1)
        source_stride, target_stride = (lists[:2, 1, 0] - lists[:2, 0, 0]).tolist()
        for at, to, size in zip(*lists[:, 0].tolist(), strict=True):
            whole = np.dtype((np.void, size))
            step = max(1, min(LOCKED_ELEMENTS, BATCH_BYTES // max(size, 1)))
            for first in range(0, count, step):
                if self.halted:
                    return
                shape = min(step, count - first)
                here = np.ndarray(shape, whole, source, at + first * source_stride, source_stride)
                there = np.ndarray(shape, whole, target, to + first * target_stride, target_stride)
                np.copyto(there, here)


def are_large(pieces: PackedPieces) -> bool:
    """True if the pieces are large on average."""
    return pieces.nbytes >= pieces.number * LARGE_BYTES


def repeats(pieces: PackedPieces) -> int:
    """Return how many times these are the same pieces, each time as much further on at either side; 1 if they are not.

    1 also where it would be of no use, for few pieces and large ones.
    """
    length = pieces.number
    if length <= FEW_PIECES or are_large(pieces):
        return 1
    table = pieces.columns()
    periods = np.arange(1, length // WORTH_REPEATS + 1)
    periods = periods[length % periods == 0]
    first, second, third = table[:, :1], table[:, periods], table[:, 2 * periods]
    for period in periods[(third - second == second - first).all(axis=0)].tolist():
        lists = table.reshape(3, -1, period)
        source_stride, target_stride, longer = further = lists[:, 1, 0] - lists[:, 0, 0]
        forward = 0 < source_stride < 1 << 63 and 0 < target_stride < 1 << 63 and longer == 0
        if forward and (np.diff(lists, axis=1) == further[:, None, None]).all():
            return length // int(period)
    return 1

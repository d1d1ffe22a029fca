"""Copying pieces between two mapped regions, in a thread where it is long, so that it can be halted.

Whoever halts a copy must wait for its end all the same: only then does no byte of it land. Between two looks at
`halted` some BATCH_BYTES are copied, or one piece.

Python's lock is kept but for large pieces. Giving it up for every piece lets an engine's thread that computes in Python
take it for 5 ms each time, and a thousand pieces take seconds; kept, it is asked for and given between batches.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

import numpy as np
import trio

from runtime.transports.messages import Pieces

INLINE_BYTES: Final = 512 << 10
INLINE_PIECES: Final = 256
"""Up to here a copy takes no longer than handing it to a thread."""
BATCH_PIECES: Final = 16
LARGE_BYTES: Final = 2 << 20
"""Of one piece, some 0.1 ms."""
BATCH_BYTES: Final = BATCH_PIECES * LARGE_BYTES


def _memmove(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


_memmove_unlocked: Final = _memmove(ctypes.CDLL(None))
_memmove_locked: Final = _memmove(ctypes.PyDLL(None))


class Memory:
    """Where a region begins, in this process or on its GPU."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes


class Mapped(Memory):
    """Memory that is mapped here."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        super().__init__(np.frombuffer(view, np.uint8).ctypes.data, len(view))
        self.view: Final = view


class Motion(ABC):
    """Bytes on their way into our memory, for a guest or a link. Bounds have been checked."""

    __slots__ = ("failed", "generation", "halted", "owner", "peer")

    def __init__(self, owner: object, peer: str, generation: int) -> None:
        self.owner: Final = owner
        self.peer: Final = peer
        self.generation: Final = generation
        self.halted = False
        """Nobody wants it any more: end it as soon as may be."""
        self.failed = False
        """It was wanted, and its bytes were not to be had: who has them cannot be reached as it was."""

    def halt(self) -> None:
        self.halted = True

    @property
    def landed(self) -> bool:
        """Asked when it has ended: all of it, with nobody against it in between."""
        return not (self.halted or self.failed)

    @abstractmethod
    async def run(self) -> None:
        """Returns when none of its bytes moves any more; `halted` then, if not all have landed, or `failed`."""


class Copy(Motion):
    __slots__ = ("_pieces", "_source", "_target")

    def __init__(
        self, owner: object, peer: str, generation: int, source: Memory, target: Memory, pieces: Pieces
    ) -> None:
        super().__init__(owner, peer, generation)
        # Kept for as long as this lives, and with them the memory behind the addresses.
        self._source, self._target, self._pieces = source, target, pieces

    async def run(self) -> None:
        if self._pieces.nbytes <= INLINE_BYTES and len(self._pieces.lengths) <= INLINE_PIECES:
            self.copy()
        else:
            await trio.to_thread.run_sync(self.copy)

    def copy(self) -> None:
        sources, targets, lengths, _ = self._pieces
        from_address, to_address = self._source.address, self._target.address
        for start in range(0, len(lengths), BATCH_PIECES):
            if self.halted:
                return
            batch = slice(start, start + BATCH_PIECES)
            sizes = lengths[batch]
            at = [from_address + source for source in sources[batch]]
            to = [to_address + target for target in targets[batch]]
            if max(sizes) < LARGE_BYTES:
                deque(map(_memmove_locked, to, at, sizes), maxlen=0)
                continue
            for piece in zip(to, at, sizes, strict=True):
                if self.halted:
                    return
                _memmove_unlocked(*piece)

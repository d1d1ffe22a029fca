"""Copying pieces between two mapped regions, in a thread where it is long, so that it can be halted.

Between two looks at `halted` at most STRIDE_BYTES are copied. Whoever halts a copy must wait for its end all the same:
only then does no byte of it land.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import trio

from runtime.transports.messages import Pieces

STRIDE_BYTES: Final = 8 << 20
"""Copied without a look at `halted`: under a millisecond."""
WITHOUT_GIL_BYTES: Final = 16 << 10
"""From here on a call through ctypes, which lets other threads run, costs no more than a slice assignment."""
INLINE_BYTES: Final = 256 << 10
INLINE_PIECES: Final = 256
"""Up to here a copy takes less time than handing it to a thread."""


class Mapped:
    """Memory that is mapped here, with the address of its first byte in this process."""

    __slots__ = ("address", "nbytes", "view")

    def __init__(self, view: memoryview) -> None:
        self.view: Final = view
        self.nbytes: Final = len(view)
        self.address: Final[int] = np.frombuffer(view, np.uint8).ctypes.data


class Copy:
    """One WRITE's or READ's pieces on their way, for a guest or a link. Bounds have been checked."""

    __slots__ = ("_pieces", "_source", "_target", "generation", "halted", "owner", "peer")

    def __init__(
        self, owner: object, peer: str, generation: int, source: Mapped, target: Mapped, pieces: Pieces
    ) -> None:
        self.owner: Final = owner
        self.peer: Final = peer
        self.generation: Final = generation
        self.halted = False
        self._source, self._target, self._pieces = source, target, pieces

    async def run(self) -> None:
        if self._pieces.nbytes <= INLINE_BYTES and len(self._pieces.lengths) <= INLINE_PIECES:
            self.copy()
        else:
            await trio.to_thread.run_sync(self.copy)

    def copy(self) -> None:
        source, target = self._source.view, self._target.view
        from_address, to_address = self._source.address, self._target.address
        for at, to, length in zip(*self._pieces[:3], strict=True):
            if self.halted:
                return
            if length < WITHOUT_GIL_BYTES:
                target[to : to + length] = source[at : at + length]
                continue
            for done in range(0, length, STRIDE_BYTES):
                if self.halted:
                    return
                ctypes.memmove(to_address + to + done, from_address + at + done, min(STRIDE_BYTES, length - done))

"""A buffer of named entries up to a threshold of bytes, which spills or refuses the entries beyond it.

It is P2P NCCL's `kv_buffer_size`: D's buffer for entries that P's put. It decides what stays on the GPU and what
doesn't. It doesn't decide when an entry is no longer needed, nor what becomes of a request that has lost one: an entry
is refused by an answer, and its request has to be computed again as a whole.

Each name has one owner of its bytes, here, and is dropped once: #18242 counted down at two places. A name that comes
again while it is there is the caller's mistake, since only the caller knows whether a peer repeats itself.

Source: vLLM #18242, `p2p_nccl_engine.py`. There an entry that spills is on the GPU until it is
copied; here it is counted in one place only; a model of that moment has to add it.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final

from pdflow.memory.buddy import BuddyPool
from pdflow.memory.paged import PoolError


class Where(Enum):
    """The place of an entry."""

    BUFFER = "buffer"
    POOL = "pool"
    NOWHERE = "nowhere"


class ThresholdBuffer:
    """Holds entries up to `threshold_bytes`; beyond, the newest goes to a pool of the buffer's own, or is refused.

    An entry in the buffer is never moved out to make space.
    """

    __slots__ = ("_buffered", "_spilled", "pool", "threshold_bytes", "used_bytes")

    def __init__(self, threshold_bytes: int, pool: BuddyPool | None = None) -> None:
        if threshold_bytes < 0:
            raise PoolError(f"a buffer of {threshold_bytes} bytes: it must be 0 or more")
        self.threshold_bytes: Final = threshold_bytes
        self.pool: Final = pool
        self.used_bytes = 0
        """Bytes used of the buffer; the pool counts its own."""
        self._buffered: dict[Hashable, int] = {}
        self._spilled: dict[Hashable, int] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._buffered or name in self._spilled

    def put(self, name: Hashable, size_bytes: int) -> Where:
        """Keep an entry where there is space, and return where. NOWHERE, and nothing changed, if there is none.

        O(1), and O(log n) if it spills. Raises PoolError if the name is there already.
        """
        if name in self:
            raise PoolError(f"put: {name!r} is here already")
        if size_bytes < 1:
            raise PoolError(f"put: {name!r} with {size_bytes} bytes: it must be 1 or more")
        if self.used_bytes + size_bytes <= self.threshold_bytes:
            self._buffered[name] = size_bytes
            self.used_bytes += size_bytes
            return Where.BUFFER
        if self.pool is None or size_bytes > self.pool.greatest_bytes:
            return Where.NOWHERE
        address = self.pool.allocate(size_bytes)
        if address is None:
            return Where.NOWHERE
        self._spilled[name] = address
        return Where.POOL

    def address(self, name: Hashable) -> int | None:
        """Return where an entry lies in the pool; None if it is in the buffer. Raises PoolError if it is not here."""
        if name not in self:
            raise PoolError(f"address: no entry {name!r}")
        return self._spilled.get(name)

    def drop(self, name: Hashable) -> Where:
        """Forget an entry, and return where it was. Raises PoolError if it is not here."""
        size = self._buffered.pop(name, 0)
        if size:
            self.used_bytes -= size
            return Where.BUFFER
        address = self._spilled.pop(name, None)
        if address is None or self.pool is None:
            raise PoolError(f"drop: no entry {name!r}")
        self.pool.release(address)
        return Where.POOL

    def fork(self) -> ThresholdBuffer:
        other = ThresholdBuffer(self.threshold_bytes, None if self.pool is None else self.pool.fork())
        other.used_bytes = self.used_bytes
        other._buffered = self._buffered.copy()
        other._spilled = self._spilled.copy()
        return other

    def fingerprint(self) -> Hashable:
        pool = None if self.pool is None else self.pool.fingerprint()
        return frozenset(self._buffered.items()), frozenset(self._spilled.items()), pool

"""Named entries within a threshold of bytes: one buffer that sends what is too much elsewhere, one that forgets.

Both are P2P NCCL's `kv_buffer_size`: D's buffer for what P's put, and P's store of what D's will get. They decide what
stays on the GPU and what doesn't. They don't decide when an entry is no longer needed, nor what becomes of a request
that has lost one: an entry is refused by an answer, and its request has to be computed again as a whole.

Each name has one owner of its bytes, here, and is dropped once: #18242 counted down at two places. A name that comes
again while it is there is the caller's mistake, since only the caller knows whether a peer repeats itself.

Source: PR #18242, SEED_SYSTEMS section 1, memory rules 1, 2 and 4. There an entry that spills is on the GPU until it is
copied; here it is counted in one place only, and whoever models that moment adds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from typing import Final, Generic, TypeVar

from pdflow.memory.buddy import BuddyPool
from pdflow.memory.paged import PoolError

Name = TypeVar("Name", bound=Hashable)


class Where(Enum):
    """Where an entry is."""

    BUFFER = "buffer"
    POOL = "pool"
    NOWHERE = "nowhere"


class ThresholdBuffer:
    """Entries up to `threshold_bytes`; beyond, the newest goes to a pool of the buffer's own, or is refused.

    What is in the buffer is never moved out to make room.
    """

    __slots__ = ("_buffered", "_spilled", "pool", "threshold_bytes", "used_bytes")

    def __init__(self, threshold_bytes: int, pool: BuddyPool | None = None) -> None:
        if threshold_bytes < 0:
            raise PoolError(f"a buffer of {threshold_bytes} bytes: it must be 0 or more")
        self.threshold_bytes: Final = threshold_bytes
        self.pool: Final = pool
        self.used_bytes = 0
        """Of the buffer; the pool counts its own."""
        self._buffered: dict[Hashable, int] = {}
        self._spilled: dict[Hashable, int] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._buffered or name in self._spilled

    def put(self, name: Hashable, size_bytes: int) -> Where:
        """Keep an entry where there is room. NOWHERE, and nothing changed, if there is none.

        O(1), and O(log n) if it spills. Raises PoolError if the name is there already.
        """
        _demand_new(name, name in self, size_bytes)
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
        """Where an entry lies in the pool; None if it is in the buffer. Raises PoolError if it is not here."""
        if name not in self:
            raise PoolError(f"address: no entry {name!r}")
        return self._spilled.get(name)

    def drop(self, name: Hashable) -> Where:
        """Forget an entry, and say where it was. Raises PoolError if it is not here."""
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


class LruStore(Generic[Name]):
    """Entries up to `threshold_bytes`; a new one makes the least recently used go, but none that is being sent.

    An entry is used from `hold` to `unhold`, and most recently when the last of those that hold it lets go.
    """

    __slots__ = ("_held", "_idle", "held_bytes", "threshold_bytes", "used_bytes")

    def __init__(self, threshold_bytes: int) -> None:
        if threshold_bytes < 0:
            raise PoolError(f"a store of {threshold_bytes} bytes: it must be 0 or more")
        self.threshold_bytes: Final = threshold_bytes
        self.used_bytes = 0
        self.held_bytes = 0
        """Of entries that are being sent, which are among those used."""
        self._idle: OrderedDict[Name, int] = OrderedDict()
        # Apart from the others, so that making room never looks at what must stay.
        self._held: dict[Name, tuple[int, int]] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._idle or name in self._held

    def put(self, name: Name, size_bytes: int) -> tuple[Name, ...] | None:
        """Keep an entry: the names that had to go for it, oldest use first. None, and nothing changed, if what is being
        sent leaves no room for it. O(1) amortised: each entry goes once.

        Raises PoolError if the name is there already.
        """
        _demand_new(name, name in self, size_bytes)
        if self.held_bytes + size_bytes > self.threshold_bytes:
            return None
        gone: list[Name] = []
        while self.used_bytes + size_bytes > self.threshold_bytes:
            oldest, size = self._idle.popitem(last=False)
            self.used_bytes -= size
            gone.append(oldest)
        self._idle[name] = size_bytes
        self.used_bytes += size_bytes
        return tuple(gone)

    def hold(self, name: Name) -> bool:
        """Begin to send an entry; False if it is not here. Several may hold one."""
        size = self._idle.pop(name, 0)
        if size:
            self._held[name] = (size, 1)
            self.held_bytes += size
            return True
        if name not in self._held:
            return False
        size, holders = self._held[name]
        self._held[name] = (size, holders + 1)
        return True

    def unhold(self, name: Name) -> None:
        """It has been sent. Raises PoolError if nobody holds it."""
        if name not in self._held:
            raise PoolError(f"unhold: nobody holds {name!r}")
        size, holders = self._held[name]
        if holders > 1:
            self._held[name] = (size, holders - 1)
        else:
            del self._held[name]
            self.held_bytes -= size
            self._idle[name] = size

    def drop(self, name: Name) -> None:
        """Forget an entry that nobody holds. Raises PoolError for any other."""
        size = self._idle.pop(name, 0)
        if not size:
            raise PoolError(f"drop: {name!r} is {'being sent' if name in self._held else 'not here'}")
        self.used_bytes -= size

    def fork(self) -> LruStore[Name]:
        other: LruStore[Name] = LruStore(self.threshold_bytes)
        other.used_bytes, other.held_bytes = self.used_bytes, self.held_bytes
        other._idle = self._idle.copy()
        other._held = self._held.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The order of use matters, that of the names that are held doesn't."""
        return tuple(self._idle.items()), frozenset(self._held.items())


def _demand_new(name: Hashable, known: bool, size_bytes: int) -> None:
    if known:
        raise PoolError(f"put: {name!r} is here already")
    if size_bytes < 1:
        raise PoolError(f"put: {name!r} with {size_bytes} bytes: it must be 1 or more")

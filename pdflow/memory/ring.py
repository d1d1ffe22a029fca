"""A ring of bytes for parts of KV caches in host memory: allocated in order, released in any order.

It decides where a part lies, whether another request may begin, and when writers that were stopped go on. It does not
decide in what order requests wait (let the first go first: skipping it would starve it), nor when no write can reach a
part any more, which `pdflow.protocol` does.

A part is contiguous. What doesn't fit before the end goes to the next lap, and the skipped tail is lost until the ring
has moved past it. Only the oldest part holds the ring up: bytes given back behind it are `stranded`. A part is
identified by its position, which grows for ever; `offset` is where it lies. So a position given back twice is noticed,
although others lie there by then. An empty ring goes on at the start of a lap: no request that it could hold waits for
ever.

A request reserves what all its parts take before the first is placed. Parts of requests none of which is complete would
otherwise fill the ring, and nothing could ever be given back. What is reserved can be placed whatever happens, in any
cut and any interleaving: in all that is reserved the end of the ring is met at most once, and what may be skipped there
is kept free. `take` places without a reservation, as #18332 does: only in what is left by those that have one.

Source: RingBufferAllocator of vLLM #18332. There the low watermark is the position of the oldest
part; marks at which writers stop and go on are ours, and `high_bytes` = capacity, `low_bytes` = one step less is it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from pdflow.memory.paged import PoolError


class Ring:
    """The ring: `free + held + stranded + skipped + reserved` bytes are its capacity. Sizes are rounded up to whole
    steps.

    `pressed` is back-pressure: from when `high_bytes` or more are not free until `low_bytes` or fewer are, no request
    may begin; those that have begun go on. `greatest_bytes` bounds one part, and so what may be skipped.
    """

    __slots__ = (
        "_lap",
        "_live",
        "_reserved",
        "capacity_bytes",
        "greatest_bytes",
        "head",
        "held_bytes",
        "high_bytes",
        "low",
        "low_bytes",
        "pressed",
        "reserved_bytes",
        "skipped_bytes",
        "step_bytes",
    )

    def __init__(
        self, capacity_bytes: int, *, step_bytes: int, greatest_bytes: int, high_bytes: int, low_bytes: int
    ) -> None:
        if step_bytes < 1 or capacity_bytes < step_bytes or capacity_bytes % step_bytes:
            raise PoolError(f"a ring of {capacity_bytes} bytes: it must be one or more steps of {step_bytes}")
        if not step_bytes <= greatest_bytes <= capacity_bytes or greatest_bytes % step_bytes:
            raise PoolError(f"parts of up to {greatest_bytes} bytes: they must be whole steps within the ring")
        if not 0 <= low_bytes < high_bytes <= capacity_bytes:
            raise PoolError(f"marks at {low_bytes} and {high_bytes} bytes: they must rise, and lie within the ring")
        self.capacity_bytes: Final = capacity_bytes
        self.step_bytes: Final = step_bytes
        self.greatest_bytes: Final = greatest_bytes
        self.high_bytes: Final = high_bytes
        self.low_bytes: Final = low_bytes
        # Plain attributes, read only for everyone else.
        self.head = 0
        """Position of the next part, unless it has to skip the end."""
        self.low = 0
        """Position of the oldest part; that of the head if there is none."""
        self.held_bytes = 0
        self.reserved_bytes = 0
        """Bytes reserved for parts that are not placed yet."""
        self.skipped_bytes = 0
        self.pressed = False
        self._lap = 0
        """The position where the lap begins before which `skipped_bytes` lie."""
        self._live: OrderedDict[int, int] = OrderedDict()
        self._reserved: dict[Hashable, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes neither reserved nor behind the oldest part. Some of them may be needed to skip the end."""
        return self.capacity_bytes - (self.head - self.low) - self.reserved_bytes

    @property
    def stranded_bytes(self) -> int:
        """Bytes released, but behind an older part."""
        return self.head - self.low - self.held_bytes - self.skipped_bytes

    def rounded(self, size_bytes: int) -> int:
        """Return the bytes that a part of this size takes; a request needs the sum over its parts."""
        return -(-size_bytes // self.step_bytes) * self.step_bytes

    def offset(self, position: int) -> int:
        """Return where a part lies, from the start of the ring's memory."""
        return position % self.capacity_bytes

    def reserve(self, owner: Hashable, need_bytes: int) -> bool:
        """Reserve all bytes of a request. False, and nothing changed, while the ring is pressed or too full for it.

        Raises PoolError for one that has a reservation, and for more than the ring could ever hold.
        """
        need = self.rounded(need_bytes)
        if owner in self._reserved:
            raise PoolError(f"reserve: {owner!r} has a reservation already")
        if not 0 < need <= self.capacity_bytes:
            raise PoolError(f"reserve: {need_bytes} bytes for {owner!r}, of a ring of {self.capacity_bytes}")
        if not self._fits(need):
            return False
        self._reserved[owner] = need
        self.reserved_bytes += need
        self._heed_marks()
        return True

    def allocate(self, owner: Hashable, size_bytes: int) -> int:
        """Place a request's next part in its reservation, which never fails, and return the part's position.

        Raises PoolError for more than is left of its reservation, and for parts that are too large.
        """
        size = self._sized(size_bytes)
        left = self._reserved.get(owner, 0)
        if size > left:
            raise PoolError(f"allocate: a part of {size} bytes, and {owner!r} has {left} reserved")
        self._reserved[owner] = left - size
        self.reserved_bytes -= size
        return self._put(size)

    def take(self, size_bytes: int) -> int | None:
        """Place a part without a reservation and return its position. None, and nothing changed, if the ring is pressed
        or full."""
        size = self._sized(size_bytes)
        return self._put(size) if self._fits(size) else None

    def unreserve(self, owner: Hashable) -> int:
        """End a reservation and return what is left of it, in bytes. Parts that were placed stay."""
        if owner not in self._reserved:
            raise PoolError(f"unreserve: {owner!r} has no reservation")
        left = self._reserved.pop(owner)
        self.reserved_bytes -= left
        self._heed_marks()
        return left

    def release(self, position: int) -> int:
        """Release a part and return how many bytes this makes free: none while an older part is held. O(1).

        Raises PoolError on a second release and on a position where no part begins.
        """
        size = self._live.pop(position, 0)
        if not size:
            raise PoolError(f"release: no part at {position}; parts lie from {self.low} to {self.head}")
        self.held_bytes -= size
        before = self.head - self.low
        if self._live:
            self.low = next(iter(self._live))
        else:
            self.head = self.low = self.head + -self.head % self.capacity_bytes
        if self.low >= self._lap:
            self.skipped_bytes = 0
        self._heed_marks()
        return before - (self.head - self.low)

    def fork(self) -> Ring:
        other = Ring(
            self.capacity_bytes,
            step_bytes=self.step_bytes,
            greatest_bytes=self.greatest_bytes,
            high_bytes=self.high_bytes,
            low_bytes=self.low_bytes,
        )
        other.head, other.low = self.head, self.low
        other.held_bytes, other.reserved_bytes = self.held_bytes, self.reserved_bytes
        other.skipped_bytes, other._lap = self.skipped_bytes, self._lap
        other.pressed = self.pressed
        other._live = self._live.copy()
        other._reserved = self._reserved.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state, positions unchanged: a caller may still hold one of a lap that is long over."""
        live = tuple(self._live.items())
        return self.head, live, frozenset(self._reserved.items()), self.skipped_bytes, self.pressed

    def _sized(self, size_bytes: int) -> int:
        size = self.rounded(size_bytes)
        if not 0 < size <= self.greatest_bytes:
            raise PoolError(f"a part of {size_bytes} bytes: it must be 1 to {self.greatest_bytes}")
        return size

    def _fits(self, size: int) -> bool:
        """Whether this much can be reserved beside all other reservations, whichever part will meet the end of the
        ring."""
        if self.pressed:
            return False
        promised = self.reserved_bytes + size
        room = self.capacity_bytes - self.head % self.capacity_bytes
        skip = 0 if promised <= room else min(room, self.greatest_bytes - self.step_bytes)
        return self.head - self.low + promised + skip <= self.capacity_bytes

    def _put(self, size: int) -> int:
        room = self.capacity_bytes - self.head % self.capacity_bytes
        if size > room:
            self.head += room
            self._lap = self.head
            self.skipped_bytes = room
        position = self.head
        self._live[position] = size
        self.head += size
        self.held_bytes += size
        assert self.head - self.low + self.reserved_bytes <= self.capacity_bytes
        self._heed_marks()
        return position

    def _heed_marks(self) -> None:
        taken = self.capacity_bytes - self.free_bytes
        if taken >= self.high_bytes:
            self.pressed = True
        elif taken <= self.low_bytes:
            self.pressed = False

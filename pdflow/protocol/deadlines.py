"""Deadlines of one endpoint: a heap of wake-up times that may be too early, never too late.

The authoritative deadline is a field of its cell; the heap only says when to look. A renewal changes the field alone,
and the stale entry is pushed again when it surfaces; an entry of a cell that is gone is dropped. So a timer can neither
leak nor fire for a cell that is gone, which costs at most one wake-up for each timer that is still wanted. A deadline
that moves earlier needs a push of its own. Forks and fingerprints skip the heap: its layout depends on history and
would split equal states.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Instant


class Deadlines:
    __slots__ = ("heap", "pushed")

    def __init__(self) -> None:
        self.heap: list[tuple[Instant, int, Timer]] = []
        self.pushed = 0

    def push(self, at: Instant, timer: Timer) -> None:
        self.pushed += 1
        heappush(self.heap, (at, self.pushed, timer))

    def wake_at(self) -> Instant | None:
        """The instant of the first entry of the heap, possibly too early; None if the heap is empty. O(1)."""
        return self.heap[0][0] if self.heap else None

    def first_due(self, now: Instant, deadline_of: Callable[[Timer], Instant | None]) -> Timer | None:
        """Remove and return the next timer whose deadline, as its cell has it, has passed; None if there is none."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            timer = heappop(heap)[2]
            at = deadline_of(timer)
            if at is None:
                continue
            if at <= now:
                return timer
            self.push(at, timer)
        # Nothing is due: forget the dead at the head too, so that the next wake-up is somebody's.
        while heap and deadline_of(heap[0][2]) is None:
            heappop(heap)
        return None

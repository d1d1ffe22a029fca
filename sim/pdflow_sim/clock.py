"""The queue of what is to happen in a simulated run: callbacks ordered by time, priority and order of scheduling.

It is the queue of a simpy environment (`pdflow_sim.environment` runs simpy's processes on it) without an event object
for each entry: most of a run is callbacks that nothing waits for, and the life cycle of an event costs as much again as
the queue itself.

At one instant, messages and ends of flows come first; then polls, by the engine's index; then deadlines, by the
endpoint's position in its engine (every input that has arrived is handled before a deadline is judged); then the
engines, by index: an engine's own wake-ups differ between the exact mode and the fast one, and must not decide ties
between anything else. Then follows what had to wait for the engines. An idle engine starts last of all, when everything
that happens at that instant is known.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

INPUT = 1
"""simpy's normal priority; its urgent one, 0, is for the beginnings of processes and for interrupts."""
POLL = 2
DEADLINE = 1 << 20
ENGINE = 1 << 21
AFTER_ENGINES = 1 << 40

Callback: TypeAlias = Callable[[Any], None]


class Clock:
    """Simulated time in whole nanoseconds, and the queue of callbacks that move it."""

    def __init__(self) -> None:
        self.now = 0
        self.stopped = False
        self.turns = 0
        """Callbacks called so far."""
        self.background = 0
        """Callbacks to come that only observe: they end when nothing else is to come."""
        self.after_each: Callable[[], None] | None = None
        """Called after each callback of `run`, where a run is checked."""
        self._queue: list[tuple[int, int, int, Callback, Any]] = []
        self._last: list[tuple[int, int, Callback, Any]] = []
        self._scheduled = 0

    def call(self, delay: int, callback: Callback, arg: Any, priority: int = INPUT) -> None:
        """Call `callback(arg)` after `delay` ns."""
        self._scheduled += 1
        heappush(self._queue, (self.now + delay, priority, self._scheduled, callback, arg))

    def call_last(self, callback: Callback, arg: Any, order: int) -> None:
        """Call `callback(arg)` at this instant, when nothing else is left to happen at it; the lowest order first."""
        self._scheduled += 1
        heappush(self._last, (order, self._scheduled, callback, arg))

    @property
    def pending(self) -> int:
        """Callbacks that are still to come."""
        return len(self._queue) + len(self._last)

    @property
    def has_work(self) -> bool:
        """Whether anything is to come but background callbacks."""
        return self.pending > self.background

    @property
    def next_at(self) -> int | None:
        """When the next callback is due; None if nothing is to come."""
        if self._last:
            return self.now
        return self._queue[0][0] if self._queue else None

    def real(self, duration_ns: int) -> int:
        """Return the simulated time until this clock has advanced by `duration_ns`: the same, but for a clock of
        `pdflow_sim.faults.clock_skew`.
        """
        return duration_ns

    def stop(self) -> None:
        """Make `run` return after the current callback."""
        self.stopped = True

    def step(self) -> bool:
        """Call the next callback. False if there is none."""
        queue, last = self._queue, self._last
        if last and (not queue or queue[0][0] > self.now):
            _, _, callback, arg = heappop(last)
        elif queue:
            self.now, _, _, callback, arg = heappop(queue)
        else:
            return False
        self.turns += 1
        callback(arg)
        return True

    def run(self) -> None:
        """Call what is to come until `stop` is called or nothing is left."""
        self.stopped = False
        after_each = self.after_each
        while not self.stopped and self.step():
            if after_each is not None:
                after_each()

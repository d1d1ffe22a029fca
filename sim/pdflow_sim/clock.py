"""simpy's clock and queue, with a loop for plain callbacks, and the order of what happens at one instant.

simpy orders equal times by priority, then by the order of scheduling. Messages and ends of flows come first, then
polls by the engine's index, then deadlines by the endpoint's place at its engine (every input that had arrived is
handled before a deadline is judged), then the engines, by index: an engine's own wake-ups differ between the exact mode
and the fast one, and must not decide ties between anything else. Then whoever had to wait for the engines; and an
engine that starts from standing still does so last of all, with everything known that happens at that instant.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

from simpy.core import Environment

INPUT = 1
POLL = 2
DEADLINE = 1 << 20
ENGINE = 1 << 21
AFTER_ENGINES = 1 << 40

Callback: TypeAlias = Callable[[Any], None]


class Clock:
    """simpy's environment, counting whole nanoseconds.

    `call` and `turn` are `schedule` and `run` for callbacks that nobody waits for: the same queue, clock and order,
    without the life cycle of an event object, which costs as much again as the queue itself. A world of ours schedules
    nothing else. The environment is held and not inherited, and its clock, a property, is ours: what is asked dozens of
    times per request is then an attribute that compiled code reads directly.
    """

    def __init__(self) -> None:
        environment: Any = Environment()
        self.now = 0
        self._turns: list[tuple[int, int, int, Callback, Any]] = environment._queue
        self._number: Callable[[], int] = environment._eid.__next__
        self.stopped = False
        self.turns = 0
        """Turns of the queue so far."""
        self.looks = 0
        """Callbacks to come that only look at what is there: they end when nothing else is to come."""
        self._last: list[tuple[int, int, Callback, Any]] = []

    def call(self, delay: int, callback: Callback, about: Any, priority: int = INPUT) -> None:
        """Call `callback(about)` after `delay` ns."""
        heappush(self._turns, (self.now + delay, priority, self._number(), callback, about))

    @property
    def pending(self) -> int:
        """Callbacks that are still to come."""
        return len(self._turns) + len(self._last)

    @property
    def goes_on(self) -> bool:
        """Whether anything is to come but looks."""
        return self.pending > self.looks

    def real(self, duration_ns: int) -> int:
        """How long the world takes until this clock has moved on by that much (`pdflow_sim.faults.clock_skew` has
        others).
        """
        return duration_ns

    def last(self, callback: Callback, about: Any, order: int) -> None:
        """Call `callback(about)` at this instant, when nothing else is left to happen at it; the lowest order first."""
        heappush(self._last, (order, self._number(), callback, about))

    def stop(self) -> None:
        """`turn` returns after this turn."""
        self.stopped = True

    def turn(self) -> None:
        """Take turns until somebody says stop, or nothing is left to happen."""
        queue, last, pop = self._turns, self._last, heappop
        turns = 0
        self.stopped = False
        try:
            while not self.stopped:
                turns += 1
                if last and (not queue or queue[0][0] > self.now):
                    _, _, callback, about = heappop(last)
                elif queue:
                    self.now, _, _, callback, about = pop(queue)
                else:
                    break
                callback(about)
        finally:
            self.turns += turns

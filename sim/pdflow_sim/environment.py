"""simpy's environment on the simulation's own queue: simpy processes beside callbacks, in one order.

The only file that subclasses simpy, by its public interface alone. Everything that happens once per message, step or
request is a callback on `pdflow_sim.clock.Clock`. What happens rarely is a simpy process: client sessions, heartbeats,
scaling, the plan of faults, restarts, the check of liveness.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, cast

import simpy
from simpy.core import EmptySchedule, StopSimulation
from simpy.events import NORMAL, Event, EventPriority

from pdflow_sim.clock import Clock

ProcessSteps: TypeAlias = Generator[Event, Any, None]
"""What a process function returns: it yields the events that it waits for."""


class ClockEnvironment(simpy.Environment):
    """A simpy environment that keeps no queue of its own: `clock` orders its events with all other callbacks.

    Events have simpy's order: by time, priority and order of scheduling. Times and delays are whole nanoseconds.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    @property
    def now(self) -> int:
        """Simulated time, in ns."""
        return self.clock.now

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0) -> None:
        """Trigger the event's callbacks after `delay` ns."""
        self.clock.call(int(delay), self._happen, event, priority)

    def peek(self) -> float:
        """When the next event is due; infinite if there is none."""
        at = self.clock.next_at
        return float("inf") if at is None else at

    def step(self) -> None:
        """Process the next event. Raises EmptySchedule if there is none."""
        if not self.clock.step():
            raise EmptySchedule

    def timeout_at_priority(self, delay_ns: int, priority: int) -> Event:
        """Return a timeout that happens with this priority at its instant (`pdflow_sim.clock` lists priorities)."""
        event = self.event()
        self.clock.call(delay_ns, self._succeed, event, priority)
        return event

    def background_timeout(self, delay_ns: int) -> Event:
        """Return a timeout that does not count as work to come: `Clock.has_work` is false if only such are left."""
        self.clock.background += 1
        event = self.timeout(delay_ns)
        assert event.callbacks is not None
        event.callbacks.append(self._leave_background)
        return event

    def _succeed(self, event: Event) -> None:
        event.succeed()

    def _leave_background(self, _: Event) -> None:
        self.clock.background -= 1

    def _happen(self, event: Event) -> None:
        callbacks = event.callbacks
        # simpy's mark of a processed event: its callbacks are called once, and a process that yields it goes on.
        event.callbacks = cast(Any, None)
        for number, callback in enumerate(callbacks, 1):
            try:
                callback(event)
            except StopSimulation:
                # `run(until=...)` ends here; the event's other callbacks are first when it goes on.
                event.callbacks = callbacks[number:]
                self.schedule(event, EventPriority(-1))
                raise
        if not event.ok and not event.defused:
            raise cast(BaseException, event.value)

"""The turn of an engine: its driver arms a timer for each deadline that is earlier than the one before."""

from __future__ import annotations

from typing import Any

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Instant
from pdflow.serving.core import Core, Port

TIMER = Timer(TimerKind.LEASE, "x")


class Timed:
    """An endpoint that sets a timer for each instant that it is given."""

    timed = True

    def __init__(self) -> None:
        self.deadlines = Deadlines()

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        if event is not None:
            self.deadlines.push(event, TIMER)
        return ()

    def wake_at(self) -> Instant | None:
        return self.deadlines.wake_at()

    def unfinished(self) -> dict[Any, object]:
        return {}


def test_the_driver_is_told_when_the_next_deadline_comes_nearer() -> None:
    armed: list[tuple[Instant, Instant]] = []

    def arm(port: Port, at: Instant, now: Instant) -> None:
        port.armed = at
        armed.append((at, now))

    core, port = Core(), Port("e", Timed(), 1)
    core.add(port)
    core.arm = arm
    for event, now in ((None, 1), (9, 2), (12, 3), (5, 4), (None, 5)):
        core.feed(port, event, now)
    assert armed == [(9, 2), (5, 4)]

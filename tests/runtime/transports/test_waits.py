"""Who flushes one peer several times tells the ends apart by their order."""

from __future__ import annotations

from pdflow_runtime.transports.base import Flushed, TransportEvent
from pdflow_runtime.transports.waits import Waits


def test_a_flush_that_has_failed_waits_for_those_before_it() -> None:
    events: list[TransportEvent] = []
    waits = Waits(events.append)
    waits.flush("d.r0", [1])
    waits.flush("d.r0", [2])
    waits.broke("d.r0", [2])
    assert not events
    waits.ended(1)
    assert events == [Flushed("d.r0", True), Flushed("d.r0", False)]


def test_the_observer_may_flush_again_at_once() -> None:
    events: list[TransportEvent] = []

    def on_event(event: TransportEvent) -> None:
        events.append(event)
        if len(events) < 4:
            waits.flush("d.r0", [])

    waits = Waits(on_event)
    waits.flush("d.r0", [1])
    waits.ended(1)
    assert events == [Flushed("d.r0", True)] * 4

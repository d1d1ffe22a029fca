"""Who flushes one peer several times tells the ends apart by their order."""

from __future__ import annotations

from pdflow_runtime.transports.base import Flushed, TransportEvent
from pdflow_runtime.transports.waits import Waits


def test_a_flush_that_has_failed_waits_for_those_before_it() -> None:
    told: list[TransportEvent] = []
    waits = Waits(told.append)
    waits.flush("d.r0", [1])
    waits.flush("d.r0", [2])
    waits.broke("d.r0", [2])
    assert not told
    waits.ended(1)
    assert told == [Flushed("d.r0", True), Flushed("d.r0", False)]


def test_whoever_is_told_may_flush_again_at_once() -> None:
    told: list[TransportEvent] = []

    def on_event(event: TransportEvent) -> None:
        told.append(event)
        if len(told) < 4:
            waits.flush("d.r0", [])

    waits = Waits(on_event)
    waits.flush("d.r0", [1])
    waits.ended(1)
    assert told == [Flushed("d.r0", True)] * 4

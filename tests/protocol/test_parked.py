"""A driver that stands still while nothing is open: vLLM's EngineCore calls nobody until its next request comes."""

from __future__ import annotations

from pdflow.protocol.events import TimeReached
from pdflow.protocol.values import S
from tests.support.cluster import Cluster


def test_an_overdue_sync_with_nothing_open_fails_no_later_request() -> None:
    c = Cluster()
    c.prefill_and_admit("r1", "x1")
    c.run()
    assert c.outcomes["r1"] == ["COMMITTED"]
    c.now += 3600 * S
    c.prefill_and_admit("r2", "x2")
    c.feed("D", TimeReached())
    c.run()
    assert c.outcomes["r2"] == ["COMMITTED"]
    c.at_rest()


def test_an_overdue_sync_with_something_open_is_handled_after_earlier_events() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r1", "x1")
    c.run()
    c.now += 15 * S
    c.prefill_and_admit("r2", "x2")
    c.feed("D", TimeReached())
    assert c.outcomes["r1"] == ["PEER_DEAD"]
    c.at_rest()

"""The small parts of the connector: its ledger, its clock, its outbox, what a step carries."""

from __future__ import annotations

from typing import get_args

import pytest

from pdflow.protocol.events import FrameOrdered, LocalEvent, PeerResponded, PrefillMissing, ShardReleased
from pdflow.protocol.ids import Reg
from pdflow.protocol.messages import Cancel, Code
from pdflow.protocol.values import S
from pdflow_runtime.vllm.scheduler.engine_clock import MOST_GAP_NS, EngineClock
from pdflow_runtime.vllm.scheduler.ledger import LedgerError, LoadLedger
from pdflow_runtime.vllm.step_metadata import (
    KINDS,
    DownMessage,
    Offer,
    decode_down,
    decode_up,
    decoded,
    encode_down,
    encode_up,
    encoded,
)
from pdflow_runtime.vllm.worker.outbox import Outbox

# Ledger.


def test_each_load_is_reported_once() -> None:
    ledger = LoadLedger()
    ledger.begin("a")
    ledger.begin("b")
    ledger.end("a")
    ledger.fail("b")
    assert ledger.take_received() == {"a"}
    assert ledger.take_received() == set()
    assert not len(ledger)


@pytest.mark.parametrize("report", ["end", "fail"])
def test_a_report_that_vllm_does_not_wait_for_is_a_bug(report: str) -> None:
    ledger = LoadLedger()
    with pytest.raises(LedgerError, match="does not wait"):
        getattr(ledger, report)("a")
    ledger.begin("a")
    getattr(ledger, report)("a")
    with pytest.raises(LedgerError, match="does not wait"):
        getattr(ledger, report)("a")


def test_a_load_cannot_begin_twice() -> None:
    ledger = LoadLedger()
    ledger.begin("a")
    with pytest.raises(LedgerError, match="already"):
        ledger.begin("a")
    ledger.end("a")
    with pytest.raises(LedgerError, match="already"):
        ledger.begin("a")


# Clock.


def test_an_engine_that_does_not_run_takes_no_time() -> None:
    readings = iter((0, 5, 5, 3600 * S, 3600 * S + 7))
    clock = EngineClock(lambda: next(readings))
    assert [clock.now() for _ in range(4)] == [5, 5, 5 + MOST_GAP_NS, 5 + MOST_GAP_NS + 7]


# Outbox.


def test_many_responses_of_a_peer_are_reported_as_one() -> None:
    outbox = Outbox()
    for _ in range(1000):
        outbox.put("d", PeerResponded("p.r0"))
    outbox.put("d", PeerResponded("p.r1"))
    assert [event.peer for _, event in outbox.take()] == ["p.r0", "p.r1"]
    outbox.put("d", PeerResponded("p.r0"))
    assert len(outbox.take()) == 1


def test_what_a_parked_scheduler_is_asked_can_be_taken_out() -> None:
    outbox = Outbox()
    missing, other = PrefillMissing("x", 0), ShardReleased("y", 0, Code.NONE)
    outbox.put("p", missing)
    outbox.put("p", other)
    assert outbox.take_missing() == [missing]
    assert outbox.take() == [("p", other)]


# What a step carries.


def test_every_event_between_endpoints_has_a_kind() -> None:
    assert set(get_args(LocalEvent)) == set(KINDS)


def test_a_step_s_messages_come_out_as_they_went_in() -> None:
    cancel = FrameOrdered(("p.r0",), Cancel(Reg("d", 5, 1, "r"), 0))
    down = DownMessage([encoded("d.r0", cancel)], [("p.r0", "127.0.0.1", 7)], [Offer("x", 1, 0, 32)], ["y"], True)
    read = decode_down(encode_down(down))
    assert [(event.to, decoded(event)) for event in read.events] == [("d.r0", cancel)]
    assert (read.addresses, read.offers, read.withdrawn, read.open) == (
        [("p.r0", "127.0.0.1", 7)],
        [Offer("x", 1, 0, 32)],
        ["y"],
        True,
    )
    up = decode_up(encode_up(3, [("d", ShardReleased("y", 3, Code.EXPIRED))], "why"))
    assert (up.rank, up.broken, [decoded(event) for event in up.events]) == (
        3,
        "why",
        [ShardReleased("y", 3, Code.EXPIRED)],
    )

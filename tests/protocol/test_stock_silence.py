"""Signals that are missing: who waits for what will not come, and for how long, in every dialect.

Where stock only waits, the story ends 500 s after it began: past vLLM's watchdog (480 s), which logs a line, and before
the client gives up (600 s).
"""

from __future__ import annotations

import pytest

from pdflow.protocol.dialect import VLLM_STOCK, Dialect
from pdflow.protocol.events import PeerExited
from pdflow.protocol.messages import Heartbeat
from pdflow.protocol.values import MS, S
from tests.protocol.support.counterexamples import WAITS, NamedCluster, counterexample, in_each_dialect
from tests.support.endpoints import engine_info

PINNED: list[object] = []
EXPIRED = [("x", "EXPIRED")]


@in_each_dialect(strict=("IO", EXPIRED), compat=("DEADLINE", EXPIRED), stock=(WAITS, PINNED))
def test_r21_failed_write(dialect: Dialect, comes_to: tuple[str, list[object]]) -> None:
    """D waits for a WRITE that will not come, and its heartbeats keep P's blocks for it: they pin each other (L4)."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.holding = {"WRITE"}
        c.prefill_and_admit("r", "x")
        c.run()
        c.fail("WRITE")
        c.pass_time(500 * S)
    assert (outcome.end, c.released) == comes_to


@in_each_dialect(strict=("UNREACHABLE", EXPIRED), compat=("DEADLINE", EXPIRED), stock=(WAITS, PINNED))
def test_r22_p_cannot_reach_d(dialect: Dialect, comes_to: tuple[str, list[object]]) -> None:
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.carry_out(c.find("handshake", "D.r0"))
        c.unreachable = {"D"}
        c.pass_time(500 * S)
    assert (outcome.end, c.released) == comes_to
    assert c.wrote() == []


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock=WAITS)
def test_r22_a_retry_is_served_from_what_failed(dialect: Dialect, comes_to: str) -> None:
    """The prompt is still there, and D is reachable again; in stock the first match has consumed it."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c, "r-11111111") as outcome:
        c.prefill_and_admit("r", "x")
        c.carry_out(c.find("handshake", "D.r0"))
        c.unreachable = {"D"}
        c.run()
        c.unreachable = set()
        c.abort("r")
        c.pass_time(1 * S)
        c.decode("r-11111111", "x")
        c.admit("r-11111111")
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="PEER_DEAD", compat="DEADLINE", stock=WAITS)
def test_r23_watchdog(dialect: Dialect, comes_to: str) -> None:
    """P hangs: nothing that is sent to it has any effect."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.holding = {"Register", "Sync", "Heartbeat", "Cancel", "Release"}
        c.pass_time(500 * S)
    assert outcome.end == comes_to


def test_r23_stock_heartbeats_until_the_client_gives_up() -> None:
    c = NamedCluster(dialect=VLLM_STOCK)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.pass_time(590 * S)
    before = len(c.frames(Heartbeat))
    assert before == 590 // 5
    c.pass_time(60 * S)
    assert c.outcomes["r"] == ["DEADLINE"]
    assert len(c.frames(Heartbeat)) == before + 1
    assert c.endpoints["D"].wake_at() is None


@in_each_dialect(strict=("EXPIRED", 0), compat=("DEADLINE", 0), stock=(WAITS, 1))
def test_r24_registration_after_the_lease(dialect: Dialect, comes_to: tuple[str, int]) -> None:
    """P has no word for it; in stock the registration stands there for ever."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.finish("x")
        c.pass_time(31 * S)
        assert c.released == EXPIRED
        c.decode("r", "x")
        c.admit("r")
        c.pass_time(500 * S)
    assert (outcome.end, len(c.endpoints["P.r0"].cells)) == comes_to


@in_each_dialect(strict="COMMITTED", compat="DEADLINE", stock=WAITS)
def test_r25_registration_reaches_one_of_two_ranks(dialect: Dialect, comes_to: str) -> None:
    c = NamedCluster(p=(engine_info("P", 2),), dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.carry_out(c.find("handshake", peer="P.r0"))
        c.carry_out(c.find("handshake", peer="P.r1"))
        c.drop("Register", peer="P.r1")
        c.pass_time(500 * S)
    assert outcome.end == comes_to


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock=WAITS)
def test_r26_completion_before_its_rank_knows_of_it(dialect: Dialect, comes_to: str) -> None:
    """D's second rank lags by a step; stock writes it on the first one's word, and its completion is dropped."""
    c = NamedCluster(d=(engine_info("D", 2),), dialect=dialect)
    with counterexample(c) as outcome:
        c.lagging = {"D.r1"}
        c.holding = {"order"}
        c.prefill_and_admit("r", "x")
        c.pass_time(100 * MS)
        c.holding = set()
        c.lagging = set()
        c.pass_time(500 * S)
    assert outcome.end == comes_to


@in_each_dialect(strict="PEER_DEAD", compat="PEER_DEAD", stock=WAITS)
def test_r48_p_dies_under_its_write(dialect: Dialect, comes_to: str) -> None:
    """Push: even a proof of P's death means nothing to stock."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.holding = {"WRITE"}
        c.prefill_and_admit("r", "x")
        c.run()
        c.crash("P")
        del c.endpoints["P"], c.endpoints["P.r0"]
        c.holding = {"Sync", "Heartbeat", "Cancel", "Release"}
        c.feed("D.r0", PeerExited("P.r0"))
        c.pass_time(500 * S)
    assert outcome.end == comes_to


@pytest.mark.parametrize("ends", ["READ", "handshake"])
@in_each_dialect(strict=True, compat=True, stock=True)
def test_r48_p_dies_under_a_read(dialect: Dialect, comes_to: bool, ends: str) -> None:
    """Pull: D owns the handle, so it learns of the end. Right in all three."""
    c = NamedCluster(dialect=dialect, pulls=True)
    c.holding = {ends}
    c.prefill_and_admit("r", "x")
    c.run()
    c.fail(ends)
    assert c.outcomes["r"] == ["IO" if ends == "READ" else "UNREACHABLE"]
    assert len(c.freed) == 1


@in_each_dialect(strict="UNREACHABLE", compat="UNREACHABLE", stock=WAITS)
def test_one_rank_of_d_fails_and_the_other_waits(dialect: Dialect, comes_to: str) -> None:
    """P dies between the handshakes of D's two ranks: stock fails the request when both have reported (3.3)."""
    c = NamedCluster(d=(engine_info("D", 2),), dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.carry_out(c.find("handshake", "D.r0"))
        c.drop("Register")
        c.fail("handshake", "D.r1")
        c.holding = {"Sync", "Cancel"}
        c.pass_time(10 * S)
    assert outcome.end == comes_to

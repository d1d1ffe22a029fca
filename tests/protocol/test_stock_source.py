"""P's blocks, freed under who reads them: the races of the source, in every dialect (docs/compat.md)."""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_STOCK, Dialect
from pdflow.protocol.events import TimeReached, WriteEnded
from pdflow.protocol.producer.cell import READY
from pdflow.protocol.values import S
from tests.protocol.support.counterexamples import WAITS, NamedCluster, counterexample, in_each_dialect


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="breaks S2")
def test_r01_lease_ends_under_a_write(dialect: Dialect, comes_to: str) -> None:
    """A slow link, and no heartbeat that arrives: stock gives the blocks away while the NIC reads them."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.finish("x")
        c.pass_time(5 * S)
        c.holding = {"WRITE", "Heartbeat"}
        c.decode("r", "x")
        c.admit("r")
        c.pass_time(26 * S)
        c.holding = set()
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="COMMITTED")
def test_r01_nobody_can_see_it(dialect: Dialect, comes_to: str) -> None:
    """Without an oracle the same story ends well: D gets a success notice for whatever stood in those blocks."""
    c = NamedCluster(dialect=dialect, watched=False)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.finish("x")
        c.pass_time(5 * S)
        c.holding = {"WRITE", "Heartbeat"}
        c.decode("r", "x")
        c.admit("r")
        c.pass_time(26 * S)
        freed_under_the_write = c.released == [("x", "EXPIRED")]
        c.holding = set()
        c.run()
    assert outcome.end == comes_to
    assert freed_under_the_write == (dialect.name == "vllm-stock")
    assert len(c.released) == 1


@in_each_dialect(strict="EXPIRED", compat="DEADLINE", stock="breaks S2")
def test_r02_deferred_write_after_the_lease(dialect: Dialect, comes_to: str) -> None:
    """Matched, and waiting for the handshake to D behind somebody's timeout: stock posts from blocks that are gone."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.finish("x")
        c.pass_time(2 * S)
        c.decode("r", "x")
        c.admit("r")
        c.carry_out(c.find("handshake", "D.r0"))
        c.carry_out(c.find("Register"))
        assert [cell.phase for cell in c.endpoints["P.r0"].cells.values()] == [READY]
        late = c.find("handshake", "P.r0")
        c.pending.remove(late)
        c.holding = {"Heartbeat"}
        c.pass_time(29 * S)
        assert c.released == [("x", "EXPIRED")]
        c.pending.append(late)
        c.run()
        assert c.wrote() == []
        c.pass_time(480 * S)
    assert outcome.end == comes_to


def wrote_badly(c: NamedCluster) -> None:
    """The WRITE's handle ends in an error; the NIC may go on reading."""
    c.holding = {"WRITE", "fence", "Heartbeat"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.fail("WRITE")


@in_each_dialect(strict="STALLED", compat=WAITS, stock="breaks S2")
def test_r17_r19_an_error_is_no_end(dialect: Dialect, comes_to: str) -> None:
    """Only a fence proves that nobody reads any more; stock has none, and goes by the lease."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        wrote_badly(c)
        c.pass_time(31 * S)
        assert c.released == []
        c.carry_out(c.find("fence"))
        assert c.released == [("x", "EXPIRED")]
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="STALE", compat="STALE", stock="breaks S2")
def test_r04_read_longer_than_the_lease(dialect: Dialect, comes_to: str) -> None:
    """D stands still for longer than the lease, with a READ under way; P frees, and only logs what D read."""
    c = NamedCluster(dialect=dialect, pulls=True)
    with counterexample(c) as outcome:
        c.holding = {"READ"}
        c.prefill_and_admit("r", "x")
        c.run()
        c.now += 31 * S
        c.feed("P.r0", TimeReached())
        assert c.released == [("x", "EXPIRED")]
        c.holding = set()
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="STALE", compat="STALE", stock="breaks S2")
def test_r09_a_step_of_d_longer_than_the_lease(dialect: Dialect, comes_to: str) -> None:
    """The request stood in D's queue meanwhile, and its READ is quick: the blocks were gone before it began."""
    c = NamedCluster(dialect=dialect, pulls=True)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.finish("x")
        c.decode("r", "x")
        c.pass_time(6 * S)
        c.now += 31 * S
        c.feed("P.r0", TimeReached())
        assert c.released == [("x", "EXPIRED")]
        c.admit("r")
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock=WAITS)
def test_r05_heartbeats_by_the_routers_id(dialect: Dialect, comes_to: str) -> None:
    """Both legs dispatched at once, and D's queue longer than the lease: vLLM's proxy cannot know P's own id."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill("x")
        c.decode("r", "x")
        c.finish("x")
        c.pass_time(60 * S)
        c.admit("r")
        c.pass_time(500 * S)
    assert outcome.end == comes_to
    assert c.released == [("x", "EXPIRED" if comes_to == WAITS else "NONE")]


def test_heartbeats_know_ps_id_when_d_waited_for_its_answer() -> None:
    """Sequential dispatch renews in stock too."""
    c = NamedCluster(dialect=VLLM_STOCK)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.pass_time(60 * S)
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]


def test_a_write_that_outlives_its_lease_is_not_reported_twice() -> None:
    """As vLLM filters it: an expired request was reported when its lease ended."""
    c = NamedCluster(dialect=VLLM_STOCK, watched=False)
    c.holding = {"WRITE", "Heartbeat"}
    c.prefill_and_admit("r", "x")
    c.pass_time(31 * S)
    c.feed("P.r0", WriteEnded(c.wrote()[0].op, True))
    assert c.released == [("x", "EXPIRED")]
    assert "producer scheduler: shard released twice" not in c.notes
    assert c.endpoints["P.r0"].cells == {}

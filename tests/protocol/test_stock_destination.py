"""D's blocks, written by who should not, or never given back: the races of the destination, in every dialect."""

from __future__ import annotations

import msgspec
import pytest

from pdflow.protocol.dialect import DIALECTS, VLLM_STOCK, Dialect
from pdflow.protocol.events import PeerExited, PrefillLegEnded, Received
from pdflow.protocol.messages import Register, Taken
from pdflow.protocol.values import S
from tests.protocol.support.counterexamples import WAITS, NamedCluster, counterexample, in_each_dialect
from tests.support.endpoints import engine_info

EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.name)
TWO = (engine_info("D", 2),)


@EVERY
def test_r10_abort_under_a_write_holds_its_blocks(dialect: Dialect) -> None:
    """Right in all three, and in vLLM since #32255: nobody gets them before the WRITE has ended."""
    c = NamedCluster(dialect=dialect)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.run()
    assert c.outcomes["r"] == ["CANCELLED"]
    assert (len(c.quarantined), c.freed) == (1, [])
    c.holding = set()
    c.run()
    assert c.freed == c.quarantined
    c.at_rest()


@in_each_dialect(strict=2, compat=0, stock=30)
def test_r11_abort_before_allocation(dialect: Dialect, comes_to: int) -> None:
    """How long P goes on holding a prompt that nobody will come for, in seconds."""
    c = NamedCluster(dialect=dialect)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.abort("r")
    c.run()
    seconds = 0
    while not c.released:
        c.pass_time(1 * S)
        seconds += 1
    assert seconds == comes_to
    c.at_rest()


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock=WAITS)
def test_r12_a_retry_matches_the_earlier_registration(dialect: Dialect, comes_to: str) -> None:
    """The client goes away before its prompt is there, and comes again under the same X-Request-Id."""
    c = NamedCluster(dialect=dialect)
    first, again = "cmpl-u-11111111", "cmpl-u-22222222"
    with counterexample(c, again) as outcome:
        c.prefill("x#1", request_id="cmpl-u-0000000a")
        c.decode(first, "x#1")
        c.admit(first)
        c.run()
        c.abort(first)
        c.abort_prefill("x#1")
        c.run()
        c.prefill("x#2", request_id="cmpl-u-0000000b")
        c.decode(again, "x#2")
        c.admit(again)
        c.run()
        c.finish("x#2")
        c.run()
    assert outcome.end == comes_to
    assert [w.op.reg.request_id for w in c.wrote()] == [first if comes_to == WAITS else again]


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="breaks S1")
def test_r13_a_registration_of_a_second_rank_is_matched_late(dialect: Dialect, comes_to: str) -> None:
    """The first request ends well, on both ranks; its blocks are somebody else's by the time its zombie is matched."""
    c = NamedCluster(d=TWO, dialect=dialect)
    first = "cmpl-u-11111111"
    with counterexample(c, first) as outcome:
        c.prefill("x#1", request_id="cmpl-u-0000000a")
        c.finish("x#1")
        c.decode(first, "x#1")
        c.admit(first)
        c.run()
        assert c.outcomes[first] == ["COMMITTED"]
        assert sorted(w.to for w in c.wrote()) == ["D.r0", "D.r1"]
        c.prefill("x#2", request_id="cmpl-u-0000000b")
        c.finish("x#2")
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict=["D.r0"], compat=["D.r0"], stock=["D.r0", "D.r1"])
def test_r13_only_registered_ranks_are_written(dialect: Dialect, comes_to: list[str]) -> None:
    """The other rank's registration is lost: who is written after the join, three seconds later?"""
    c = NamedCluster(d=TWO, dialect=dialect)
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.carry_out(c.find("handshake", "D.r1"))
    c.drop("Register", "D.r1")
    c.holding = {"Sync"}
    c.pass_time(3 * S)
    written = sorted(w.to for w in c.wrote())
    assert written == ([] if dialect.waits_for_all_ranks else comes_to)


@in_each_dialect(strict="UNREACHABLE", compat="UNREACHABLE", stock="breaks S1")
def test_r13_a_rank_that_could_not_register_is_written(dialect: Dialect, comes_to: str) -> None:
    """One D rank's handshake fails; P writes it on its sibling's word, and D frees when the sibling's shard is here."""
    c = NamedCluster(d=TWO, dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.fail("handshake", "D.r1")
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="breaks S3")
def test_r14_one_sender_twice(dialect: Dialect, comes_to: str) -> None:
    """Two producers write; the completion of one comes twice, and stock decodes without the other's half."""
    c = NamedCluster(p=(engine_info("P", 2),), dialect=dialect)
    with counterexample(c) as outcome:
        c.holding = {"WRITE"}
        c.prefill_and_admit("r", "x")
        c.run()
        first = c.find("WRITE", "P.r0")
        c.carry_out(first)
        c.feed("D.r0", Received("P.r0", 101, first.what.notification))
        c.holding = set()
        c.run()
    assert outcome.end == comes_to


@in_each_dialect(strict=0, compat=0, stock=1)
def test_r14_one_reader_twice(dialect: Dialect, comes_to: int) -> None:
    """Pull, two readers: one of them says twice that it has read. Stock lets go under the other."""
    c = NamedCluster(d=TWO, dialect=dialect, pulls=True)
    c.holding = {"READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    first = c.find("READ", "D.r0")
    c.carry_out(first)
    c.run()
    c.feed("P.r0", Received("D.r0", 201, first.what.notification or c.frames(Taken)[0]))
    assert len(c.released) == comes_to


@in_each_dialect(strict=1, compat=1, stock=0)
def test_r15_abort_and_p_is_gone(dialect: Dialect, comes_to: int) -> None:
    """P's process is dead by proof; stock holds the blocks for a completion that cannot come."""
    c = NamedCluster(dialect=dialect)
    c.holding = {"WRITE", "Cancel", "Sync", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.crash("P")
    del c.endpoints["P"], c.endpoints["P.r0"]
    c.feed("D.r0", PeerExited("P.r0"))
    assert len(c.freed) == comes_to
    c.pass_time(3600 * S)
    assert len(c.freed) == comes_to


@pytest.mark.parametrize("ok", [True, False], ids=["leg ended", "leg failed"])
@in_each_dialect(strict=1, compat=1, stock=0)
def test_r15_abort_and_nobody_ever_writes(dialect: Dialect, comes_to: int, ok: bool) -> None:
    """Its registration is lost; what the router says of the prefill leg changes nothing in stock."""
    c = NamedCluster(dialect=dialect)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.carry_out(c.find("handshake"))
    c.drop("Register")
    if ok:
        c.finish("x")
    else:
        c.abort_prefill("x")
    c.feed("D", PrefillLegEnded("r", ok))
    c.abort("r")
    c.pass_time(600 * S)
    assert len(c.freed) == comes_to


def test_a_zombie_stands_for_ever_unless_it_has_ps_own_id() -> None:
    """vLLM forgets with a prompt the registrations of its very own id: D's, only where ids are not randomised."""
    for name, left in (("r-0000000a", 1), ("r", 0)):
        c = NamedCluster(d=TWO, dialect=VLLM_STOCK)
        c.holding = {"WRITE"}
        c.prefill("x", request_id=name)
        c.finish("x")
        c.decode("r", "x")
        c.admit("r")
        c.run()
        assert len(c.frames(Register)) == 2
        c.holding = set()
        c.pass_time(3600 * S)
        assert c.outcomes["r"] == ["COMMITTED"]
        assert len(c.endpoints["P.r0"].cells) == left


def test_a_copy_of_a_registration_under_its_write_waits_for_the_next_prompt() -> None:
    """Two WRITEs of one registration are under way at once, from two prompts, and neither takes the other's end."""
    c = NamedCluster(dialect=VLLM_STOCK, watched=False)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.feed("P.r0", Received("D.r0", 201, c.frames(Register)[0]))
    c.prefill("y", request_id="r-0000000b")
    c.finish("y")
    c.run()
    first, second = (w.op for w in c.wrote())
    assert first.reg == msgspec.structs.replace(second.reg, seq=0)
    c.carry_out(c.find("WRITE"))
    assert c.released == [("x", "NONE")]
    c.holding = set()
    c.run()
    assert c.released == [("x", "NONE"), ("y", "NONE")]

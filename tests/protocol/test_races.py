"""The races of spec 8 that the core itself can show, by their numbers. The oracle watches every one of them."""

from __future__ import annotations

import msgspec
import pytest

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow.protocol.effects import Fence, Handshake, Send
from pdflow.protocol.events import PeerExited, PrefillLegEnded, Received, WriteEnded
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Completion,
    Disposition,
    Done,
    Fail,
    Heartbeat,
    Register,
    RegisterAck,
    Release,
    Sync,
    Taken,
)
from pdflow.protocol.producer.cell import READY
from pdflow.protocol.values import MS, S
from tests.support.cluster import Cluster
from tests.support.endpoints import engine_info

BOTH = pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda d: d.name)
TPS = pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)], ids=lambda t: f"{t[0]}to{t[1]}")


def cells(c: Cluster, node: str = "P.r0") -> list:  # type: ignore[type-arg]
    return list(c.endpoints[node].cells.values())


# The source's blocks.


@BOTH
def test_r01_lease_expires_while_the_write_is_in_flight(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(dialect=dialect)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.pass_time(25 * S)
    c.feed("P.r0", Received("D.r0", 201, Heartbeat(())))
    c.pass_time(4 * S)
    c.holding = {"WRITE", "Heartbeat"}
    c.pass_time(30 * S)
    assert c.released == []
    assert cells(c)[0].expired
    c.holding = set()
    c.run()
    assert c.released == [("x", "NONE")]
    assert c.outcomes["r"] in (["COMMITTED"], ["STALLED"])
    c.at_rest()


@BOTH
def test_r01_lease_expires_and_the_write_fails(dialect) -> None:  # type: ignore[no-untyped-def]
    """Freed only behind a fence; strict says so, vllm-compat cannot."""
    c = Cluster(dialect=dialect)
    c.holding = {"WRITE", "Heartbeat", "Cancel", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.pass_time(31 * S)
    c.fail("WRITE")
    assert c.released == []
    c.carry_out(c.find("fence"))
    assert c.released == [("x", "EXPIRED")]
    assert [f.code for f in c.frames(Fail)] == ([Code.IO] if dialect is STRICT else [])


@BOTH
def test_r02_deferred_write_is_not_posted_after_expiry(dialect) -> None:  # type: ignore[no-untyped-def]
    """Matched, waiting for the handshake to D, when the lease ends."""
    c = Cluster(dialect=dialect)
    c.prefill("x")
    c.finish("x")
    c.pass_time(2 * S)
    c.decode("r", "x")
    c.admit("r")
    c.carry_out(c.find("handshake", "D.r0"))
    c.carry_out(c.find("Register"))
    assert cells(c)[0].phase is READY
    late = c.find("handshake", "P.r0")
    c.pending.remove(late)
    c.holding = {"Heartbeat"}
    c.pass_time(29 * S)
    assert c.released == [("x", "EXPIRED")]
    c.pending.append(late)
    c.run()
    assert c.wrote() == []
    assert c.outcomes["r"] == (["EXPIRED"] if dialect is STRICT else [])


def test_r04_pull_that_outlives_its_lease_is_stale() -> None:
    c = Cluster(pulls=True)
    c.holding = {"READ", "Sync"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.pass_time(31 * S)
    assert c.released == [("x", "EXPIRED")]
    c.holding = set()
    c.run()
    assert c.outcomes["r"] in (["STALE"], ["PEER_DEAD"])
    assert len(c.freed) == 1


def test_r04_pull_whose_word_changed_between_data_and_word() -> None:
    c = Cluster(pulls=True)
    c.holding = {"word", "Sync"}
    c.prefill_and_admit("r", "x")
    c.run()
    assert c.has("word")
    c.word_values["P.r0", c.find("word").what.index] += 1
    c.holding = {"Sync"}
    c.run()
    assert c.outcomes["r"] == ["STALE"]


def test_r09_compat_pull_by_a_silent_d_is_stale() -> None:
    """D's step takes 20 s: no heartbeat leaves, so it must not trust what it has read."""
    c = Cluster(pulls=True, dialect=VLLM_COMPAT)
    c.holding = {"READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.now += 16 * S
    c.holding = set()
    c.run()
    assert c.outcomes["r"] == ["STALE"]


def test_r05_interest_is_renewed_by_xid() -> None:
    """A queue at D longer than the lease: SYNC names the xid, whatever the request ids are."""
    c = Cluster()
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.pass_time(100 * S)
    assert c.released == []
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]


# The destination's blocks.


@TPS
def test_r10_abort_under_a_write_quarantines(tps) -> None:  # type: ignore[no-untyped-def]
    c = Cluster((engine_info("P", tps[0]),), (engine_info("D", tps[1]),))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.run()
    assert c.outcomes["r"] == ["CANCELLED"]
    assert len(c.quarantined) == 1
    assert c.freed == []
    c.holding = set()
    c.run()
    assert c.freed == c.quarantined
    assert {a.disposition for a in c.frames(CancelAck)} <= {Disposition.SENT}
    c.at_rest()


@BOTH
def test_r11_abort_before_allocation_lets_p_go(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(dialect=dialect)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.abort("r")
    c.run()
    assert c.frames(Release if dialect is STRICT else Completion)
    c.pass_time(2 * S)
    assert [xid for xid, _ in c.released] == ["x"]
    assert c.now == 2 * S


@BOTH
def test_full_prefix_hit_lets_p_go(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(dialect=dialect)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.hit("r")
    c.pass_time(3 * S)
    assert c.outcomes["r"] == ["COMMITTED"]
    assert [xid for xid, _ in c.released] == ["x"]
    assert c.wrote() == []


def test_r12_stale_registration_cannot_match_a_retry() -> None:
    """D1 is cancelled before the prompt is there; the retry is a new attempt with an xid and a reg of its own."""
    c = Cluster()
    c.prefill("x#1")
    c.decode("r#1", "x#1")
    c.admit("r#1")
    c.run()
    c.abort("r#1")
    c.run()
    assert len(c.freed) == 1
    c.prefill("x#2")
    c.finish("x#2")
    c.finish("x#1")
    assert c.wrote() == []
    c.decode("r#2", "x#2")
    c.admit("r#2")
    c.run()
    assert [w.op.reg.request_id for w in c.wrote()] == ["r#2"]
    c.at_rest()


def test_r12_cancel_overtakes_its_registration() -> None:
    c = Cluster()
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake"))
    late = c.find("Register")
    c.pending.remove(late)
    c.abort("r")
    c.run()
    assert len(c.freed) == 1
    c.feed("P.r0", late.what)
    c.run()
    assert c.wrote() == []
    assert [a.disposition for a in c.frames(CancelAck)] == [Disposition.NOT_STARTED, Disposition.NOT_STARTED]
    c.at_rest()


def test_late_registration_below_the_floor_makes_no_cell() -> None:
    c = Cluster()
    c.prefill_and_admit("r1", "x1")
    c.run()
    first = c.frames(Register)[0]
    c.prefill_and_admit("r2", "x2")
    c.run()
    tombs = c.endpoints["P.r0"].store.tombs["D"]
    assert (tombs.floor, list(tombs.verdicts)) == (2, [2])
    c.feed("P.r0", Received("D.r0", 201, first))
    assert cells(c) == []
    assert "producer: registration below the floor" in c.notes


@BOTH
def test_r13_second_rank_leaves_no_zombie(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(d=(engine_info("D", 2),), dialect=dialect)
    c.prefill_and_admit("r", "x")
    c.run()
    assert sorted(w.to for w in c.wrote()) == ["D.r0", "D.r1"]
    for register in c.frames(Register):
        c.feed("P.r0", Received(f"D.r{register.d_rank}", 201, register))
    c.run()
    assert cells(c) == []
    assert len(c.wrote()) == 2


@BOTH
def test_r14_one_sender_twice_is_not_two_senders(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(p=(engine_info("P", 2),), dialect=dialect)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    first = c.find("WRITE", "P.r0")
    c.carry_out(first)
    c.feed("D.r0", Received("P.r0", 101, first.what.notification))
    assert c.outcomes["r"] == []
    c.holding = set()
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]


def test_r15_abort_with_p_gone_ends_by_proof_of_death() -> None:
    c = Cluster()
    c.holding = {"WRITE", "Cancel", "Sync", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.pass_time(120 * S)
    assert c.freed == []
    c.crash("P")
    c.feed("D.r0", PeerExited("P.r0"))
    assert len(c.freed) == 1


def test_r15_abort_with_p_silent_ends_by_a_fence() -> None:
    c = Cluster()
    c.holding = {"WRITE", "Cancel", "Sync", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.pass_time(16 * S)
    assert [e for n, e in c.log if n == "D.r0" and type(e) is Fence] == [Fence("P.r0")]
    assert c.freed == []
    c.carry_out(c.find("fence"))
    assert len(c.freed) == 1


def test_r15_compat_abort_ends_by_the_reclaim_time() -> None:
    c = Cluster(dialect=VLLM_COMPAT)
    c.prefill_and_admit("r", "x")
    c.drop("handshake")
    c.feed("D", PrefillLegEnded("r", True))
    c.abort("r")
    timers = c.agreed.timers
    c.pass_time(timers.lease_ns)
    assert c.freed == []
    c.pass_time(timers.handshake_queue_ns + timers.transport_ns)
    assert len(c.freed) == 1


def test_r15_compat_failed_leg_frees_at_once() -> None:
    c = Cluster(dialect=VLLM_COMPAT)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.abort("r")
    assert c.freed == []
    c.abort_prefill("x")
    c.feed("D", PrefillLegEnded("r", False))
    assert len(c.freed) == 1


def test_r16_r17_one_bad_handle_waits_for_its_sibling_and_its_fence() -> None:
    c = Cluster(d=(engine_info("D", 2),))
    c.holding = {"WRITE", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.fail("WRITE", peer="D.r0")
    assert not c.frames(Fail)
    c.carry_out(c.find("WRITE"))
    assert not c.frames(Fail)
    c.carry_out(c.find("fence"))
    c.carry_out(c.find("fence"))
    assert {(f.code, f.flushed) for f in c.frames(Fail)} == {(Code.IO, True)}
    c.run()
    assert c.outcomes["r"] == ["IO"]
    assert len(c.freed) == 1


def test_r18_every_rank_that_cancels_is_answered() -> None:
    c = Cluster(d=(engine_info("D", 2),))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.run()
    assert c.frames(CancelAck) == []
    c.holding = {"Done"}
    for item in [i for i in c.pending if i.kind == "WRITE"]:
        c.pending.remove(item)
        c.feed("P.r0", WriteEnded(item.what.op, True))
    acks = [(e.to, e.message.disposition) for _, e in c.log if type(e) is Send and type(e.message) is CancelAck]
    assert sorted(acks) == [("D.r0", Disposition.SENT), ("D.r1", Disposition.SENT)]
    c.run()
    assert len(c.freed) == 1


def test_r19_r27_lost_done_is_repaired_by_sync() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    write = c.find("WRITE")
    c.pending.remove(write)
    c.feed("P.r0", WriteEnded(write.what.op, True))
    c.pass_time(2 * S)
    assert c.outcomes["r"] == ["COMMITTED"]


def test_r20_a_retry_takes_fresh_blocks() -> None:
    """The failed attempt's blocks stay in quarantine while the retry lands beside them."""
    c = Cluster()
    c.holding = {"WRITE", "Cancel"}
    c.prefill_and_admit("r#1", "x")
    c.run()
    c.abort("r#1")
    c.decode("r#2", "x")
    c.admit("r#2")
    c.run()
    second = next(i for i in c.pending if i.kind == "WRITE" and i.what.op.reg.request_id == "r#2")
    c.carry_out(second)
    assert c.outcomes["r#2"] == ["COMMITTED"]
    assert c.freed == []
    c.at_rest()
    assert c.freed == c.quarantined


# Missing signals.


def test_r21_failed_write_is_reported() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.fail("WRITE")
    c.run()
    assert c.outcomes["r"] == ["IO"]
    c.at_rest()


def test_r21_compat_failed_write_ends_by_the_watchdog_and_p_is_not_pinned() -> None:
    c = Cluster(dialect=VLLM_COMPAT)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.feed("D", PrefillLegEnded("r", True))
    c.fail("WRITE")
    c.holding = set()
    c.pass_time(c.agreed.timers.watchdog_ns - S)
    assert c.outcomes["r"] == []
    c.pass_time(2 * S)
    assert c.outcomes["r"] == ["DEADLINE"]
    c.pass_time(21 * S)
    assert c.released == [("x", "EXPIRED")]
    c.at_rest()


@BOTH
def test_r22_p_that_cannot_reach_d(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(dialect=dialect)
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.unreachable = {"D"}
    c.run()
    assert c.wrote() == []
    assert c.outcomes["r"] == (["UNREACHABLE"] if dialect is STRICT else [])
    if dialect is STRICT:
        c.at_rest()
        assert c.released == [("x", "EXPIRED")]


def test_r23_watchdog_resolves_and_stops_the_heartbeats() -> None:
    c = Cluster(dialect=VLLM_COMPAT)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.pass_time(c.agreed.timers.watchdog_ns)
    assert c.outcomes["r"] == ["DEADLINE"]
    before = len(c.frames(Heartbeat))
    c.pass_time(60 * S)
    assert len(c.frames(Heartbeat)) == before


def test_r24_registration_after_expiry_is_refused_at_once() -> None:
    c = Cluster()
    c.prefill("x")
    c.finish("x")
    c.pass_time(31 * S)
    assert c.released == [("x", "EXPIRED")]
    c.decode("r", "x")
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["EXPIRED"]
    assert len(c.freed) == 1


def test_registration_for_a_prompt_that_nobody_knows() -> None:
    c = Cluster()
    c.decode("r", "nowhere")
    c.admit("r")
    c.pass_time(11 * S)
    assert c.outcomes["r"] == ["NO_REQUEST"]
    assert len(c.freed) == 1


def test_r25_lost_registration_is_repaired_by_sync() -> None:
    c = Cluster(p=(engine_info("P", 2),))
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", peer="P.r0"))
    c.carry_out(c.find("handshake", peer="P.r1"))
    c.drop("Register", peer="P.r1")
    c.run()
    assert c.outcomes["r"] == []
    c.pass_time(2 * S)
    assert c.outcomes["r"] == ["COMMITTED"]
    c.at_rest()


@BOTH
@pytest.mark.parametrize("lag_ns", [100 * MS, 1900 * MS])
def test_r26_lagging_rank_gets_its_share(dialect, lag_ns) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(d=(engine_info("D", 2),), dialect=dialect)
    c.prefill_and_admit("r", "x")
    late = c.find("handshake", "D.r1")
    c.pending.remove(late)
    c.pass_time(lag_ns)
    assert c.wrote() == []
    c.pending.append(late)
    c.run()
    assert sorted(w.to for w in c.wrote()) == ["D.r0", "D.r1"]
    assert c.outcomes["r"] == ["COMMITTED"]


def test_r30_one_dead_peer_delays_nobody() -> None:
    c = Cluster(d=(engine_info("D"), engine_info("E")))
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x", engine="E")
    c.admit("r", engine="E")
    c.carry_out(c.find("handshake", "E.r0"))
    c.carry_out(c.find("Register"))
    c.holding = {"handshake"}
    c.prefill_and_admit("s", "y")
    c.holding = set()
    dead = c.find("handshake", "P.r0", "E.r0")
    c.pending.remove(dead)
    c.run()
    assert c.outcomes["s"] == ["COMMITTED"]


# Identity.


def test_r39_two_prompts_with_one_base_id_are_not_confused() -> None:
    """Stock vLLM takes the first in the table: another tenant's KV. Refused here, until the rival is gone (C5)."""
    c = Cluster(dialect=VLLM_COMPAT)
    c.prefill("x1", request_id="cmpl-u-aaaaaaaa")
    c.prefill("x2", request_id="cmpl-u-bbbbbbbb")
    c.finish("x1", digest=1)
    c.finish("x2", digest=2)
    c.decode("cmpl-u-cccccccc", "x2")
    c.admit("cmpl-u-cccccccc", digest=2)
    strip_xids(c)
    assert c.wrote() == []
    c.pass_time(21 * S)


def test_compat_base_id_matches_when_it_is_alone() -> None:
    for registers_first in (True, False):
        c = Cluster(dialect=VLLM_COMPAT)
        c.prefill("x", request_id="cmpl-u-aaaaaaaa")
        if not registers_first:
            c.finish("x")
        c.decode("cmpl-u-cccccccc", "x")
        c.admit("cmpl-u-cccccccc")
        strip_xids(c)
        if registers_first:
            c.finish("x")
            c.run()
        assert c.outcomes["cmpl-u-cccccccc"] == ["COMMITTED"]
        assert c.released == [("x", "NONE")]


def strip_xids(c: Cluster) -> None:
    """As on vLLM's wire, which has no transfer id."""
    c.holding = {"Register"}
    c.run()
    for item in c.pending:
        if item.kind == "Register":
            bare = msgspec.structs.replace(item.what.message, xid="")
            item.what = msgspec.structs.replace(item.what, message=bare)
    c.holding = set()
    c.run()


# Restart and membership.


def restart_prefill(c: Cluster) -> None:
    c.crash("P")
    c.start_prefill("P", 102)


def test_r44_p_restarts_with_the_same_engine_id() -> None:
    """What waits for the old life fails and stays in quarantine until a fence; the new life serves from then on."""
    c = Cluster()
    c.holding = {"WRITE", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    restart_prefill(c)
    c.feed("D.r0", Received("P.r0", 102, RegisterAck(Reg("D", 201, 1, "r"), 0, 4, ())))
    assert c.outcomes["r"] == []
    c.run()
    assert c.outcomes["r"] == ["PEER_RESTARTED"]
    c.pass_time(10 * S)
    assert c.freed == []
    c.holding = {"WRITE"}
    c.run()
    assert len(c.freed) == 1
    c.holding = set()
    c.prefill_and_admit("s", "y")
    c.run()
    assert c.outcomes["s"] == ["COMMITTED"]


def test_p_restarts_with_a_new_engine_id() -> None:
    """The old one is silent: its requests die at 15 s, its fences free; the new one is just another peer."""
    c = Cluster(p=(engine_info("P"), engine_info("P2")))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.crash("P")
    c.holding = {"WRITE", "Sync", "Cancel", "Release"}
    c.pass_time(17 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert len(c.freed) == 1
    c.prefill("y", "P2")
    c.finish("y", "P2")
    c.decode("s", "y", prefill="P2")
    c.admit("s")
    c.holding = set()
    c.run()
    assert c.outcomes["s"] == ["COMMITTED"]


def test_r46_d_restarts_with_the_same_engine_id() -> None:
    """P asks with a nonce before it believes a new life, and ends what the old one had registered."""
    c = Cluster()
    c.prefill("x")
    c.decode("old", "x")
    c.admit("old")
    c.run()
    c.crash("D")
    c.start_decode("D", 202)
    c.prefill("y")
    c.finish("y")
    c.decode("new", "y")
    c.admit("new")
    c.run()
    assert [r.incarnation for r in c.endpoints["P.r0"].cells if isinstance(r, Reg)] == []
    c.finish("x")
    c.run()
    assert c.wrote() == []
    c.pass_time(2 * S)
    assert c.outcomes["new"] == ["COMMITTED"]
    assert [w.op.reg.incarnation for w in c.wrote()] == [202]


def test_peer_dead_at_15_s_and_not_before() -> None:
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.holding = {"Sync", "Cancel", "Release"}
    c.pass_time(15 * S - 1)
    assert c.outcomes["r"] == []
    c.pass_time(1)
    assert c.outcomes["r"] == ["PEER_DEAD"]


def test_a_long_prompt_is_no_stall() -> None:
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.pass_time(500 * S)
    assert c.outcomes["r"] == []
    c.finish("x")
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]


def test_a_write_without_end_is_a_stall() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.pass_time(31 * S)
    assert c.outcomes["r"] == ["STALLED"]
    assert c.freed == []


# Blocks, ranks, tokens.


@BOTH
@TPS
@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("first", ["P", "D"])
def test_matching_in_both_orders_and_every_ratio_of_ranks(dialect, tps, pulls, first) -> None:  # type: ignore[no-untyped-def]
    c = Cluster((engine_info("P", tps[0]),), (engine_info("D", tps[1]),), dialect, pulls)
    c.prefill("x")
    if first == "P" or pulls:
        c.finish("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    if first == "D" and not pulls:
        c.finish("x")
        c.run()
    assert c.outcomes["r"] == ["COMMITTED"]
    assert c.released == [("x", "NONE")]
    c.at_rest()


def test_pipelined_prefill_writes_every_stage() -> None:
    c = Cluster(p=(engine_info("P", 1, 2),))
    c.prefill_and_admit("r", "x")
    c.run()
    assert sorted(n for n, e in c.log if e in c.wrote()) == ["P.r0", "P.r1"]
    assert c.outcomes["r"] == ["COMMITTED"]


def test_prefix_hit_moves_the_tail_by_token_position() -> None:
    c = Cluster()
    c.prefill("x")
    c.finish("x", num_tokens=64)
    c.decode("r", "x")
    c.admit("r", token_start=48, num_tokens=16)
    c.run()
    (write,) = c.wrote()
    assert (write.registration.token_start, write.registration.num_tokens) == (48, 16)
    assert write.nbytes * 4 == c.agreed.geometry.nbytes(0, 0, c.infos["P"].shards, c.infos["D"].shards, 64)
    assert c.outcomes["r"] == ["COMMITTED"]


def test_r52_another_prompt_or_other_weights_are_refused() -> None:
    for kw, code in (({"digest": 8}, "CONTENT"), ({"weights": 2}, "WEIGHTS"), ({"num_tokens": 48}, "CONTENT")):
        c = Cluster()
        c.prefill("x")
        c.finish("x")
        c.decode("r", "x")
        c.admit("r", **kw)
        c.run()
        assert c.outcomes["r"] == [code]
        assert c.wrote() == []
        c.at_rest()


def test_r37_compat_refuses_unequal_blocks_and_strict_takes_them() -> None:
    for dialect, outcome in ((STRICT, "COMMITTED"), (VLLM_COMPAT, "LAYOUT")):
        c = Cluster(d=(engine_info("D", block_size=32),), dialect=dialect)
        c.prefill_and_admit("r", "x")
        c.run()
        assert c.outcomes["r"] == [outcome]
        c.at_rest()


def test_unpairable_parallelism_fails_and_holds_nothing() -> None:
    c = Cluster(p=(engine_info("P", 3),))
    c.prefill_and_admit("r", "x")
    c.run()
    assert c.outcomes["r"] == ["LAYOUT"]
    assert len(c.freed) == 1


def test_registration_ttl_is_renewed_by_sync() -> None:
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.pass_time(200 * S)
    assert len(cells(c)) == 1
    c.holding = {"Sync", "Cancel", "Release"}
    c.pass_time(61 * S)
    assert cells(c) == []


def test_cancel_is_repeated_at_doubling_intervals_until_answered() -> None:
    c = Cluster()
    c.holding = {"WRITE", "Cancel", "Sync"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    start, times = c.now, []
    for _ in range(500):
        before = len(c.frames(Cancel))
        c.pass_time(10 * MS)
        if len(c.frames(Cancel)) > before:
            times.append((c.now - start) // MS)
    assert times == [200, 600, 1400, 3000, 5000]


def test_duplicated_frames_are_notes() -> None:
    """Everything that was ever sent, once more after the end: no state changes."""
    c = Cluster()
    c.prefill_and_admit("r", "x")
    c.run()
    sent = [(n, e) for n, e in c.log if type(e) is Send]
    dones = [(n, e.to, e.notification) for n, e in c.log if hasattr(e, "notification")]
    before = {n: e.fingerprint() for n, e in c.endpoints.items()}
    for node, effect in sent:
        c.feed(effect.to, Received(node, c.incarnations[node[0]], effect.message))
    for node, to, notification in dones:
        c.feed(to, Received(node, c.incarnations[node[0]], notification))
    c.pending.clear()
    assert {n: e.fingerprint() for n, e in c.endpoints.items()} == before
    assert c.outcomes["r"] == ["COMMITTED"]


# Peers that lie (S9).


def hostile_frames(reg: Reg) -> list:  # type: ignore[type-arg]
    return [
        Cancel(reg, 99),
        Release("nothing of theirs"),
        Sync(1, 99, (), (reg,)),
        Taken("nothing of theirs", 0, 1),
        Completion("nothing of theirs", 1),
        Heartbeat(("nothing of theirs",)),
        Done(reg, 0, 2, 1, 1),
        Fail(reg, 0, Code.IO, True),
        CancelAck(reg, 0, Disposition.NOT_STARTED, True),
        RegisterAck(reg, 0, 4, ()),
    ]


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("sender", ["E.r0", "Q.r0", "P.r1", "D.r7", "x", "", ".r", "P.r-1", "D.r99999999"])
def test_frames_in_anothers_name_touch_nothing(sender, aborted) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(p=(engine_info("P"), engine_info("Q")), d=(engine_info("D"), engine_info("E")))
    c.holding = {"WRITE", "Cancel"}
    c.prefill_and_admit("r", "x")
    c.run()
    if aborted:
        c.abort("r")
        c.run()
    reg = c.frames(Register)[0].reg
    before = {n: tuple(e.cells.items()) for n, e in c.endpoints.items() if hasattr(e, "cells")}
    incarnation = {"P": 101, "D": 201}.get(sender[:1], 7)
    for message in (*hostile_frames(reg), c.frames(Register)[0]):
        for node in ("P.r0", "D.r0"):
            c.feed(node, Received(sender, incarnation, message))
    assert {n: tuple(e.cells.items()) for n, e in c.endpoints.items() if hasattr(e, "cells")} == before
    assert len(c.wrote()) == 1
    assert (c.freed, c.released) == ([], [])


@pytest.mark.parametrize("node", ["P.r0", "D.r0"])
def test_frames_of_another_incarnation_cause_a_handshake_and_nothing_else(node) -> None:  # type: ignore[no-untyped-def]
    c = Cluster()
    c.holding = {"WRITE", "handshake"}
    c.prefill_and_admit("r", "x")
    for peer in ("D.r0", "P.r0"):
        c.carry_out(c.find("handshake", peer))
        c.run()
    reg = c.frames(Register)[0].reg
    sender = "D.r0" if node == "P.r0" else "P.r0"
    before = {n: tuple(e.cells.items()) for n, e in c.endpoints.items() if hasattr(e, "cells")}
    for message in (*hostile_frames(reg), c.frames(Register)[0]):
        effects = c.feed(node, Received(sender, 666, message))
        assert all(type(e).__name__ in ("Note", "Handshake") for e in effects)
    assert {n: tuple(e.cells.items()) for n, e in c.endpoints.items() if hasattr(e, "cells")} == before
    assert sum(1 for n, e in c.log if n == node and type(e) is Handshake) == 2


@pytest.mark.parametrize("block_size", [0, -16, 1, 1 << 62])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (0, 1), (-1, 1), (1, 0), (3, 5), (1 << 40, 1)])
def test_absurd_shards_are_refused(tp, pp, block_size) -> None:  # type: ignore[no-untyped-def]
    for dialect in (STRICT, VLLM_COMPAT):
        c = Cluster(d=(engine_info("D"), engine_info("E")), dialect=dialect)
        c.holding = {"WRITE"}
        c.prefill_and_admit("r", "x")
        c.run()
        given = c.frames(Register)[0]
        c.prefill("y")
        c.finish("y")
        reg = msgspec.structs.replace(given.reg, engine="E", request_id="evil")
        evil = msgspec.structs.replace(given, reg=reg, xid="y", shards=Shards(tp, pp, block_size))
        c.oracle = None
        c.feed("P.r0", Received("E.r0", 201, evil))
        c.feed("P.r0", Received("E.r0", 201, msgspec.structs.replace(evil, num_tokens=-1, token_start=-5)))
        c.pending = [i for i in c.pending if "E.r0" not in (i.peer, i.node)]
        c.holding = set()
        c.run()
        assert c.outcomes["r"] == ["COMMITTED"]

"""Bugs that the machine once had, each by the shortest story that shows it."""

from __future__ import annotations

import msgspec
import pytest

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow.protocol.effects import Fence, Flush, Handshake, Note, PostRead, PostWrite, Send, SendLocal
from pdflow.protocol.events import (
    FenceEnded,
    FenceOrdered,
    FrameOrdered,
    HandshakeEnded,
    PeerExited,
    PeerLost,
    PeerRestarted,
    PrefillLegEnded,
    Received,
    WriteEnded,
)
from pdflow.protocol.ids import Op
from pdflow.protocol.messages import Cancel, Code, Completion, Fail, Progress, Register, RegisterAck, Release, Sync
from pdflow.protocol.producer.tombstones import WINDOW
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.values import S
from tests.support.cluster import Cluster
from tests.support.endpoints import Agreed, engine_info


def test_two_attempts_at_one_prompt_may_both_be_refused() -> None:
    """Both fell back to one LEASED cell, which stood in the table twice; the lease's end then found it gone."""
    c = Cluster()
    c.holding = {"handshake"}
    c.prefill_and_admit("r1", "x")
    c.decode("r2", "x")
    c.admit("r2")
    c.carry_out(c.find("handshake", "D.r0"))
    c.run()
    c.abort("r1")
    c.abort("r2")
    c.run()
    c.holding = set()
    c.pass_time(40 * S)
    assert c.released == [("x", "EXPIRED")]
    assert c.outcomes == {"r1": ["CANCELLED"], "r2": ["CANCELLED"]}


def test_compat_rank_that_registers_after_the_join_is_not_written() -> None:
    """It took a cell with a WRITE in flight back to JOINING, and the first rank was written a second time (C4, R13)."""
    c = Cluster(d=(engine_info("D", 2),), dialect=VLLM_COMPAT)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.carry_out(c.find("Register", "D.r0"))
    late = c.find("handshake", "D.r1")
    c.pending.remove(late)
    c.pass_time(3 * S)
    assert [w.to for w in c.wrote()] == ["D.r0"]
    c.pending.append(late)
    c.run()
    assert [w.to for w in c.wrote()] == ["D.r0"]
    c.holding = set()
    c.run()
    assert "COMMITTED" not in c.outcomes["r"]


def test_compat_copy_of_a_served_registration_is_ignored() -> None:
    """With another attempt holding the prompt, it was served again, over blocks that D had committed long before."""
    c = Cluster(dialect=VLLM_COMPAT)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r1", "x")
    c.decode("r2", "x")
    c.admit("r2")
    c.run()
    copy = next(e for n, e in c.log if n == "D.r0" and type(e).__name__ == "Send" and e.message.reg.request_id == "r1")
    c.carry_out(c.find("WRITE"))
    assert c.outcomes["r1"] == ["COMMITTED"]
    c.feed("P.r0", Received("D.r0", 201, copy.message))
    assert len(c.wrote()) == 2
    c.holding = set()
    c.run()
    assert c.outcomes["r2"] == ["COMMITTED"]


def test_a_refused_rank_does_not_swallow_the_handshake_of_another() -> None:
    """Its sibling stayed `connecting` for ever, without a handshake under way."""
    c = Cluster(d=(engine_info("D", 2),))
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.endpoints["P.r0"].peers.unreached("D.r1", c.now, c.agreed.timers)
    c.finish("x")
    shaking = {e.peer for n, e in c.log if n == "P.r0" and type(e) is Handshake}
    assert c.endpoints["P.r0"].peers.connecting <= shaking
    c.at_rest()
    assert c.outcomes["r"] == ["UNREACHABLE"]


def test_a_rank_lost_while_another_is_connected_is_connected_again() -> None:
    c = Cluster(d=(engine_info("D", 2),))
    c.holding = {"handshake"}
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.carry_out(c.find("handshake", "D.r1"))
    c.run()
    c.carry_out(c.find("handshake", "P.r0", "D.r0"))
    c.feed("P.r0", PeerLost("D.r0"))
    c.carry_out(c.find("handshake", "P.r0", "D.r1"))
    c.holding = set()
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]


def test_each_flush_speaks_of_its_own_write() -> None:
    """The first flush's end also settled a WRITE posted after that flush had begun (done_means = local)."""
    c = Cluster(done_is_remote=False)
    c.holding = {"WRITE", "flush"}
    c.prefill_and_admit("r1", "x1")
    c.prefill_and_admit("r2", "x2")
    c.run()
    c.carry_out(c.find("WRITE"))
    c.carry_out(c.find("WRITE"))
    c.carry_out(c.find("flush"))
    assert c.released == [("x1", "NONE")]
    c.holding = set()
    c.run()
    assert c.released == [("x1", "NONE"), ("x2", "NONE")]


def test_a_fence_is_no_flush() -> None:
    """A sibling's fence told a WRITE that waited for its flush that its bytes had landed (S7)."""
    c = Cluster(done_is_remote=False)
    c.holding = {"WRITE", "flush", "fence", "Done"}
    c.prefill_and_admit("r1", "x1")
    c.prefill_and_admit("r2", "x2")
    c.run()
    first, second = (i for i in c.pending if i.kind == "WRITE")
    c.pending.remove(first)
    c.feed("P.r0", WriteEnded(first.what.op, True))
    c.carry_out(second, ok=False)
    assert [type(e) for n, e in c.log if type(e) in (Flush, Fence)] == [Flush, Fence]
    c.carry_out(c.find("fence"))
    c.drop("flush")
    c.holding = set()
    c.run()
    assert {f.code for f in c.frames(Fail)} == {Code.IO}
    assert c.outcomes == {"r1": ["IO"], "r2": ["IO"]}


def test_a_write_that_ended_before_a_fence_is_not_taken_for_landed_while_its_sibling_runs() -> None:
    """A local DONE says that the source was read. The fence of another WRITE to that rank may drop the bytes (S7)."""
    c = Cluster(d=(engine_info("D", tp=2),), done_is_remote=False)
    c.holding = {"WRITE", "flush", "fence", "Done"}
    c.prefill_and_admit("r1", "x1")
    c.prefill_and_admit("r2", "x2")
    c.run()
    writes = {(i.what.op.reg.request_id, i.what.op.d_rank): i for i in c.pending if i.kind == "WRITE"}
    assert len(writes) == 4
    c.pending.remove(writes["r1", 0])
    c.feed("P.r0", WriteEnded(writes["r1", 0].what.op, True))
    for d_rank in (0, 1):
        c.carry_out(writes["r2", d_rank], ok=False)
    c.carry_out(c.find("fence", "P.r0", "D.r0"))
    c.holding = {"fence"}  # Flushes, if there were any, would end before the fence of D.r1.
    c.run()
    assert c.released == []
    c.holding = set()
    c.run()
    assert {fail.reg.request_id for fail in c.frames(Fail)} == {"r1", "r2"}
    assert c.outcomes == {"r1": ["IO"], "r2": ["IO"]}
    c.at_rest()


def test_a_write_that_has_landed_survives_the_fence_of_another_while_its_sibling_runs() -> None:
    c = Cluster(d=(engine_info("D", tp=2),))
    c.holding = {"WRITE", "fence"}
    c.prefill_and_admit("r1", "x1")
    c.prefill_and_admit("r2", "x2")
    c.run()
    writes = {(i.what.op.reg.request_id, i.what.op.d_rank): i for i in c.pending if i.kind == "WRITE"}
    c.carry_out(writes["r1", 0])
    for d_rank in (0, 1):
        c.carry_out(writes["r2", d_rank], ok=False)
    c.carry_out(c.find("fence", "P.r0", "D.r0"))
    c.holding = {"fence"}
    c.run()
    assert c.outcomes["r1"] == ["COMMITTED"]
    assert c.released == [("x1", "NONE")]
    c.holding = set()
    c.run()
    assert c.outcomes["r2"] == ["IO"]
    c.at_rest()


def test_compat_leg_that_ends_while_its_request_is_held_is_not_forgotten() -> None:
    """Its quarantine would have had no end: D counts the reclaim time from the end of the prefill leg (7.2)."""
    c = Cluster(p=(engine_info("P"), engine_info("Q")), dialect=VLLM_COMPAT, pool_blocks=16)
    c.prefill("y", "Q")
    c.decode("other", "y", prefill="Q")
    c.prefill("x")
    c.finish("x")
    c.decode("first", "x")
    c.decode("r", "x")
    assert c.enqueued == ["other", "first"]
    c.feed("D", PrefillLegEnded("r", True))
    c.abort("first")
    assert c.enqueued == ["other", "first", "r"]
    c.holding = {"WRITE"}
    c.admit("r")
    c.run()
    c.abort("r")
    assert any(t.kind is TimerKind.RECLAIM for t in c.endpoints["D"].armed())


def test_no_time_frees_an_orphan_in_strict() -> None:
    """A leg's end armed vllm-compat's reclaim timer for requests of a restarted P (H6)."""
    c = Cluster()
    c.holding = {"WRITE", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.feed("D", PrefillLegEnded("r", True))
    c.feed("D", PeerRestarted("P", 101))
    assert c.outcomes["r"] == ["PEER_RESTARTED"]
    assert not any(t.kind is TimerKind.RECLAIM for t in c.endpoints["D"].armed())
    c.pass_time(400 * S)
    assert not c.freed


def test_ranks_that_move_nothing_are_not_taken_for_dead() -> None:
    """P at TP 4 with 2 KV heads: two ranks are replicas that D never talks to; every request died after 15 s."""
    c = Cluster(p=(engine_info("P", 4),))
    c.prefill("x")
    c.decode("r", "x")
    c.pass_time(60 * S)
    assert not c.outcomes["r"]
    c.finish("x")
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]
    assert c.released == [("x", "NONE")]


@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT])
def test_ranks_that_move_nothing_release_an_aborted_request(dialect) -> None:  # type: ignore[no-untyped-def]
    c = Cluster(p=(engine_info("P", 4),), dialect=dialect)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.abort("r")
    c.pass_time(3 * S)
    assert [xid for xid, _ in c.released] == ["x"]


def test_who_was_held_for_a_suspect_peer_is_let_in_when_it_speaks_again() -> None:
    """Nothing asked again, so it waited for its deadline."""
    c = Cluster(pool_blocks=16)
    c.holding = {"WRITE", "Sync", "Fail", "Cancel"}
    c.prefill_and_admit("stuck", "x")
    c.run()
    c.abort("stuck")
    assert c.endpoints["D"].store.quarantined_blocks == 4
    c.pass_time(6 * S)
    c.prefill("y")
    c.decode("r", "y")
    assert c.enqueued == ["stuck"]
    c.holding = {"WRITE", "Cancel"}
    c.pass_time(3 * S)
    assert c.enqueued == ["stuck", "r"]


def test_two_engines_with_one_id_are_both_refused() -> None:
    """Frames went on to the second, over a connection that nobody had."""
    rank = Agreed().decode(engine_info("D"), 201)["D.r0"]
    for incarnation in (101, 102):
        rank.handle(HandshakeEnded("P.r0", True, incarnation), 0)
    rank.handle(PeerLost("P.r0"), 0)
    rank.handle(FrameOrdered(("P.r0",), Sync(1, 1, (), ())), 0)
    effects = rank.handle(HandshakeEnded("P.r0", True, 101), 0)
    assert [e.event for e in effects if type(e) is SendLocal] == [PeerRestarted("P", 102)]
    assert not any(type(e) is Send for e in effects)
    assert not rank.peers.connected
    assert not any(type(e) is Handshake for e in rank.handle(FrameOrdered(("P.r0",), Sync(2, 1, (), ())), 0))


def test_a_registration_for_a_prompt_whose_lease_ended_under_a_write_is_refused() -> None:
    """Its cell waited for a prompt that would never be finished again, renewed by every SYNC."""
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r1", "x")
    c.run()
    c.pass_time(31 * S)
    c.decode("r2", "x")
    c.admit("r2")
    c.run()
    assert c.outcomes["r2"] == ["EXPIRED"]
    c.holding = set()
    c.run()
    assert c.outcomes["r1"] == ["STALLED"]
    assert c.released == [("x", "NONE")]


def test_a_fenced_registration_may_be_posted_but_never_lands() -> None:
    """D fences a silent P and frees; P, which knows nothing of it, finishes the prompt and posts."""
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.holding = {"Sync", "Cancel", "Release"}
    c.pass_time(20 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert len(c.freed) == 1
    c.holding = {"WRITE"}
    c.pending = [i for i in c.pending if i.kind not in ("Sync", "Cancel", "Release")]
    c.finish("x")
    c.run()
    assert [e.to for _, e in c.log if type(e) is PostWrite] == ["D.r0"]
    c.fail("WRITE")
    c.at_rest()


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_a_request_that_never_left_is_no_sign_of_a_peer(pulls: bool) -> None:
    """It failed for want of a connection, and counted as an answer: with a new request every few seconds a dead P was
    never silent for long, and what it owed stayed open, or in quarantine, for as long."""
    c = Cluster(pulls=pulls)
    c.holding = {"WRITE", "READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.unreachable = {"P"}
    c.feed("D.r0", PeerLost("P.r0"))
    for second in range(16):
        c.pass_time(1 * S)
        c.decode(f"r{second}", "x")
        c.admit(f"r{second}")
        c.run()
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert {c.outcomes[f"r{second}"][0] for second in range(14)} == {"UNREACHABLE"}
    c.pass_time(1 * S)
    assert len(c.freed) == 17


def test_proof_of_death_ends_a_read() -> None:
    c = Cluster(pulls=True)
    c.holding = {"READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.feed("D.r0", PeerExited("P.r0"))
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert len(c.freed) == 1
    c.feed("D.r0", FenceEnded("P.r0"))


def test_compat_reader_that_is_quicker_than_a_lagging_rank_does_not_free_for_its_sibling() -> None:
    """One early completion freed the prompt, though two D ranks were to read it (S2)."""
    c = Cluster(d=(engine_info("D", 2),), dialect=VLLM_COMPAT, pulls=True)
    c.prefill("x")
    c.feed("P.r0", Received("D.r0", 201, Completion("p-x", 2)))
    c.finish("x")
    assert c.released == []
    c.feed("P.r0", Received("D.r1", 201, Completion("p-x", 2)))
    assert c.released == [("x", "NONE")]


@pytest.mark.parametrize("answered", ["before the fence has ended", "after"])
def test_what_waits_for_a_connection_does_not_outlive_a_fence(answered: str) -> None:
    """The fence settled a registration that had not left yet; it left later, and was written over freed blocks (S1)."""
    c = Cluster()
    c.holding = {"WRITE", "Sync", "Cancel", "Release", "fence"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.pass_time(15 * S)
    c.holding |= {"handshake"}
    c.prefill_and_admit("s", "y")
    if answered == "after":
        c.carry_out(c.find("fence"))
        assert c.outcomes["s"] == ["PEER_DEAD"]
    c.holding = {"WRITE", "fence"}
    c.run()
    c.holding = {"WRITE"}
    c.run()
    assert c.outcomes["s"] == ["PEER_DEAD"]
    assert [w.op.reg.request_id for w in c.wrote()] == ["r"]
    c.drop("WRITE", "P.r0")
    c.feed("P.r0", WriteEnded(c.wrote()[0].op, False))
    c.at_rest()


@pytest.mark.parametrize("connected", ["before", "never before"])
def test_an_incarnation_that_answers_behind_a_fence_is_accepted(connected: str) -> None:
    """D.r0 met the new P first, so D fenced the old one; D.r1 then dropped its own reply with the connection that it
    was closing, and a late frame of the dead life made it act (S8)."""
    c = Cluster(d=(engine_info("D", 2),))
    c.holding = {"WRITE"} if connected == "before" else {"handshake"}
    c.prefill_and_admit("r", "x")
    if connected == "never before":
        c.carry_out(c.find("handshake", "D.r0"))
    c.run()
    op = Op(c.frames(Register)[0].reg, 0, 1)
    late = Received("P.r0", 101, RegisterAck(op.reg, 0, Progress.READY, (0, 1)))
    asked = [i for i in c.pending if i.kind == "handshake"]
    c.crash("P")
    c.start_prefill("P", 102)
    c.pending += asked
    c.holding = {"handshake", "fence"}
    c.pass_time(2 * S)
    c.carry_out(c.find("handshake", "D.r0"))
    assert c.outcomes["r"] == ["PEER_RESTARTED"]
    c.carry_out(c.find("handshake", "D.r1"))
    assert [type(e) for e in c.feed("D.r1", late)] == [Note]
    c.holding = {"handshake"}
    c.run()
    assert len(c.freed) == 1
    assert not any(type(e) is SendLocal for e in c.feed("D.r1", late))
    c.at_rest()


def test_a_waiting_read_keeps_waiting_when_a_new_incarnation_answers_behind_a_fence() -> None:
    rank = Agreed().decode(engine_info("D"), 201)["D.r0"]
    rank.handle(HandshakeEnded("P.r0", True, 101), 0)
    rank.handle(PeerLost("P.r0"), 0)
    assert rank.handle(FrameOrdered(("P.r0",), Release("x")), 0) == (Handshake("P.r0"),)
    rank.handle(FenceOrdered("P.r0"), 0)
    assert rank.handle(HandshakeEnded("P.r0", True, 102), 0) == (SendLocal("D", PeerRestarted("P", 101)),)
    assert rank.handle(FrameOrdered(("P.r0",), Release("y")), 0) == ()
    assert Handshake("P.r0") in rank.handle(FenceEnded("P.r0"), 0)
    sent = rank.handle(HandshakeEnded("P.r0", True, 102), 0)
    assert sent == (Send("P.r0", Release("x")), Send("P.r0", Release("y")))


@pytest.mark.parametrize("incarnation", [101, 102])
def test_a_read_that_waits_for_a_connection_waits_for_the_same_incarnation_behind_a_fence(incarnation: int) -> None:
    """What it was to read is gone with the life that had it."""
    c = Cluster(pulls=True)
    c.holding = {"READ"}
    c.prefill_and_admit("r0", "x0")
    c.run()
    c.feed("D.r0", PeerLost("P.r0"))
    c.holding = {"READ", "handshake", "fence"}
    c.prefill_and_admit("r", "x")
    c.feed("D.r0", FenceOrdered("P.r0"))
    c.incarnations["P"] = incarnation
    c.carry_out(c.find("handshake", "D.r0"))
    assert [type(e) for n, e in c.log].count(PostRead) == 1
    assert c.outcomes["r"] == ([] if incarnation == 101 else ["PEER_RESTARTED"])
    c.carry_out(c.find("fence"))
    assert c.outcomes["r"] == (["PEER_DEAD"] if incarnation == 101 else ["PEER_RESTARTED"])
    assert len(c.freed) == 2


def test_a_read_that_waits_for_a_connection_does_not_outlive_a_fence() -> None:
    c = Cluster(pulls=True)
    c.prefill_and_admit("r", "x")
    c.feed("D.r0", PeerExited("P.r0"))
    assert c.outcomes["r"] == ["PEER_DEAD"]
    c.run()
    assert not any(type(e) is PostRead for _, e in c.log)


@pytest.mark.parametrize(("digest", "weights", "code"), [(8, 1, "CONTENT"), (7, 2, "WEIGHTS")])
def test_pull_of_another_prompt_is_not_even_begun(digest: int, weights: int, code: str) -> None:
    """KvParams said nothing of the content, so a pulling D committed whatever stood in P's blocks (S4)."""
    c = Cluster(pulls=True)
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.admit("r", digest=digest, weights=weights)
    c.run()
    assert c.outcomes["r"] == [code]
    assert not [e for _, e in c.log if isinstance(e, PostRead)]
    assert len(c.freed) == 1


def test_d_that_never_raises_its_floor_takes_no_memory_without_bound() -> None:
    """Cells and tombstones of one D lie in a window above its floor; beyond it a frame is dropped, unanswered (S9)."""
    c = Cluster()
    c.prefill_and_admit("r", "x")
    c.run()
    rank = c.endpoints["P.r0"]
    known = c.frames(Register)[0]
    far = known.reg.seq + WINDOW + 10
    for seq in (far, far + 1):
        reg = msgspec.structs.replace(known.reg, seq=seq)
        for message in (msgspec.structs.replace(known, reg=reg), Cancel(reg, known.floor)):
            effects = rank.handle(Received("D.r0", c.incarnations["D"], message), c.now)
            assert [type(e) for e in effects] == [Note]
    assert not rank.cells
    assert len(rank.store.tombs["D"].verdicts) <= 1


def test_a_release_counts_when_the_registration_has_ended() -> None:
    """It was forgotten: P kept a prompt that nobody wanted any more for the rest of a whole lease."""
    c = Cluster()
    c.holding = {"handshake"}
    c.prefill_and_admit("r1", "x")
    c.decode("r2", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.run()
    c.abort("r2")
    c.run()
    c.abort("r1")
    c.run()
    assert c.released == []
    c.pass_time(3 * S)
    assert c.released == [("x", "EXPIRED")]


def test_lost_cancel_is_sent_again_when_sync_shows_that_it_was_lost() -> None:
    """Its timer knows only fixed intervals, so that an outage that came and went with them could starve it."""
    c = Cluster()
    c.holding = {"WRITE", "Cancel"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.pass_time(4 * S)
    by_timer_alone = 5
    assert len(c.frames(Cancel)) > by_timer_alone
    assert c.outcomes["r"] == ["CANCELLED"]


def test_repeated_cancels_do_not_pile_up_for_a_connection() -> None:
    """Each repetition was kept beside the first while a handshake took its time (S9)."""
    c = Cluster()
    c.holding = {"handshake"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.abort("r")
    c.pass_time(10 * S)
    waiting = c.endpoints["D.r0"].pending["P.r0"]
    assert [type(m).__name__ for m in waiting] == ["Register", "Cancel", "Release", "Sync"]

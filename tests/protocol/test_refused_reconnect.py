"""A refused reconnect resolves what was registered over the lost connection; its blocks stay in quarantine."""

from __future__ import annotations

import pytest

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, Dialect
from pdflow.protocol.effects import Fence, Handshake
from pdflow.protocol.events import FrameOrdered, HandshakeEnded, PeerLost, ReadEnded, Received, WriteEnded
from pdflow.protocol.ids import Reg, engine_of
from pdflow.protocol.messages import Cancel, Progress, Register, RegisterAck, Sync
from pdflow.protocol.values import S
from tests.support.cluster import Cluster
from tests.support.endpoints import Agreed, engine_info

RESOLVED_WITHIN = 2 * S
"""From P's death, whatever D had just done: a SYNC, and its connection."""
DEAD = 15 * S


def die(c: Cluster, engine: str = "P") -> None:
    """All of P's processes die. Their connections break, and their addresses refuse."""
    c.crash(engine)
    c.refusing.add(engine)
    scheduler, *ranks = [address for address in c.endpoints if engine_of(address) == engine]
    for address in (scheduler, *ranks):
        del c.endpoints[address]
    for node in [address for address in c.endpoints if address.startswith("D.r")]:
        for rank in ranks:
            c.feed(node, PeerLost(rank))


# P has died.


@pytest.mark.parametrize("moment", ["before the WRITE", "during the WRITE", "after the WRITE, and DONE is lost"])
def test_a_request_of_a_dead_p_is_resolved_and_its_blocks_wait_for_the_fence(moment: str) -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    if moment != "before the WRITE":
        c.finish("x")
        c.run()
        assert len(c.wrote()) == 1
    if moment.startswith("after"):
        c.drop("WRITE")
        c.feed("P.r0", WriteEnded(c.wrote()[0].op, True))
    die(c)
    died_at = c.now
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert len(c.quarantined) == 1
    assert c.freed == []
    c.pass_time(died_at + DEAD - 1 * S - c.now)
    assert (c.freed, c.count(Fence)) == ([], 0)
    c.pass_time(2 * S)
    assert len(c.freed) == c.count(Fence) == 1
    c.at_rest()


def test_a_peer_that_does_not_answer_is_dead_only_by_its_silence() -> None:
    """A timeout proves nothing: P may be stopped, or the network between them."""
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.unreachable = {"P"}
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(DEAD - 1)
    assert c.outcomes["r"] == []
    c.pass_time(1 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]


def test_a_registration_that_cannot_be_sent_is_no_sign_of_p() -> None:
    c = Cluster()
    for request, xid in (("r", "x"), ("later", "y")):
        c.prefill(xid)
        c.decode(request, xid)
    c.admit("r")
    c.run()
    c.unreachable = {"P"}
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(DEAD - 2 * S)
    c.admit("later")
    c.run()
    assert (c.outcomes["r"], c.outcomes["later"]) == ([], ["UNREACHABLE"])
    c.pass_time(3 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]


def test_a_refusal_behind_a_timeout_counts() -> None:
    """The process was still there, or its host, when D first tried again."""
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.unreachable = {"P"}
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(1 * S)
    assert c.outcomes["r"] == []
    c.refusing = {"P"}
    c.pass_time(2 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]


def test_reconnects_to_a_dead_peer_back_off() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    before = c.count(Handshake, "D.r0")
    die(c)
    c.pass_time(14 * S)
    assert 3 <= c.count(Handshake, "D.r0") - before <= 5  # At about 1, 2, 4 and 8 s, though a CANCEL is due every 2 s.


# What the refusal does not touch.


def test_at_the_first_contact_a_request_fails_as_unreachable_and_its_blocks_are_free() -> None:
    """Nothing of it has ever left D, so that nothing can land."""
    c = Cluster()
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.refusing = {"P"}
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["UNREACHABLE"]
    assert len(c.freed) == 1
    assert c.quarantined == []


def test_requests_that_are_not_registered_keep_waiting() -> None:
    """They have no blocks, and P may be back before D has room for them."""
    c = Cluster(p=(engine_info("P"), engine_info("Q")), pool_blocks=16)
    c.holding = {"WRITE"}
    c.prefill("y", "Q")
    c.decode("other", "y", prefill="Q")
    c.prefill_and_admit("r", "x")
    c.run()
    c.prefill("z")
    c.decode("held", "z")
    assert c.enqueued == ["other", "r"]
    die(c)
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes == {"r": ["PEER_DEAD"]}


def test_a_queued_request_is_unreachable_when_it_is_admitted() -> None:
    c = Cluster()
    c.prefill("x")
    c.decode("r", "x")
    c.pass_time(1 * S)
    die(c)
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes["r"] == []
    c.admit("r")
    c.run()
    assert c.outcomes["r"] == ["UNREACHABLE"]
    assert len(c.freed) == 1


def test_a_registration_that_its_rank_has_not_received_is_not_concerned() -> None:
    """It comes behind the refusal, and meets P as it is then."""
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.lagging = {"D.r0"}
    c.holding = {"WRITE", "order"}
    c.prefill("y")
    c.finish("y")
    c.decode("s", "y")
    c.admit("s")
    c.crash("P")
    order = next(item for item in c.pending if item.what.message.reg.request_id == "s")
    c.feed("D.r0", PeerLost("P.r0"))
    c.feed("D.r0", FrameOrdered(("P.r0",), Sync(99, 1, (), ())))
    c.feed("D.r0", HandshakeEnded("P.r0", False, 0, True))
    assert c.outcomes == {"r": ["PEER_DEAD"]}
    c.carry_out(order)
    assert c.outcomes["s"] == ["UNREACHABLE"]


def test_requests_of_other_peers_are_not_concerned() -> None:
    c = Cluster(p=(engine_info("P"), engine_info("Q")))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.prefill("y", "Q")
    c.finish("y", "Q")
    c.decode("s", "y", prefill="Q")
    c.admit("s")
    c.run()
    die(c)
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes == {"r": ["PEER_DEAD"]}
    c.holding = set()
    c.run()
    assert c.outcomes["s"] == ["COMMITTED"]


def test_a_connection_that_stands_is_not_lost() -> None:
    """A frame of another incarnation makes D ask who is there: no answer to that ends what is registered."""
    c = Cluster()
    c.holding = {"WRITE", "handshake"}
    c.prefill_and_admit("r", "x")
    c.carry_out(c.find("handshake", "D.r0"))
    c.holding = {"WRITE", "handshake"}
    c.run()
    c.feed("D.r0", Received("P.r0", 102, RegisterAck(Reg("D", 201, 1, "r"), 0, Progress.READY, ())))
    c.pending.remove(c.find("handshake", "D.r0"))
    c.feed("D.r0", HandshakeEnded("P.r0", False, 0, True))
    assert c.outcomes["r"] == []


def test_a_shard_that_has_landed_needs_its_rank_no_more() -> None:
    """Two P ranks: what the one has written is here, and the other lives."""
    c = Cluster(p=(engine_info("P", 2),))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.carry_out(c.find("WRITE", "P.r0"))
    c.refusing = {"P.r0"}
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes["r"] == []
    c.carry_out(c.find("WRITE", "P.r1"))
    assert c.outcomes["r"] == ["COMMITTED"]


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (2, 2)])
def test_one_rank_that_refuses_ends_a_request_of_several_once(tps: tuple[int, int]) -> None:
    c = Cluster((engine_info("P", tps[0]),), (engine_info("D", tps[1]),))
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    die(c)
    c.pass_time(RESOLVED_WITHIN)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert c.freed == []
    c.pass_time(DEAD)
    assert len(c.freed) == 1
    c.at_rest()


@pytest.mark.parametrize(("dialect", "outcome"), [(STRICT, ["PEER_DEAD"]), (VLLM_COMPAT, [])])
def test_only_strict_acts_on_a_refusal(dialect: Dialect, outcome: list[str]) -> None:
    """vLLM's side channel does not connect before it sends: whoever asks there waits for its timeout."""
    c = Cluster(dialect=dialect)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    die(c)
    c.pass_time(6 * S)
    assert c.outcomes["r"] == outcome


# P lives all the same.


@pytest.mark.parametrize("moment", ["before the WRITE", "during the WRITE"])
def test_a_living_peer_gets_the_cancel_when_it_answers_again(moment: str) -> None:
    """A refusal that was wrong costs the request, and nothing else: its blocks follow P's answer, with no fence."""
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    if moment == "during the WRITE":
        c.finish("x")
        c.run()
    c.refusing = {"P"}
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(1 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert c.frames(Cancel) == []
    c.refusing = set()
    c.pass_time(2 * S)
    assert len(c.frames(Cancel)) >= 1
    if moment == "during the WRITE":
        assert c.freed == []
    c.holding = set()
    c.run()
    assert c.released == ([("x", "NONE")] if moment == "during the WRITE" else [])
    assert len(c.freed) == 1
    assert c.count(Fence) == 0
    c.prefill_and_admit("s", "y")
    c.run()
    assert c.outcomes == {"r": ["PEER_DEAD"], "s": ["COMMITTED"]}
    if moment == "before the WRITE":
        c.finish("x")
    c.at_rest()


def test_a_peer_that_starts_again_ends_the_quarantine_and_not_the_request_a_second_time() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    die(c)
    c.pass_time(1 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    c.refusing = set()
    c.start_prefill("P", 102)
    c.pass_time(2 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert len(c.freed) == c.count(Fence) == 1
    c.holding = set()
    c.prefill_and_admit("s", "y")
    c.run()
    assert c.outcomes["s"] == ["COMMITTED"]
    c.at_rest()


def test_a_peer_that_has_started_again_before_d_tries_is_no_refusal() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    die(c)
    c.refusing = set()
    c.start_prefill("P", 102)
    c.pass_time(1 * S)
    assert c.outcomes["r"] == ["PEER_RESTARTED"]


# Pull.


def test_a_read_from_a_dead_peer_keeps_its_blocks_until_it_has_ended() -> None:
    c = Cluster(pulls=True)
    c.holding = {"READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    read = c.find("READ")
    die(c)
    c.pass_time(1 * S)
    assert c.outcomes["r"] == ["PEER_DEAD"]
    assert (len(c.quarantined), c.freed) == (1, [])
    c.feed("D.r0", ReadEnded(read.what.op, False))
    assert len(c.freed) == 1
    c.at_rest()


# The rank.


def test_a_rank_reports_a_refusal_only_of_a_peer_that_it_had_lost() -> None:
    """And behind what fails because it never left: that is unreachable, and free at once."""
    c = Cluster()
    c.holding = {"handshake"}
    c.prefill_and_admit("r", "x")
    item = c.find("handshake", "D.r0")
    c.refusing = {"P"}
    c.carry_out(item)
    assert c.outcomes["r"] == ["UNREACHABLE"]
    assert len(c.freed) == 1
    rank = Agreed().decode(engine_info("D"), 201)["D.r0"]
    rank.handle(HandshakeEnded("P.r0", True, 101), 0)
    assert rank.handle(HandshakeEnded("P.r0", False, 0, True), 0) == ()
    assert len(rank.handle(HandshakeEnded("P.r0", False, 0, True), 0)) == 1
    assert rank.handle(HandshakeEnded("P.r0", False, 0), 0) == ()
    assert len(c.frames(Register)) == 0

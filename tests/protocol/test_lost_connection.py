"""A lost connection: D asks again at once what is open, and a peer whose connections keep breaking is not flooded."""

from __future__ import annotations

import pytest

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import FreeBlocks, Handshake
from pdflow.protocol.events import PeerLost
from pdflow.protocol.messages import Sync
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import MS, S
from tests.support.cluster import Cluster

RECONNECT = Timers().reconnect_ns


def test_a_write_that_fails_is_an_error_at_once_though_its_fence_closes_the_connection() -> None:
    """P can report the failure only over the next connection, which D opens."""
    c = Cluster()
    c.holding = {"WRITE", "Fail"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.pass_time(1300 * MS)  # between two SYNCs
    c.fail("WRITE")
    c.run()
    c.drop("Fail")
    c.holding = set()
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(RECONNECT - 1)
    assert c.outcomes["r"] == []
    c.pass_time(1)
    assert c.outcomes["r"] == ["IO"]
    assert c.count(FreeBlocks) == 1
    c.at_rest()


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_a_peer_whose_connections_break_at_once_is_asked_every_50_ms(pulls: bool) -> None:
    c = Cluster(pulls=pulls)
    c.holding = {"WRITE", "READ"}
    c.prefill_and_admit("r", "x")
    c.run()
    before = len(c.frames(Sync))
    for _ in range(1000):
        c.feed("D.r0", PeerLost("P.r0"))
        c.pass_time(1 * MS)
    assert len(c.frames(Sync)) - before <= 1 * S // RECONNECT


def test_a_peer_that_cannot_be_reached_is_left_alone_as_its_back_off_says() -> None:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    c.unreachable = {"P"}
    before = c.count(Handshake)
    for _ in range(700):
        c.feed("D.r0", PeerLost("P.r0"))
        c.pass_time(1 * MS)
    assert c.count(Handshake) - before == 1


def test_a_d_with_nothing_open_does_not_reconnect() -> None:
    c = Cluster()
    c.prefill("x")
    c.finish("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.at_rest()
    c.pass_time(2 * S)
    before = c.count(Handshake)
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(2 * S)
    assert c.count(Handshake) == before


def test_vllm_does_not_know_of_lost_connections() -> None:
    """Its side channel connects when it asks; its heartbeats keep their pace."""
    c = Cluster(dialect=VLLM_COMPAT)
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    before = len(c.log)
    c.feed("D.r0", PeerLost("P.r0"))
    c.pass_time(RECONNECT)
    assert c.log[before:] == []

"""P's answer names the incarnation that has computed the prompt: D's learning of a restart fails only what is older."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.events import PeerLost
from pdflow.protocol.values import S
from tests.support.cluster import Cluster
from tests.support.endpoints import engine_info

FIRST, SECOND = 101, 102


def restarted(pulls: bool = False) -> Cluster:
    """D has delivered a request of P, and does not know yet that P has started again."""
    c = Cluster(p=(engine_info("P", tp=2),), d=(engine_info("D", tp=2),), pulls=pulls)
    c.prefill_and_admit("r", "x")
    c.run()
    assert c.outcomes["r"] == ["COMMITTED"]
    c.crash("P")
    c.start_prefill("P", SECOND)
    for rank in ("P.r0", "P.r1"):
        c.feed(f"D.{rank[2:]}", PeerLost(rank))
    return c


def test_an_answer_names_its_incarnation() -> None:
    c = restarted()
    c.prefill("y")
    c.finish("y")
    assert [c.params(xid).incarnation for xid in ("x", "y")] == [FIRST, SECOND]
    compat = Cluster(dialect=VLLM_COMPAT)
    compat.prefill("x")
    compat.finish("x")
    assert compat.params("x").incarnation is UNSET


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_the_first_request_to_a_restarted_p_is_delivered(pulls: bool) -> None:
    c = restarted(pulls)
    c.prefill_and_admit("s", "y")
    c.pass_time(3 * S)
    assert c.outcomes["s"] == ["COMMITTED"]
    c.at_rest()


def test_a_request_that_waits_for_blocks_during_the_restart_is_delivered() -> None:
    c = restarted()
    c.prefill("y")
    c.finish("y")
    c.decode("s", "y")
    c.pass_time(3 * S)
    c.admit("s")
    c.pass_time(3 * S)
    assert c.outcomes["s"] == ["COMMITTED"]
    c.at_rest()


@pytest.mark.parametrize("named", [FIRST, UNSET], ids=["the former incarnation", "none"])
def test_a_request_for_a_prompt_of_the_former_incarnation_ends(named: object) -> None:
    c = restarted()
    c.answers["p-x"] = msgspec.structs.replace(c.params("x"), incarnation=named)
    c.decode("s", "x")
    c.admit("s")
    c.pass_time(3 * S)
    assert c.outcomes["s"] == ["PEER_RESTARTED"]
    c.at_rest()


def test_an_incarnation_before_the_last_counts_as_former() -> None:
    c = restarted()
    old = c.params("x")
    c.prefill_and_admit("s", "y")
    c.pass_time(3 * S)
    c.crash("P")
    c.start_prefill("P", 103)
    for rank in ("P.r0", "P.r1"):
        c.feed(f"D.{rank[2:]}", PeerLost(rank))
    c.answers["p-x"] = old
    c.decode("t", "x")
    c.admit("t")
    c.pass_time(3 * S)
    assert c.outcomes["t"] == ["PEER_RESTARTED"]
    c.at_rest()

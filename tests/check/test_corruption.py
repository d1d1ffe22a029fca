"""Frames that arrive undecodable, and a router that crashes: what the explored world then does, as live nodes do."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from pdflow.protocol.consumer.frames import ConsumerFrames
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.values import Address
from pdflow.serving.decode import DecodeCore
from pdflow.serving.events import RequestAborted
from pdflow.serving.prefill import PrefillCore
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.diagram import collect
from pdflow_sim.check.counterexamples.names import find, name
from pdflow_sim.check.counterexamples.replay import record, strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.routed.cluster import ROUTER
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.liveness import settle
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state.shadow_state import CRASH, ClientStage, PromptStage, RequestStage
from pdflow_sim.check.state.space import State

CORRUPT = Scope(corrupt=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0)
REGISTERED = ("finish x0", "decode u0-d0000000", "admit u0-d0000000", "handshake D.r0 -> P.r0")
CORRUPTED = (*REGISTERED, "corrupt Register u0-d0000000 D.r0 -> P.r0")
CRASHES = Scope(attempts=1, router_restart=1, concurrent=False, clocks=False, abort=0)
PREFILLS = ("request r0", "deliver DispatchPrefill r0.1 router -> P")
BOTH_LEGS = (*PREFILLS, "finish x0.1", "deliver PrefillAnswered r0.1 NONE P -> router")


def after(world: Relation, *names: str) -> State:
    state = world.turns.start()
    for text in names:
        move = find(world, state, text)
        assert move is not None, (text, possible(world, state))
        state = world.apply(state, move)
    return state


def possible(world: Relation, state: State) -> set[str]:
    return {name(world, state, move) for move in world.moves(state)}


def test_an_undecodable_frame_closes_the_connection_at_both_ends() -> None:
    world = relation(CORRUPT)
    state = after(world, *CORRUPTED)
    assert "D.r0" not in world.space.body(state, "P.r0").peers.connected
    assert "P.r0" in world.space.body(state, "D.r0").peers.connected, "D has not noticed it yet"
    state = after(world, *CORRUPTED, "closed D.r0 -> P.r0")
    assert "P.r0" not in world.space.body(state, "D.r0").peers.connected


def test_what_is_sent_on_a_closed_connection_is_lost() -> None:
    world = relation(CORRUPT)
    sent = (*CORRUPTED, "timer SYNC P at D")
    assert "deliver Sync #1 u0-d0000000 D.r0 -> P.r0" in possible(world, after(world, *sent))
    state = after(world, *sent, "closed D.r0 -> P.r0")
    assert not any(state[world.space.first_link : world.space.bag])


def test_a_corrupted_frame_is_recorded_and_replayed_and_drawn() -> None:
    world = relation(CORRUPT)
    recorded = record(world, [*CORRUPTED, "closed D.r0 -> P.r0"])
    assert strict(world, decode(encode(recorded))).confirms(recorded)
    assert any("corrupt Register" in line.text for line in collect(recorded).lines)
    assert world.space.settled(settle(world, after(world, *CORRUPTED))[-1])


@pytest.mark.parametrize("other", [{"twin": True}, {"dialect": VLLM_COMPAT}])
def test_what_corrupted_frames_exclude(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="corrupt excludes twin=true, and needs dialect=strict"):
        relation(Scope(corrupt=1, **other))


def test_an_endpoint_that_expects_a_sync_of_each_lost_connection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def expects_a_sync(self: ConsumerFrames, peer: Address) -> None:
        del self.synced[peer]

    monkeypatch.setattr(ConsumerFrames, "connection_lost", expects_a_sync)
    found = shortest(relation(CORRUPT))
    assert found is not None
    assert found.broken.name == CRASH


def test_a_router_that_crashes_forgets_and_its_legs_are_aborted() -> None:
    world = relation(CRASHES)
    state = after(world, *BOTH_LEGS, "deliver DispatchDecode r0.1 router -> D", "admit r0.1", "crash router")
    assert world.space.body(state, ROUTER).attempts == {}
    assert world.space.shadow_of(state).clients == (ClientStage.FAILED,)
    assert "deliver AbortLeg r0.1 router -> D" in possible(world, state)
    assert "deliver AbortLeg r0.1 router -> P" not in possible(world, state), "P's leg had ended"
    assert world.space.shadow_of(settle(world, state)[-1]).clients == (ClientStage.FAILED,)


def test_a_leg_that_was_under_way_reaches_its_engine_or_not() -> None:
    world = relation(CRASHES)
    crashes = {text for text in possible(world, after(world, *BOTH_LEGS)) if text.startswith("crash router")}
    assert crashes == {"crash router", "crash router without router -> D"}
    state = after(world, *BOTH_LEGS, "crash router without router -> D")
    assert world.space.shadow_of(state).stages == (RequestStage.UNREGISTERED,)
    assert world.space.shadow_of(state).products == (PromptStage.HELD,)
    state = after(world, *BOTH_LEGS, "crash router", "deliver DispatchDecode r0.1 router -> D")
    assert "deliver AbortLeg r0.1 router -> D" in possible(world, state)


def test_an_answer_to_a_leg_of_the_former_router_reaches_nobody() -> None:
    world = relation(CRASHES)
    state = after(world, *PREFILLS, "crash router", "finish x0.1", "deliver PrefillAnswered r0.1 NONE P -> router")
    assert world.space.body(state, ROUTER).fingerprint() == world.space.body(world.turns.start(), ROUTER).fingerprint()


def test_the_new_router_serves_the_next_client() -> None:
    scope = Scope(attempts=1, router_restart=1, requests=2, concurrent=False, clocks=False, abort=0)
    world = relation(scope)
    state = after(world, *PREFILLS, "crash router", "request r1")
    clients = {world.space.shadow_of(end).clients for end in reachable(world, state)}
    assert (ClientStage.FAILED, ClientStage.COMPLETED) in clients


def reachable(world: Relation, state: State) -> set[State]:
    found, level = {state}, [state]
    while level:
        level = [end for one in level for move in world.moves(one) if (end := world.apply(one, move)) not in found]
        found.update(level)
    return found


def keeps_the_leg(self: Any, event: RequestAborted) -> None:
    """An engine that goes on with a leg whose router has gone."""


@pytest.mark.parametrize(("core", "breaks"), [(DecodeCore, "L1"), (PrefillCore, "L")])
def test_an_engine_that_keeps_a_leg_whose_router_has_gone_is_found(
    core: type, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_aborted", keeps_the_leg)
    found = shortest(relation(evolve(CRASHES, clocks=True, deadline=0, stall=0)))
    assert found is not None
    assert found.broken.name == breaks


@pytest.mark.parametrize("other", [{}, {"attempts": 2, "p_engines": 2}, {"attempts": 1, "dialect": VLLM_COMPAT}])
def test_what_a_crash_of_the_router_needs(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="router_restart needs"):
        relation(Scope(router_restart=1, **other))

"""A P that is down, and one that refuses though it lives: what the explored world then does and does not allow."""

from __future__ import annotations

import pytest

from pdflow.protocol.dialect import STRICT
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.diagram import collect
from pdflow_sim.check.counterexamples.names import find, name
from pdflow_sim.check.counterexamples.replay import record, strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.ordered import RelationCache
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import counterexample, hunt
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.walk import walk
from pdflow_sim.check.state.cluster import Nobody
from pdflow_sim.check.state.shadow_state import RequestStage
from pdflow_sim.check.state.space import State
from tests.check.answers import no_clock

DOWN = Scope(p_restart=1, down=True, sync=1, abort=0, deadline=0, stall=0)
REGISTERED = (
    "decode u0-d0000000",
    "admit u0-d0000000",
    "handshake D.r0 -> P.r0",
    "deliver Register u0-d0000000 D.r0 -> P.r0",
)


def after(world: Relation, *names: str) -> State:
    state = world.turns.start()
    for text in names:
        move = find(world, state, text)
        assert move is not None, (text, possible(world, state))
        state = world.apply(state, move)
    return state


def possible(world: Relation, state: State) -> set[str]:
    return {name(world, state, move) for move in world.moves(state)}


def test_a_p_that_is_down_refuses_and_nothing_reaches_it() -> None:
    world = relation(DOWN)
    state = after(world, *REGISTERED, "kill P", "timer SYNC P at D", "deliver Sync #1 u0-d0000000 D.r0 -> P.r0")
    assert type(world.space.body(state, "P.r0")) is Nobody
    assert not any(world.space.chans.values[chan] for chan in state[world.space.first_link : world.space.bag])
    assert possible(world, state) == {"lost D.r0 -> P.r0", "start P"}


def test_d_is_refused_until_p_starts_again() -> None:
    world = relation(DOWN)
    state = after(world, *REGISTERED, "kill P", "lost D.r0 -> P.r0", "timer SYNC P at D")
    assert {"refused D.r0 -> P.r0", "start P"} == possible(world, state)
    move = find(world, state, "start P")
    assert move is not None
    started = possible(world, world.apply(state, move))
    assert "handshake D.r0 -> P.r0" in started
    assert not any("refused" in text for text in started)
    move = find(world, state, "refused D.r0 -> P.r0")
    assert move is not None
    assert world.space.shadow_of(world.apply(state, move)).stages == (RequestStage.RESOLVED,)


def test_p_does_not_start_again_where_engines_have_clocks() -> None:
    world = relation(Scope(p_restart=1, down=True, horizon=2, abort=0))
    state = after(world, "kill P")
    assert not any(text.startswith(("start", "restart", "kill")) for text in possible(world, state))


def test_only_d_is_refused_by_a_living_peer() -> None:
    world = relation(Scope(refused=1, abort=0, deadline=0, stall=0))
    state = after(world, "decode u0-d0000000", "admit u0-d0000000")
    assert "falsely refused D.r0 -> P.r0" in possible(world, state)
    state = after(world, *REGISTERED, "finish x0")
    assert "handshake P.r0 -> D.r0" in possible(world, state)
    assert not any("refused" in text for text in possible(world, state))


@pytest.mark.parametrize("scope", [DOWN, Scope(p_restart=2, down=True, refused=2, lose=2, sync=3, cancel=2)])
def test_walks_move_as_the_relation_does(scope: Scope) -> None:
    """They remember moves by what decides them: whether P is down, too."""
    cache = RelationCache()
    for seed in range(60):
        walked = walk(cache, seed, STRICT, scope)
        assert walked.broken is None, walked.names(cache.of(walked.cluster))
        plain, world = relation(scope), cache.of(walked.cluster)
        state = plain.turns.start()
        for before, move in walked.steps(world):
            assert sorted(name(world, before, one) for one in world.moves(before)) == sorted(
                name(plain, state, one) for one in plain.moves(state)
            )
            found = find(plain, state, name(world, before, move))
            assert found is not None
            state = plain.apply(state, found)


@pytest.mark.parametrize("mutant", ["refusal-frees", "refusal-is-a-fence"])
def test_its_counterexample_replays_and_is_drawn(mutant: str) -> None:
    recorded = decode(encode(counterexample(MUTANTS[mutant], hunt(MUTANTS[mutant], no_clock))))
    with MUTANTS[mutant].applied():
        assert strict(MUTANTS[mutant].world(), recorded).verdict == recorded.verdict
        lines = [line.text for line in collect(recorded).lines]
    assert any("refused D.r0 -> P.r0" in line for line in lines)


def test_a_digest_is_the_same_whether_or_not_p_could_be_down() -> None:
    """Recorded counterexamples are older than the field."""
    moves = (*REGISTERED, "finish x0", "handshake P.r0 -> D.r0")
    plain = Scope(p_restart=1, sync=1, abort=0, deadline=0, stall=0)
    assert [step.after for step in record(relation(plain), moves).steps] == [
        step.after for step in record(relation(DOWN), moves).steps
    ]


@pytest.mark.parametrize("other", [{"orphan": True}, {"attempts": 1}, {"method": "cpu-staged"}])
def test_down_needs_a_world_that_can_have_it(other: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="down"):
        relation(Scope(p_restart=1, down=True, **other))  # type: ignore[arg-type]

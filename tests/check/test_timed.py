"""Clocks of which one runs faster than the other, and a driver that stands still while nothing is open."""

from __future__ import annotations

from functools import partial

import pytest

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.counterexamples.names import find
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state.cluster import TICKS
from pdflow_sim.check.state.space import State


def deadline(world: Relation, state: State) -> int:
    (cell,) = world.space.body(state, "D").cells.values()
    return int(cell.deadline_until)


def ticked(world: Relation, state: State) -> dict[str, State]:
    moves = {move: world.apply(state, move) for move in world.moves(state) if move[0] == "tick"}
    return {"PD"[move[1]]: after for move, after in moves.items()}


@pytest.mark.parametrize("drift", [-1, 0, 1, 2])
def test_a_tick_of_the_faster_clock_is_several(drift: int) -> None:
    world = relation(Scope(horizon=2, drift=drift, abort=0))
    state = world.turns.start()
    move = find(world, state, "decode u0-d0000000")
    assert move is not None
    state = world.apply(state, move)
    after = ticked(world, state)
    assert deadline(world, state) == deadline(world, after["P"]) == TICKS.deadline_ns
    assert deadline(world, after["D"]) == TICKS.deadline_ns - 1 - max(0, drift)


@pytest.mark.parametrize("field", ["drift", "idle"])
def test_without_clocks_none_drifts(field: str) -> None:
    with pytest.raises(ValueError, match="drift and idle need horizon"):
        relation(partial(Scope, **{field: 1})())


def test_only_drift_shows_that_a_clock_ends_a_quarantine() -> None:
    """Clocks of one rate keep the margin that two clocks need."""
    mutant = MUTANTS["quarantine-ends-by-the-clock"]
    with mutant.applied():
        assert shortest(relation(Scope(horizon=2)), lively=False) is None


def test_vllm_compat_rests_on_clocks_of_one_rate() -> None:
    """Its reclaim time has a margin for the offset of two clocks, and none for their rates (spec 6.2)."""
    found = shortest(relation(Scope(dialect=VLLM_COMPAT, horizon=8, drift=2)), lively=False)
    assert found is not None
    assert found.broken.name == "S1"

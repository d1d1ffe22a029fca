"""SYNC numbers: the machine asks of one only whether it is another one, and counts on; the lowest may be called 1."""

from __future__ import annotations

import pytest

from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.scope import ENDLESS, Scope
from pdflow_sim.check.search.search import Search
from pdflow_sim.check.state.counting import NONE, Counting
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

QUIET = {"abort": 0, "deadline": 0, "stall": 0}


def whole(world: Transitions) -> set[State]:
    states = {world.turns.start()}
    level = list(states)
    while level:
        level = list({world.apply(state, move) for state in level for move in world.moves(state)} - states)
        states.update(level)
    return states


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope",
    [
        Scope(sync=2, drop=1, concurrent=False, **QUIET),
        Scope(pulls=True, sync=2, drop=1, p_restart=1, **QUIET),
        Scope(pulls=True, sync=2, d_restart=1, **QUIET),
        Scope(pulls=True, horizon=4, abort=0),
    ],
    ids=["push", "pull, P starts again", "pull, D starts again", "pull, with clocks"],
)
def test_with_higher_numbers_the_same_happens(scope: Scope) -> None:
    world = relation(scope)
    counting = Counting(world.space)
    higher = counting.less(-3)
    numbered = [state for state in whole(world) if 0 < counting.lowest_in(state) < NONE]
    assert numbered
    for state in numbered:
        renamed = tuple(higher(state))
        assert renamed != state
        assert world.moves(renamed) == world.moves(state)
        for move in world.moves(state):
            assert world.apply(renamed, move) == tuple(higher(world.apply(state, move)))


def test_the_lowest_is_called_1() -> None:
    world = relation(Scope(pulls=True, sync=2, **QUIET))
    counting = Counting(world.space)
    for state in whole(world):
        if 0 < counting.lowest_in(state) < NONE:
            raised = tuple(counting.less(-3)(state))
            assert counting.lowest_in(tuple(counting.canonical(raised))) == 1
            assert tuple(counting.canonical(raised)) == tuple(counting.canonical(state))


def ended(scope: Scope, counts: bool) -> tuple[Search, str]:
    """A search to its end, and what it has found broken."""
    world = relation(scope)
    search = Search(world)
    search.counting = Counting(world.space) if counts else None
    try:
        search.run(1_000_000, None, lively=True)
    except Broken as broken:
        return search, f"{broken.name} in {len(search.counterexample(broken).moves)}"
    return search, ""


@pytest.mark.slow
def test_redundant_states_are_left_out() -> None:
    scope = Scope(pulls=True, horizon=6, abort=0)
    (less, found), (more, also) = ended(scope, True), ended(scope, False)
    assert found == also == ""
    assert less.found.states < more.found.states
    assert less.world.space.checker.seen.keys() == more.world.space.checker.seen.keys()


@pytest.mark.nightly
def test_what_breaks_breaks_in_as_many_steps() -> None:
    mutant = MUTANTS["silence-frees"]
    with mutant.applied():
        assert ended(mutant.scope, True)[1] == ended(mutant.scope, False)[1] != ""


@pytest.mark.slow
def test_engines_that_have_clocks_for_ever_have_finitely_many_states() -> None:
    search, found = ended(Scope(pulls=True, horizon=ENDLESS, abort=0), True)
    assert found == ""
    assert search.found.complete
    assert search.reductions == ("SYNCs numbered from the lowest one in use",)

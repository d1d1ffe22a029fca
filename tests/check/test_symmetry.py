"""Requests and engines that nothing tells apart: what is left out says nothing that what is looked at does not say."""

from __future__ import annotations

from itertools import permutations

import pytest

from pdflow.protocol.dialect import VLLM_COMPAT, VLLM_STOCK
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore, shortest
from pdflow_sim.check.state.space import State
from pdflow_sim.check.state.symmetry import Symmetry

QUIET = {"abort": 0, "deadline": 0, "stall": 0}
ALIKE = {
    "two prompts": Scope(requests=2, concurrent=False, **QUIET),
    "two prompts, one base id": Scope(requests=2, same_base=True, concurrent=False, **QUIET),
    "one prompt": Scope(requests=2, same_product=True, concurrent=False, drop=1, **QUIET),
    "one pool, an abort": Scope(requests=2, pool=1, concurrent=False, abort=1, deadline=0, stall=0),
    "lagging ranks": Scope(requests=2, lagging=True, concurrent=False, clocks=False, **QUIET),
    "pull": Scope(pulls=True, requests=2, deadline=0),
    "pull, a restart": Scope(pulls=True, requests=2, p_restart=1, **QUIET),
    "pull, a SYNC": Scope(pulls=True, requests=2, sync=1, **QUIET),
    "three pulls": Scope(pulls=True, requests=3, concurrent=False, clocks=False, **QUIET),
    "compat": Scope(dialect=VLLM_COMPAT, requests=2, dup=1, **QUIET),
    "compat, one prompt": Scope(dialect=VLLM_COMPAT, requests=2, same_product=True, err=1, **QUIET),
    "two P engines, a restart": Scope(requests=2, p_engines=2, p_restart=1, concurrent=False, **QUIET),
    "two P engines, an orphan": Scope(requests=2, p_engines=2, p_restart=1, orphan=True, concurrent=False, **QUIET),
    "two P engines, one is down": Scope(
        requests=2, p_engines=2, p_restart=1, down=True, concurrent=False, clocks=False, **QUIET
    ),
    "two D engines, a restart": Scope(requests=2, d_engines=2, d_restart=1, concurrent=False, **QUIET),
    "two D engines, compat": Scope(dialect=VLLM_COMPAT, requests=2, d_engines=2, dup=1, **QUIET),
    "pull, a clock": Scope(pulls=True, requests=2, horizon=1, abort=0),
}
LARGER = {
    "two prompts, decode first": Scope(requests=2, **QUIET),
    "two prompts, a SYNC": Scope(requests=2, sync=1, concurrent=False, **QUIET),
    "two prompts, one base id, decode first": Scope(requests=2, same_base=True, **QUIET),
    "pull, a restart and a SYNC": Scope(pulls=True, requests=2, p_restart=1, sync=1, **QUIET),
}

BROKEN = {
    "one base id": Scope(dialect=VLLM_STOCK, requests=2, same_base=True, **QUIET),
    "one prompt": Scope(dialect=VLLM_STOCK, requests=2, same_product=True, deadline=0, stall=0),
}


def whole(scope: Scope) -> tuple[set[State], Symmetry]:
    """Every state, and the renamings of its world."""
    world = relation(scope)
    states = {world.turns.start()}
    level = list(states)
    while level:
        after = {world.apply(state, move): None for state in level for move in world.moves(state)}
        level = [state for state in after if state not in states]
        states.update(level)
    return states, Symmetry(world.space)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope",
    [
        *(pytest.param(scope, id=name) for name, scope in ALIKE.items()),
        *(pytest.param(scope, id=name, marks=pytest.mark.nightly) for name, scope in LARGER.items()),
    ],
)
def test_one_of_each_orbit_is_looked_at(scope: Scope) -> None:
    states, symmetry = whole(scope)
    assert len(symmetry.others) == len(list(permutations(range(scope.requests)))) - 1
    orbits = {frozenset([state, *(tuple(other(state)) for other in symmetry.others)]) for state in states}
    assert all(states >= orbit for orbit in orbits)
    world = relation(scope)
    covered = explore(world, symmetry=Symmetry(world.space))
    assert covered.states == len(orbits) < len(states)
    plain = relation(scope)
    raw = explore(plain)
    assert raw.states == len(states)
    assert raw.depth == covered.depth
    assert world.space.checker.seen.keys() == plain.space.checker.seen.keys()


def verdict(world: Transitions, symmetry: Symmetry | None) -> tuple[str, int] | None:
    """What is broken, and in how many steps."""
    found = shortest(world, symmetry=symmetry)
    return None if found is None else (found.broken.name, len(found.moves))


LONGEST = {"floor-too-high"}
COUPLED = [
    pytest.param(mutant, id=mutant.name, marks=[pytest.mark.nightly] * (mutant.name in LONGEST or not mutant.breaks))
    for mutant in MUTANTS.values()
    if mutant.scope.requests > 1
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", COUPLED)
def test_what_breaks_breaks_in_as_many_steps(mutant: Mutant) -> None:
    with mutant.applied():
        world = mutant.world()
        assert verdict(world, Symmetry(world.space)) == verdict(mutant.world(), None)


@pytest.mark.parametrize("scope", BROKEN.values(), ids=BROKEN.keys())
def test_so_does_vllm(scope: Scope) -> None:
    world = relation(scope)
    found = verdict(world, Symmetry(world.space))
    assert found is not None
    assert found == verdict(relation(scope), None)


def test_one_request_is_like_no_other() -> None:
    assert not Symmetry(relation(Scope()).space).others


def test_distinguishable_requests_are_not_symmetric() -> None:
    # Of three requests, two share their blocks: the first and the third.
    symmetry = Symmetry(relation(Scope(requests=3, pool=2)).space)
    assert len(symmetry.others) == 1
    # Two P engines serve three requests: the first and the third are on one.
    assert len(Symmetry(relation(Scope(requests=3, p_engines=2)).space).others) == 1
    assert not Symmetry(relation(Scope(pulls=True, requests=2, p_engines=2)).space).others

"""Two engines of one id: which of them a handshake and a frame of D reach. Three engines of a kind."""

from __future__ import annotations

import pytest

from pdflow_sim.check.counterexamples.names import find, name
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state.space import State

TWIN = Scope(twin=True, lose=2, sync=1, abort=0, deadline=0, stall=0)
REGISTERED = ("decode u0-d0000000", "admit u0-d0000000", "second D.r0 -> P.r0")


def after(world: Relation, state: State, *names: str) -> State:
    for text in names:
        move = find(world, state, text)
        assert move is not None, (text, [name(world, state, move) for move in world.moves(state)])
        state = world.apply(state, move)
    return state


def test_a_frame_goes_to_the_engine_that_answered() -> None:
    world = relation(TWIN)
    state = after(world, world.turns.start(), *REGISTERED)
    assert find(world, state, "deliver Register u0-d0000000 D.r0 -> P.r0") is None
    state = after(world, state, "deliver Register u0-d0000000 D.r0 -> second P.r0")
    assert world.space.body(state, "second P.r0").cells
    assert not any(cell.reg for cell in world.space.body(state, "P.r0").cells.values())


def test_d_refuses_both_once_a_replaced_one_has_answered() -> None:
    world = relation(TWIN)
    acknowledges = "deliver Register u0-d0000000 D.r0 -> second P.r0"
    reconnects = ("lose D.r0 -> second P.r0", "timer SYNC P at D", "handshake D.r0 -> P.r0", "fence D.r0 -> P.r0")
    state = after(world, world.turns.start(), *REGISTERED, acknowledges, *reconnects)
    peers = world.space.body(state, "D.r0").peers
    assert (peers.incarnations["P"], peers.retired["P"], peers.duplicates) == (101, frozenset({102}), set())
    state = after(world, state, "deliver RegisterAck u0-d0000000 QUEUED second P.r0 -> D.r0", "second D.r0 -> P.r0")
    assert world.space.body(state, "D.r0").peers.duplicates == {"P"}


def test_one_of_three_engines_is_limited_too() -> None:
    scope = Scope(p_engines=3, requests=4, pool_blocks=8, concurrent=False, abort=0, clocks=False)
    with MUTANTS["no-limit-for-a-peer"].applied():
        found = shortest(relation(scope))
    assert found is not None
    assert found.broken.name == "L6"


@pytest.mark.parametrize("other", [{"p_engines": 2}, {"p_restart": 1}, {"lagging": True}, {"horizon": 1}])
def test_what_two_engines_of_one_id_exclude(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="twin=true excludes"):
        relation(Scope(twin=True, **other))

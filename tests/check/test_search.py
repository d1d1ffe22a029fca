"""The search: nothing is missed though little is kept, and what it finds can be told."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search import workers
from pdflow_sim.check.search.liveness import settle
from pdflow_sim.check.search.search import Coverage, explore, shortest
from pdflow_sim.check.search.workers import SearchLimits, search
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State, StateSpace
from pdflow_sim.check.suites import scopes as scopes_suite

SCOPES = {
    "push": Scope(dup=1),
    "pull": Scope(pulls=True, requests=2, deadline=0),
    "pull, with clocks": Scope(pulls=True, horizon=3, abort=0),
}


def levels(world: Transitions) -> list[set[State]]:
    """Every state, whole, by how many moves lead to it at least."""
    found = [{world.turns.start()}]
    seen = set(found[0])
    while found[-1]:
        after = {world.apply(state, move) for state in found[-1] for move in world.moves(state)} - seen
        seen |= after
        found.append(after)
    return found[:-1]


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_64_bits_of_a_state_are_enough(scope: Scope) -> None:
    world = relation(scope)
    by_depth = levels(world)
    covered = explore(relation(scope))
    assert covered.complete
    assert covered.states == sum(map(len, by_depth))
    assert covered.transitions == sum(len(world.moves(state)) for level in by_depth for state in level)
    assert covered.depth == len(by_depth) - 1


def test_the_odds_are_those_of_birthdays() -> None:
    assert math.isclose(Coverage(states=30_000_000).odds, 2.4e-5, rel_tol=0.02)


def test_the_path_back_leads_to_the_violation_and_none_is_shorter() -> None:
    mutant = MUTANTS["no-tombstone"]
    with mutant.applied():
        world = mutant.world()
        counterexample = shortest(world)
        assert counterexample is not None
        state = world.turns.start()
        for move in counterexample.moves[:-1]:
            state = world.apply(state, move)
        with pytest.raises(Broken, match=str(counterexample.broken)):
            world.apply(state, counterexample.moves[-1])
        other = mutant.world()
        near = {other.turns.start()}
        for _ in counterexample.moves[1:]:
            near = {other.apply(state, move) for state in near for move in other.moves(state)}


def test_a_counterexample_leads_to_the_state_that_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSpace, "settled", lambda space, state: not space.ops_of(state))
    monkeypatch.setattr(StateSpace, "leftovers", lambda space, state: [])
    monkeypatch.setattr("pdflow_sim.check.search.liveness.quiet_schedule", lambda world, state: iter(()))
    world = relation(Scope())
    counterexample = shortest(world)
    assert counterexample is not None
    assert counterexample.broken.name == "L"
    state = world.turns.start()
    for move in counterexample.moves:
        settle(world, state)
        state = world.apply(state, move)
    with pytest.raises(Broken, match=r"^L: "):
        settle(world, state)


def test_safety_violations_are_reported_before_liveness_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdflow_sim.check.search.liveness.quiet_schedule", lambda world, state: iter(()))
    mutant = MUTANTS["no-tombstone"]
    with mutant.applied():
        found = shortest(mutant.world())
    assert found is not None
    assert found.broken.name == mutant.breaks != "L"


def test_without_memory_the_search_stops_and_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Named("small", Scope(dup=1), frozenset())
    found = search(named, SearchLimits(memory_bytes=1), lambda *_: None)
    assert (found.stopped_by, found.holds, found.missed) == ("memory", False, ())
    monkeypatch.setattr(workers, "MEMORY_BYTES", 1)
    arguments = ["check", "scopes", "--only", "pull in two pieces", "--jobs", "1", "--out", str(tmp_path / "none")]
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 3
    assert "stopped: memory" in ran.stdout


def test_reductions_of_a_search_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Named("two pulls", Scope(pulls=True, requests=2, deadline=0), frozenset(), nightly=True)
    monkeypatch.setattr(scopes_suite, "SCOPES", (named,))
    arguments = ["check", "scopes", "--large", "--jobs", "1"]
    output = " ".join(CliRunner().invoke(cli, arguments).stdout.split())
    assert "two pulls: requests alike: one of up to 2 states" in output
    assert "64-bit hashing; collision probability <= " in output
    (row,) = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["scopes"]
    assert row["reductions"] == ["requests alike: one of up to 2 states"]
    assert 0 < row["collision_probability"] < 1e-9


def test_a_violation_in_another_process_can_be_pickled() -> None:
    unpickled = pickle.loads(pickle.dumps(Broken("S1", "a block has two owners")))
    assert (unpickled.name, unpickled.what, str(unpickled)) == (
        "S1",
        "a block has two owners",
        "S1: a block has two owners",
    )

"""Fair runs: a livelock that one schedule from each state does not meet is noticed, and nothing else taken for one."""

from __future__ import annotations

import attrs
import pytest

from pdflow.version import compiled
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.replay import strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import counterexample, hunt
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.components import components
from pdflow_sim.check.search.fairness import Fairness, Repeats
from pdflow_sim.check.search.search import Search
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import StateSpace
from tests.check.answers import hunted, no_clock

LIVELOCK = "cancel-restarts-the-flush"


def test_components_are_those_of_a_graph_by_hand() -> None:
    edges = {0: [1, 4], 1: [2], 2: [3], 3: [1, 4], 4: [5], 5: [5], 6: [0]}
    closed: set[int] = set()
    found = [sorted(component) for component in components(0, edges.__getitem__, closed)]
    assert found == [[5], [4], [1, 2, 3], [0]]
    assert [*components(6, edges.__getitem__, closed)] == [[6]]
    assert [*components(6, edges.__getitem__, closed)] == []


@pytest.mark.skipif(compiled(), reason="a compiled machine cannot be patched")
def test_a_livelock_is_noticed_only_by_fair_runs() -> None:
    mutant = MUTANTS[LIVELOCK]
    assert hunted(LIVELOCK).invariant == "L"
    assert hunt(attrs.evolve(mutant, repeats=None), no_clock).invariant == ""


@pytest.mark.skipif(compiled(), reason="a compiled machine cannot be patched")
def test_the_counterexample_of_a_livelock_replays() -> None:
    mutant = MUTANTS[LIVELOCK]
    recorded = decode(encode(counterexample(mutant, hunted(LIVELOCK))))
    assert recorded.repeats == Repeats.LINKS_QUIET.value
    assert recorded.verdict is not None
    with mutant.applied():
        assert strict(mutant.world(), recorded).verdict == recorded.verdict


@pytest.mark.parametrize("repeats", Repeats)
def test_runs_that_never_settle_are_reported(repeats: Repeats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSpace, "settled", lambda space, state: False)
    world = relation(Scope())
    with pytest.raises(Broken, match="never ends"):
        Fairness(world, repeats, 100_000).check([world.turns.start()])


@pytest.mark.parametrize("repeats", Repeats)
@pytest.mark.parametrize("scope", [Scope(drop=1), Scope(pulls=True, lose=1, sync=1)], ids=["push", "pull"])
def test_every_fair_run_resolves(scope: Scope, repeats: Repeats) -> None:
    world = relation(scope)
    fairness = Fairness(world, repeats, 100_000)
    Search(world, fairness=(fairness,)).run(1 << 62, None, lively=True)
    assert not fairness.given_up
    assert len(fairness.closed) > 50


def test_too_many_states_prove_nothing() -> None:
    world = relation(Scope(drop=1))
    fairness = Fairness(world, Repeats.AT_REST, 10)
    fairness.check([world.turns.start()])
    assert fairness.given_up

"""L9: a request that only repairable faults have met is served, and what fails or delays it without need is noticed."""

from __future__ import annotations

import attrs
import pytest

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.version import compiled
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.replay import strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import counterexample, hunt
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.fields import described
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import FaultKind, Scope
from pdflow_sim.check.search.needless import NEEDLESS, REPAIRABLE, NeedlessFailures, judged_in, repairable, supports
from pdflow_sim.check.search.workers import SearchLimits, search
from tests.check.answers import hunted, no_clock

needs_patches = pytest.mark.skipif(compiled(), reason="a compiled machine cannot be patched")
PLANTED = [name for name, mutant in MUTANTS.items() if mutant.needless]
QUIET = {"abort": 0, "deadline": 0, "stall": 0}


def judged(scope: Scope, limit: int = 10_000) -> NeedlessFailures:
    needless = NeedlessFailures(relation(scope), limit)
    found = needless.search()
    assert found is None, found.broken
    return needless


def test_there_are_planted_faults() -> None:
    assert len(PLANTED) >= 3


@needs_patches
@pytest.mark.parametrize("name", PLANTED)
def test_a_needless_failure_is_noticed_by_nothing_else(name: str) -> None:
    assert hunted(name).invariant == "L9"
    assert hunt(attrs.evolve(MUTANTS[name], needless=False), no_clock).invariant == ""


@needs_patches
@pytest.mark.parametrize("name", PLANTED)
def test_its_counterexample_replays(name: str) -> None:
    mutant = MUTANTS[name]
    recorded = decode(encode(counterexample(mutant, hunted(name))))
    assert recorded.repeats == NEEDLESS
    assert recorded.verdict is not None
    with mutant.applied():
        assert strict(mutant.world(), recorded).verdict == recorded.verdict


@pytest.mark.parametrize(
    "scope",
    [
        Scope(drop=1, dup=1),
        Scope(lose=1, sync=1),
        Scope(pulls=True, drop=1, lose=1),
        Scope(d_tp=2, drop=1, concurrent=False),
        Scope(attempts=2, drop=1, concurrent=False),
        Scope(method="cpu-staged", drop=1),
    ],
    ids=described,
)
def test_strict_serves_every_request(scope: Scope) -> None:
    needless = judged(scope)
    assert needless.states > 10
    assert not needless.given_up


def test_faults_that_are_not_repairable_do_not_happen() -> None:
    """A request that fails after one of them is no violation, in a scope that has both kinds."""
    assert judged(Scope(drop=1, err=1, unreachable=1, p_restart=1)).states == judged(Scope(drop=1, **QUIET)).states


def test_a_second_attempt_at_a_prompt_is_not_judged_once_the_first_has_it() -> None:
    assert judged(Scope(requests=2, same_product=True, concurrent=False)).states > 10


def test_too_many_states_prove_nothing() -> None:
    needless = judged(Scope(drop=1), limit=10)
    assert needless.given_up
    assert needless.states == 0


@pytest.mark.parametrize(
    "scope",
    [
        Scope(dialect=VLLM_COMPAT),
        Scope(clocks=False),
        Scope(horizon=3),
        Scope(method="p2p-nccl-get", pulls=True, p_pool=1),
    ],
    ids=["vllm-compat", "no timers", "clocks", "eviction"],
)
def test_where_it_is_not_judged(scope: Scope) -> None:
    assert not supports(scope)


def test_scopes_with_one_repairable_part_are_judged_once() -> None:
    scopes = [Named(name, scope, frozenset()) for name, scope in PAIR.items()]
    assert judged_in(scopes) == {"loss": "loss", "loss and error": "loss", "two losses": "two losses"}
    assert repairable(PAIR["loss"]) == repairable(PAIR["loss and error"])


PAIR = {
    "loss": Scope(drop=1),
    "loss and error": Scope(drop=1, err=1, p_restart=1, orphan=True),
    "two losses": Scope(drop=2),
    "by clocks": Scope(drop=1, horizon=3),
}


def test_the_search_of_a_scope_says_in_how_many_states_it_was_judged() -> None:
    named = Named("loss", Scope(drop=1, **QUIET), frozenset())
    here = search(named, SearchLimits(), lambda *_: None, "loss")
    assert here.holds
    assert here.needless_in == "loss"
    assert here.needless_states is not None
    assert here.needless_states > 50
    elsewhere = search(named, SearchLimits(), lambda *_: None, "another")
    assert (elsewhere.needless_in, elsewhere.needless_states) == ("another", None)


def test_every_scope_of_strict_without_clocks_is_judged_somewhere() -> None:
    where = judged_in(SCOPES)
    assert {where[named.name] for named in SCOPES if supports(named.scope)} <= where.keys()
    assert len(set(where.values())) > 150
    assert all(fault.name.lower() in attrs.fields_dict(Scope) for fault in REPAIRABLE | set(FaultKind))

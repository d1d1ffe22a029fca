"""Walks in wide clusters: what they draw in one era, and faults that no plain cluster can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, Dialect
from pdflow.protocol.effects import NOTHING
from pdflow.protocol.events import PrefillEnded
from pdflow.protocol.messages import Code
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import OPEN
from pdflow.protocol.producer.writes import prefill_ended
from pdflow.workload.rng import Rng
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile
from pdflow_sim.check.counterexamples.replay import record, strict
from pdflow_sim.check.counterexamples.shrink import shrink
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.ordered import RelationCache
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.scope import ENDLESS, FaultKind, Scope
from pdflow_sim.check.search.campaign import Failure, WalkTask, batch
from pdflow_sim.check.search.swarm import BLOCK, ERA, budget_of, cluster_of, is_wide, manner_of
from pdflow_sim.check.search.walk import LONGEST, walk
from pdflow_sim.check.search.wide import CLUSTERS, SETTINGS, goes_together, methods_of, settings_of, wide_cluster

APART = {
    frozenset(pair)
    for pair in (
        ("clocks", "method"),
        ("clocks", "orphan"),
        ("router", "method"),
        ("router", "orphan"),
        ("router", "down"),
        ("method", "orphan"),
        ("method", "down"),
        ("method", "groups"),
        ("orphan", "down"),
    )
}
"""Pairs of settings that no scope has, or no walk (wide.EXCLUDED)."""
STRICT_ONLY = ("groups", "unequal blocks")


def wide_clusters(dialect: Dialect, era: int = 0) -> list[Scope]:
    """Return the wide clusters of an era, as its seeds have them."""
    blocks = range(era * ERA + BLOCK, era * ERA + BLOCK + 2 * CLUSTERS * BLOCK, 2 * BLOCK)
    return [cluster_of(seed, dialect) for seed in blocks]


@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("era", [0, 1, 7])
def test_an_era_draws_every_pair_of_settings_that_goes_together(dialect: Dialect, era: int) -> None:
    clusters = wide_clusters(dialect, era)
    seen = {frozenset(pair) for cluster in clusters for pair in combinations(settings_of(cluster), 2)}
    names = [name for name in SETTINGS if dialect is STRICT or name not in STRICT_ONLY]
    assert seen == {frozenset(pair) for pair in combinations(names, 2)} - APART
    assert {cluster.method for cluster in clusters} == {"", *(method.name for method in methods_of(dialect))}
    assert {cluster.pulls for cluster in clusters} == {True, False}
    assert {cluster.clocks for cluster in clusters} == {True, False}


def test_an_era_draws_every_value_of_the_fields() -> None:
    clusters = wide_clusters(STRICT)
    drawn = {
        "attempts": {0, 1, 2},
        "streams": {True, False},
        "horizon": {0, 3, 8, ENDLESS},
        "skew": {1, 2},
        "drift": {-1, 0, 1},
        "idle": {True, False},
        "pool_blocks": {8, ENDLESS},
        "d_block": {8, 16, 32},
        "progressive": {True, False},
        "p_pool": {0, 1},
        "pool": {0, 1},
        "requests": {1, 2, 3},
        "same_product": {True, False},
        "same_base": {True, False},
        "lagging": {True, False},
        "chunks": {1, 2},
        "done_is_remote": {True, False},
        "concurrent": {True, False},
    }
    assert {field: {getattr(cluster, field) for cluster in clusters} for field in drawn} == drawn


@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda dialect: dialect.name)
def test_every_cluster_has_what_leads_it_and_goes_together(dialect: Dialect) -> None:
    for number in range(2 * CLUSTERS):
        cluster = wide_cluster(number, dialect)
        assert goes_together(cluster)
        assert not any(cluster.budget)
        assert not cluster.progressive or dialect.control_frames


def test_every_second_block_is_wide() -> None:
    assert [is_wide(seed) for seed in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    found = batch(RelationCache(), WalkTask(dialect=STRICT), range(50, 250))
    assert (found.runs, found.wide_runs) == (200, 100)
    assert 0 < found.wide_cpu_s < found.cpu_s


def test_evictions_are_drawn_where_a_memory_evicts() -> None:
    clusters = [cluster for era in range(3) for cluster in wide_clusters(STRICT, era)]
    evicting = {
        c.method for c in clusters if any(budget_of(Rng(i).stream("b"), c)[FaultKind.WITHDRAW] for i in range(9))
    }
    assert evicting == {"kv-store", "p2p-nccl-get"}


def test_runs_end_although_clocks_do_not() -> None:
    clusters = [cluster for cluster in wide_clusters(STRICT) if cluster.horizon == ENDLESS]
    assert clusters
    for number, cluster in enumerate(clusters):
        steps = manner_of(Rng(number).stream("manner"), cluster, 4, 4).steps
        assert steps is not None
        assert steps < LONGEST


# Planted bugs that no plain cluster can show.


@contextmanager
def a_cancelled_prefill_is_not_reported() -> Iterator[None]:
    """P sends no FAIL for a registration whose prefill leg has been cancelled, as it did until walks had `late`."""

    def silent(cell, event, now, ctx):  # type: ignore[no-untyped-def]
        after, effects = prefill_ended(cell, event, now, ctx)
        return after, NOTHING if event.code is Code.CANCELLED else effects

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(producer_rules.RULES, (OPEN, PrefillEnded), silent)
        yield


PLANTED = [
    (
        a_cancelled_prefill_is_not_reported,
        "L1",
        lambda cluster: cluster.late and cluster.lagging and not cluster.clocks,
    ),
    (MUTANTS["posted-without-a-lane"].applied, "S9", lambda cluster: cluster.method == "p2p-nccl-put"),
    (MUTANTS["stop-cuts-posted-pieces"].applied, "S1", lambda cluster: cluster.method == "p2p-nccl-put"),
]
"""Each with the invariant that it breaks, and in which wide clusters."""


def first_failure(invariant: str, where: Callable[[Scope], bool], seeds: range) -> Failure | None:
    """Return the first run that breaks an invariant, in these clusters."""
    cache, task = RelationCache(), WalkTask(dialect=STRICT)
    for seed in seeds[::BLOCK]:
        if where(cluster_of(seed, STRICT)):
            found = batch(cache, task, range(seed, seed + BLOCK)).failures
            if invariant in found:
                return found[invariant]
    return None


@pytest.mark.parametrize(("plant", "broken", "where"), PLANTED, ids=["cancelled prefill", "lanes", "stop"])
def test_bugs_are_found_that_no_plain_cluster_shows(plant, broken, where) -> None:  # type: ignore[no-untyped-def]
    with plant():
        assert first_failure(broken, lambda cluster: not settings_of(cluster), range(4 * BLOCK)) is None
        failure = first_failure(broken, where, range(2 * ERA))
        assert failure is not None
        short = shrink(failure.scope, failure.names, broken, small=0)
        assert len(short.names) <= len(failure.names)
        counterexample: CounterexampleFile = record(relation(short.scope), short.names)
        assert counterexample.verdict is not None
        assert counterexample.verdict.invariant == broken
        again = strict(relation(short.scope), counterexample)
    assert again.mismatch is None
    assert again.verdict == counterexample.verdict


def test_a_run_in_a_wide_cluster_does_not_depend_on_the_runs_before() -> None:
    seeds = range(BLOCK, 60 * BLOCK, 2 * BLOCK)
    warm = RelationCache()
    for seed in seeds:
        for before in range(seed + 1, seed + 4):
            walk(warm, before, STRICT)
        cold = walk(RelationCache(), seed, STRICT)
        again = walk(warm, seed, STRICT)
        assert again.names(warm.of(again.cluster)) == cold.names(RelationCache().of(cold.cluster))


def test_a_rank_that_outlives_its_engine_finds_a_closed_connection() -> None:
    """It has sent a frame whose bytes were corrupted, and its links are gone by the time it learns of that."""
    assert walk(RelationCache(), 55_120, STRICT).broken is None


def test_an_error_of_the_checker_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdflow_sim.check.search.walk.run", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as raised:
        walk(RelationCache(), 4_711, STRICT)
    assert "seed 4711" in raised.value.__notes__[0]

"""Random walks: functions of their seed, fair in what they try, and sharp enough for the planted bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdflow.protocol.consumer.cell import QUARANTINED, WAITING, CancelDue, RequestFailed
from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.consumer.rules import cancel_due, freed
from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, Dialect
from pdflow.protocol.effects import NOTHING, Outcome, Resolve
from pdflow.protocol.events import PairMissing, PairReported, WriteEnded
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import IN_FLIGHT, CancelReceived, LeaseEnded
from pdflow.protocol.producer.lease import expired_unclaimed
from pdflow.protocol.producer.writes import cancelled, sent
from pdflow_sim.check.counterexamples.names import name
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.ordered import RelationCache, ordered
from pdflow_sim.check.scopes.scope import FaultKind, Scope
from pdflow_sim.check.search.campaign import WalkTask, by_cluster, walks
from pdflow_sim.check.search.swarm import BLOCK, CLUSTERS, ERA, RANKS, SCHEDULERS, UNDRAWN, cluster_of, is_wide
from pdflow_sim.check.search.walk import digest_of, walk
from pdflow_sim.check.search.wide import CLUSTERS as WIDE_CLUSTERS
from tests.check.answers import reached_by_walks

ROOT = Path(__file__).resolve().parents[2]
GOALS = {
    "delivered",
    "expired",
    "released after use",
    "cancelled before the WRITE",
    "cancelled in flight",
    "late REG refused",
    "resolved DEADLINE",
    "resolved STALLED",
    "resolved IO",
    "resolved UNREACHABLE",
    "resolved PEER_RESTARTED",
    "resolved by a refusal",
    "resolved STALE",
}


def digests(seeds: range, dialect: Dialect = STRICT) -> list[str]:
    cache = RelationCache()
    found = []
    for seed in seeds:
        record = walk(cache, seed, dialect)
        found.append(digest_of(cache.of(record.cluster), record))
    return found


def test_a_run_does_not_depend_on_the_runs_before() -> None:
    warm = digests(range(30))
    assert [*digests(range(29, 30)), *digests(range(11, 12))] == [warm[29], warm[11]]
    assert len(set(warm)) > 25


def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    program = "from tests.check.test_walk import digests\nprint(*digests(range(0, 40000, 1900)))"
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    task = WalkTask(dialect=STRICT)
    alone, together = walks(task, range(1500)), walks(task, range(1500), jobs=2)
    assert attrs.evolve(alone, cpu_s=0.0, wide_cpu_s=0.0) == attrs.evolve(together, cpu_s=0.0, wide_cpu_s=0.0)
    assert alone.wide_runs == 700


def test_seeds_are_grouped_by_cluster_and_none_is_lost() -> None:
    seeds = range(150, ERA + 50)
    groups = by_cluster(seeds, STRICT)
    assert sorted(seed for group in groups for seed in group) == list(seeds)
    first = [cluster_of(group[0], STRICT) for group in groups]
    assert len(set(first)) == len(first) < 2 * CLUSTERS + 200
    for group, cluster in zip(groups[::20], first[::20], strict=True):
        assert {cluster_of(seed, STRICT) for seed in group[::BLOCK]} == {cluster}


@pytest.mark.parametrize("first", [0, BLOCK])
def test_a_run_is_the_same_after_others_in_its_cluster(first: int) -> None:
    again = first + 2 * (WIDE_CLUSTERS if is_wide(first) else CLUSTERS) * BLOCK
    assert cluster_of(first, STRICT) == cluster_of(again, STRICT)
    cache = RelationCache()
    for seed in range(first, first + BLOCK // 2):
        walk(cache, seed, STRICT)
    for seed in range(again, again + 10):
        alone = RelationCache()
        one, other = walk(cache, seed, STRICT), walk(alone, seed, STRICT)
        assert digest_of(cache.of(one.cluster), one) == digest_of(alone.of(other.cluster), other)


@pytest.mark.parametrize("seed", range(0, 40 * BLOCK, BLOCK))
def test_moves_are_those_of_the_relation(seed: int) -> None:
    """Which remembers them as a whole, and finds them with the budgets of the state."""
    cache = RelationCache()
    record = walk(cache, seed, (STRICT, VLLM_COMPAT)[seed // BLOCK // 2 % 2])
    plain = relation(record.scope)
    state = plain.turns.start()
    world = cache.of(record.cluster)
    for left, (before, move) in enumerate(record.steps(world), 1 - len(record.moves)):
        named = sorted(name(world, before, possible) for possible in world.moves(before))
        assert named == sorted(name(plain, state, possible) for possible in plain.moves(state))
        expected = name(world, before, move)
        found = next(possible for possible in plain.moves(state) if name(plain, state, possible) == expected)
        if left:
            state = plain.apply(state, found)


def test_blocks_share_a_cluster_and_runs_have_their_own_budgets() -> None:
    cache = RelationCache()
    first = 10 * BLOCK  # With clocks: without them some faults never happen.
    records = [walk(cache, seed, STRICT) for seed in range(first, first + BLOCK)]
    assert {record.cluster for record in records} == {cluster_of(first, STRICT)}
    assert {record.manner.scheduler for record in records} == set(SCHEDULERS)
    for fault in set(FaultKind) - set(UNDRAWN):
        assert len({record.budget[fault] > 0 for record in records}) == 2


@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda d: d.name)
def test_clusters_come_in_turn_so_that_few_runs_see_them_all(dialect: Dialect) -> None:
    seen = clusters(0, dialect)
    assert {(c.pulls, c.clocks) for c in seen} == {(p, c) for p in (True, False) for c in (True, False)}
    assert {(c.p_tp, c.d_tp) for c in seen} == set(RANKS)
    assert any(c.pulls and c.lagging and not c.clocks for era in range(4) for c in clusters(era, dialect))
    assert all(dialect is STRICT or not c.same_base or not c.clocks for c in seen)
    again = [cluster_of(2 * CLUSTERS * BLOCK + seed, dialect) for seed in range(0, 2 * CLUSTERS * BLOCK, 2 * BLOCK)]
    assert again == seen


def clusters(era: int, dialect: Dialect) -> list[Scope]:
    """Return the plain clusters of an era, which are those of every second block."""
    return [cluster_of(era * ERA + seed, dialect) for seed in range(0, 2 * CLUSTERS * BLOCK, 2 * BLOCK)]


def test_relations_are_evicted_when_they_remember_too_much() -> None:
    cache = RelationCache(most=2_000)
    for seed in range(0, 30 * BLOCK, BLOCK // 2):
        walk(cache, seed, STRICT)
        assert len(cache.known) == 1 or sum(world.remembered() for world in cache.known.values()) < 10_000


def test_a_tick_stops_the_walks_and_the_result_is_incomplete() -> None:
    found = walks(WalkTask(dialect=STRICT), range(3000), tick=lambda walked: True)
    assert not found.complete
    assert found.runs == 500


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda dialect: dialect.name)
def test_everything_worth_reaching_is_reached(dialect: Dialect) -> None:
    expected = GOALS if dialect is STRICT else {"delivered", "expired", "released after use", "resolved DEADLINE"}
    assert expected <= reached_by_walks(dialect)


@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda dialect: dialect.name)
def test_runs_deliver_and_some_leave_their_digest(dialect: Dialect) -> None:
    found = walks(WalkTask(dialect=dialect), range(1_500))
    assert found.delivering > found.runs // 10
    assert sorted(found.digests) == [0, 500, 1_000]


@pytest.mark.nightly
@pytest.mark.parametrize("dialect", [STRICT, VLLM_COMPAT], ids=lambda dialect: dialect.name)
def test_nothing_is_broken_in_many_walks(dialect: Dialect) -> None:
    """Six times what `pdflow check all` walks by day, behind that."""
    found = walks(WalkTask(dialect=dialect), range(6_500, 46_500), jobs=len(os.sched_getaffinity(0)))
    assert found.complete
    assert not found.failures


# Planted bugs.


@contextmanager
def lease_frees_under_a_write() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(producer_rules.RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)
        yield


@contextmanager
def deadline_frees_at_once() -> Iterator[None]:
    def request_failed(cell, event, now, ctx):  # type: ignore[no-untyped-def]
        after, effects = freed(cell, ctx)
        return after, (Resolve(cell.request_id, Outcome.FAILED, event.code), *effects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSUMER_RULES, (WAITING, RequestFailed), request_failed)
        yield


@contextmanager
def cancel_in_flight_is_answered_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(producer_rules.RULES, (IN_FLIGHT, CancelReceived), cancelled)
        yield


@contextmanager
def failed_write_counts_as_sent() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rule = lambda cell, event, now, ctx: sent(cell, ctx)  # noqa: E731
        patch.setitem(producer_rules.RULES, (IN_FLIGHT, WriteEnded), rule)
        yield


@contextmanager
def cancel_is_not_repeated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for event in (CancelDue, PairMissing, PairReported):
            patch.setitem(CONSUMER_RULES, (QUARANTINED, event), lambda cell, event, now, ctx: (cell, NOTHING))
        patch.setitem(CONSUMER_RULES, (QUARANTINED, CancelDue), cancel_later)
        yield


def cancel_later(cell: Any, event: Any, now: Any, ctx: Any) -> Any:
    """Schedule the next CANCEL, and send none now."""
    return cancel_due(cell, event, now, ctx)[0], NOTHING


@contextmanager
def the_core_raises() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSUMER_RULES, (WAITING, RequestFailed), lambda cell, event, now, ctx: 1 // 0)
        yield


PLANTED = [
    (lease_frees_under_a_write, "S2"),
    (deadline_frees_at_once, "S1"),
    (cancel_in_flight_is_answered_at_once, "S2"),
    (failed_write_counts_as_sent, "S2"),
    (cancel_is_not_repeated, "L"),
    (the_core_raises, "crash"),
]


@pytest.mark.parametrize(("plant", "broken"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bugs_are_found(plant, broken) -> None:  # type: ignore[no-untyped-def]
    found = walks(WalkTask(dialect=STRICT, prepare=plant), range(2_000), tick=lambda walked: broken in walked.broken)
    assert found.broken.get(broken, 0) > 0
    failure = found.failures[broken]
    with plant():
        again = walk(RelationCache(), failure.seed, STRICT)
        names = again.names(ordered(again.scope))
    assert again.broken is not None
    assert (again.broken.name, again.broken.what) == (broken, failure.what)
    assert tuple(names) == failure.names

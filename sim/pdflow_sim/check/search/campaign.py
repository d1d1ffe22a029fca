"""Many random walks: a range of seeds in batches, in as many processes as wanted, with one answer.

The result of a range does not depend on the number of processes: batches are begun in order and those begun are ended,
so that the walked seeds are always the first of the range, unless they are grouped by cluster. Time decides only how
many they are.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs

from pdflow.protocol.dialect import Dialect
from pdflow_sim.check.moves.ordered import RelationCache
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.swarm import BLOCK, cluster_of, is_wide
from pdflow_sim.check.search.walk import Walk, digest_of, walk
from pdflow_sim.check.state.shadow_state import RequestStage
from pdflow_sim.uncollected import uncollected

BATCH = 500
"""Seeds in a batch; a multiple of swarm.BLOCK, so that no cluster is explored twice for nothing."""
DIGEST_EVERY = 500
"""Seeds between two runs whose digests are kept, in plain and in wide clusters."""


@attrs.frozen(kw_only=True)
class Failure:
    """The first run in which an invariant broke, and what is needed to record it as a counterexample."""

    seed: int
    invariant: str
    what: str
    scope: Scope
    scheduler: str
    names: tuple[str, ...]


@attrs.define(kw_only=True)
class Walked:
    """The result of random walks over the first seeds of a range."""

    runs: int = 0
    moves: int = 0
    settling_moves: int = 0
    """Number of moves that settling took."""
    delivering: int = 0
    """Number of runs in which some request got its prompt's KV before faults were over."""
    cpu_s: float = 0.0
    wide_runs: int = 0
    """Number of runs in wide clusters (wide.py), and below the CPU seconds that they took. Neither is known for runs in
    one scope."""
    wide_cpu_s: float = 0.0
    goals: frozenset[str] = frozenset()
    """Goals reached at least once."""
    broken: dict[str, int] = attrs.field(factory=dict)
    """How many runs broke each invariant."""
    failures: dict[str, Failure] = attrs.field(factory=dict)
    """By invariant, the run of the lowest seed that broke it."""
    digests: dict[int, str] = attrs.field(factory=dict)
    """By every DIGEST_EVERYth seed, the digest of everything that its run passed."""
    complete: bool = False
    """Every seed was run, or the first failure that was asked for was found."""

    @property
    def plain_per_cpu_s(self) -> float:
        """Runs per CPU second in plain clusters."""
        return (self.runs - self.wide_runs) / max(self.cpu_s - self.wide_cpu_s, 1e-9)

    @property
    def wide_per_cpu_s(self) -> float:
        """Runs per CPU second in wide clusters."""
        return self.wide_runs / max(self.wide_cpu_s, 1e-9)

    def add(self, other: Walked) -> None:
        """Add the result of seeds that follow these."""
        self.runs += other.runs
        self.moves += other.moves
        self.settling_moves += other.settling_moves
        self.delivering += other.delivering
        self.cpu_s += other.cpu_s
        self.wide_runs += other.wide_runs
        self.wide_cpu_s += other.wide_cpu_s
        self.goals |= other.goals
        self.digests |= other.digests
        for invariant, failure in other.failures.items():
            known = self.failures.get(invariant)
            if known is None or failure.seed < known.seed:
                self.failures[invariant] = failure
        for invariant, count in other.broken.items():
            self.broken[invariant] = self.broken.get(invariant, 0) + count


@attrs.frozen(kw_only=True)
class WalkTask:
    """The settings that every batch of walks shares."""

    dialect: Dialect
    scope: Scope | None = None
    """The cluster and budgets of every run; None: each run's are drawn."""
    prepare: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered in every process before it walks, such as a mutant's patch."""
    first: bool = False
    """Stop at the first violation."""


def walks(
    task: WalkTask,
    seeds: range,
    *,
    jobs: int = 1,
    until_s: float = float("inf"),
    tick: Callable[[Walked], bool] | None = None,
    grouped: bool = False,
) -> Walked:
    """Walk these seeds, and return their joint result.

    Args:
        grouped: walk all seeds of a cluster together, out of order. Their runs share what its world remembers, so that
            200,000 seeds (swarm.ERA) take two thirds of the time.
        until_s: on the clock of time.monotonic; no batch is begun after it.
        tick: called after every batch with the result so far; True stops.
    """
    found = Walked()
    batches: list[Sequence[int]]
    if grouped:
        batches = by_cluster(seeds, task.dialect)
    else:
        batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    with uncollected(), _hands(task, jobs) as submit:
        for ended in _in_order(submit, batches, jobs, until_s):
            found.add(ended)
            if task.first and found.failures:
                found.complete = True
                return found
            if tick is not None and tick(found):
                return found
    found.complete = found.runs == len(seeds)
    return found


def by_cluster(seeds: range, dialect: Dialect) -> list[Sequence[int]]:
    """Return the seeds of each cluster."""
    found: dict[Scope, list[int]] = {}
    for block in range(seeds.start // BLOCK, -(-seeds.stop // BLOCK)):
        first = block * BLOCK
        of_cluster = found.setdefault(cluster_of(first, dialect), [])
        of_cluster += range(max(first, seeds.start), min(first + BLOCK, seeds.stop))
    return list(found.values())


def batch(cache: RelationCache, task: WalkTask, seeds: Sequence[int]) -> Walked:
    """Walk these seeds in this process."""
    found = Walked()
    began = time.process_time()
    known = set()
    wide_since: float | None = None
    for seed in seeds:
        if wide_since is not None and not is_wide(seed):
            found.wide_cpu_s += time.process_time() - wide_since
            wide_since = None
        elif wide_since is None and task.scope is None and is_wide(seed):
            wide_since = time.process_time()
        record = walk(cache, seed, task.dialect, task.scope)
        world = cache.of(record.cluster)
        known.add(world)
        found.runs += 1
        found.wide_runs += wide_since is not None
        found.moves += len(record.moves)
        found.settling_moves += record.settling_moves
        found.delivering += RequestStage.COMMITTED in world.space.shadow_of(record.end).stages
        if seed % DIGEST_EVERY == 0:
            found.digests[seed] = digest_of(world, record)
        if record.broken is not None:
            invariant = record.broken.name
            found.broken[invariant] = found.broken.get(invariant, 0) + 1
            if invariant not in found.failures:
                found.failures[invariant] = _failure(record, record.names(world))
            if task.first:
                break
    if wide_since is not None:
        found.wide_cpu_s += time.process_time() - wide_since
    found.goals = frozenset(goal for world in known for goal in world.space.checker.seen)
    found.cpu_s = time.process_time() - began
    return found


def _failure(record: Walk, names: list[str]) -> Failure:
    assert record.broken is not None
    return Failure(
        seed=record.seed,
        invariant=record.broken.name,
        what=record.broken.what,
        scope=record.scope,
        scheduler=record.manner.scheduler,
        names=tuple(names),
    )


Submit = Callable[[Sequence[int]], "Future[Walked]"]


@contextmanager
def _hands(task: WalkTask, jobs: int) -> Iterator[Submit]:
    """Yield the function that submits a batch: to this process if `jobs` is 1, else to a pool of `jobs` processes."""
    if jobs == 1:
        with task.prepare():
            cache = RelationCache()
            yield lambda seeds: _done(batch(cache, task, seeds))
        return
    context = multiprocessing.get_context("spawn")
    pool: Executor
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_hired, initargs=(task,)) as pool:
        try:
            yield lambda seeds: pool.submit(_batch, seeds)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(submit: Submit, batches: list[Sequence[int]], jobs: int, until_s: float) -> Iterator[Walked]:
    """Yield the batches' results in the order of seeds, and keep each process busy."""
    under_way: deque[Future[Walked]] = deque()
    for seeds in batches:
        if time.monotonic() > until_s:
            break
        under_way.append(submit(seeds))
        while len(under_way) > (jobs if jobs > 1 else 0):
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _done(walked: Walked) -> Future[Walked]:
    future: Future[Walked] = Future()
    future.set_result(walked)
    return future


_task: WalkTask
_cache: RelationCache


def _hired(task: WalkTask) -> None:
    global _task, _cache
    gc.disable()  # As `uncollected`, for as long as this process walks.
    _task, _cache = task, RelationCache()
    task.prepare().__enter__()


def _batch(seeds: Sequence[int]) -> Walked:
    return batch(_cache, _task, seeds)

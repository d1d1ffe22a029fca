"""Records what links and engines do over time: a network and engines that do the same as the others, and record it.

They take the others' places from the start of a run that was asked for it; nothing else of the world knows.
"""

from __future__ import annotations

from collections import defaultdict

from pdflow.cost.progression import boundary_after, span_of
from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.log import StepLog
from pdflow.engine.noise import StepNoise
from pdflow.engine.sequence import Dropped, Limits, Outcome, Sequence
from pdflow.memory.paged import PagedPool
from pdflow.network.network import ResourceId
from pdflow.network.watched import WatchedNetwork
from pdflow.protocol.values import Allocation, EngineId, Instant
from pdflow.results.recording import LinkCourse, Recording, TimeSeries


class RecordedEngine(HostedEngine):
    """An engine that records how many KV blocks are in use: to the block whenever a sequence comes, leaves or is done.
    What decoding takes in between is recorded every `block_size` steps, in which each sequence takes one block.
    """

    __slots__ = ("_series",)

    def __init__(
        self,
        series: TimeSeries,
        limits: Limits,
        cost: StepCost,
        pool: PagedPool,
        exact: bool,
        log: StepLog | None = None,
        stalls: StepLog | None = None,
        noise: StepNoise | None = None,
    ) -> None:
        super().__init__(limits, cost, pool, exact, log, stalls, noise)
        self._series = series

    def advance(self, now: Instant) -> list[Outcome]:
        """Advance as HostedEngine does, and record the blocks in use."""
        self._record_growth(now)
        outcomes = super().advance(now)
        self._series.record(now, self.kv_blocks_used(now))
        return outcomes

    def release(self, allocation: Allocation, now: Instant) -> None:
        """Release blocks as HostedEngine does, and record the blocks in use."""
        self._record_growth(now)
        super().release(allocation, now)
        self._series.record(now, self.kv_blocks_used(now))

    def drop(self, seq: Sequence, now: Instant) -> Dropped:
        """Drop a sequence as HostedEngine does, and record the blocks in use."""
        self._record_growth(now)
        dropped = super().drop(seq, now)
        self._series.record(now, self.kv_blocks_used(now))
        return dropped

    def _record_growth(self, now: Instant) -> None:
        """Record the growth of the running segment, which nothing has changed since the last record."""
        each, series, first = self.limits.block_size, self._series, self._first_ps
        last = series.instants[-1] if series.instants else 0
        # Steps never get shorter, so that in so short a time there were fewer.
        if self._steps <= each or not first or (now - last) * PS_PER_NS < each * first:
            return
        start, delta, last_ps = self._start_ps, self._delta_ps, last * PS_PER_NS
        begun = boundary_after(start, first, delta, last_ps)[0] if last_ps > start else 0
        used, batch = self.pool.num_blocks - self.pool.free, self._scheduler.batch
        for steps in range(begun + each, self._steps, each):
            at = -(-(start + span_of(first, delta, steps)) // PS_PER_NS)
            if at >= now:
                return
            series.record(at, used + batch.growth_over(steps))


class Recorder:
    """Makes the network that records, and keeps all that is recorded."""

    def __init__(self) -> None:
        self.rates: defaultdict[ResourceId, TimeSeries] = defaultdict(TimeSeries)
        self.kv_blocks: defaultdict[EngineId, TimeSeries] = defaultdict(TimeSeries)

    def network(self) -> WatchedNetwork:
        """Return the network of the run, which records its rates."""
        rates = self.rates

        def on_rate(resource: ResourceId, ns: Instant, rate: int) -> None:
            rates[resource].record(ns, rate)

        return WatchedNetwork(on_rate)

    def died(self, engine: EngineId, now: Instant) -> None:
        """Record that an engine's memory is gone."""
        self.kv_blocks[engine].record(now, 0)

    def recording(self, links: list[tuple[str, ResourceId, int | None]]) -> Recording:
        """Return all that was recorded, by the names and capacities of `links`."""
        limited = [(name, capacity, self.rates[link]) for name, link, capacity in links if capacity is not None]
        return Recording(tuple(LinkCourse(*each) for each in limited), dict(self.kv_blocks))

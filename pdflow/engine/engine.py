"""The timing of one engine's scheduler: segments of steps, and the events that may interrupt them.

Decides when steps start and end. Pure: the driver passes it events and their instants, asks `wake_at()` after every
call, and calls `advance()` at that time; older timers may fire and do nothing. It does not know what a transfer is: D's
blocks are admitted here and filled elsewhere, P's blocks outlive the sequence and come back by `release`. The sequences
of a step are chosen in `scheduler.py`.

Steps are back to back, on a clock of picoseconds; what is reported is nanoseconds, rounded up. Two rules make every
result independent of how many steps are planned at once:

- what happens at T is noticed by the first step that starts strictly after T; an engine that would stand still starts
  at T, with everything that is known by then;
- a step that has started completes.

With asynchronous scheduling, vLLM's default, each step is composed when the one before it starts, so what happens at T
is noticed one step later, and what a step's end makes free is not there for the next one. A step that would be empty is
composed anew when the one before it has ended.

In steady decode a *segment* of many steps is planned at once. Something that may change the batch cuts it to the first
boundary after T; something that cannot (no seat, no blocks, others first in the queue) leaves it alone. Where a cut was
only made to look at the queue, and the admitted sequences have their KV still to be transferred, the segment goes on.

Every request takes about five turns here, so what is done in each of them is written out rather than called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.cost.progression import boundary_after
from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.engine.admission import Chunk
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.log import StepLog
from pdflow.engine.noise import StepNoise
from pdflow.engine.replicated_batch import ReplicatedBatch
from pdflow.engine.scheduler import Scheduler
from pdflow.engine.sequence import ChunkBegun, Dropped, Limits, Outcome, Phase, Sequence
from pdflow.engine.walk import WalkedBatch
from pdflow.engine.windowed import WindowedBatch, WindowedReplicas
from pdflow.memory.caching import CachingPool

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool
    from pdflow.protocol.values import Allocation


class Engine:
    """The scheduler of one engine (see the module).

    `exact` plans one step at a time and walks over every sequence: slow, and the same results. `log` gets every step,
    in order. `stalls` gets one row of one step for each wait for a token that a preemption made longer; give the same
    log twice if only the distribution of inter-token latencies is wanted. `noise`: None if steps last as the cost model
    says.
    """

    __slots__ = (
        "_admission",
        "_ahead",
        "_block_size",
        "_busy_ps",
        "_caches",
        "_delta_ps",
        "_end_ps",
        "_first_ps",
        "_first_unseen",
        "_known_ns",
        "_last_unseen",
        "_log",
        "_noise",
        "_only_room",
        "_planned_end_ps",
        "_planned_steps",
        "_planned_wake_ns",
        "_scheduler",
        "_start_ps",
        "_steps",
        "_waking_ps",
        "limits",
        "pool",
        "reports_chunks",
        "wake_ns",
    )

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        pool: PagedPool,
        exact: bool = False,
        log: StepLog | None = None,
        stalls: StepLog | None = None,
        noise: StepNoise | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.reports_chunks = False
        """Whether each part of a prompt is an outcome as its step begins."""
        self._block_size = limits.block_size
        self._caches = isinstance(pool, CachingPool)
        batch: DecodeBatch | WalkedBatch
        if exact:
            batch = WalkedBatch(cost, limits.block_size, limits.replicas)
        elif limits.replicas > 1:
            kind = WindowedReplicas if cost.window else ReplicatedBatch
            batch = kind(cost, limits.block_size, limits.replicas)
        elif cost.window:
            batch = WindowedBatch(cost, limits.block_size)
        else:
            batch = DecodeBatch(cost, limits.block_size)
        self._scheduler = Scheduler(limits, pool, batch, limits.prompts_first or not cost.chunks, stalls)
        self._admission = self._scheduler.admission
        self._ahead = limits.async_scheduling
        self._waking_ps = cost.hw
        self._noise = noise
        self._log = log
        # What happened strictly before it was known when the last step was composed.
        self._known_ns = 0
        # The earliest and the latest thing that the running segment does not know of yet, and whether all of them
        # only made room, or came to ask for it.
        self._first_unseen: int | None = None
        self._last_unseen = -1
        self._only_room = True
        self.wake_ns: int | None = None
        """The value of `wake_at()`: the segment's end; standing still, when there is something to look at. Read
        only."""
        self._busy_ps = 0
        # The segment, as far as it is to run before the next look; no steps: standing still.
        self._start_ps = 0
        self._first_ps = 0
        self._delta_ps = 0
        self._steps = 0
        self._end_ps = 0
        # The segment as it would run if nobody came.
        self._planned_steps = 0
        self._planned_end_ps = 0
        self._planned_wake_ns = 0

    # What the driver tells.

    def submit(self, seq: Sequence, now: int) -> None:
        """Queue a new sequence. Raises NeverFitsError, changing nothing, if the whole pool is too small for it."""
        self._admission.enqueue(seq, now)
        if self._admission.waiting == 1:
            self._on_admission_event(now)

    def loaded(self, seq: Sequence, now: int) -> None:
        """Record that the KV of an admitted remote sequence has arrived: it decodes from the next step on."""
        self._scheduler.arrived(seq, now)
        self._only_room = False
        self._on_change(now)

    def release(self, allocation: Allocation, now: int) -> None:
        """Give blocks that a transfer held back to the pool."""
        self._count_growth(now)
        self.pool.release(allocation)
        if self._admission.waiting:
            self._on_admission_event(now)

    def drop(self, seq: Sequence, now: int) -> Dropped:
        """Abort a sequence: no outcome of it will be reported any more. Returns what happened to its blocks."""
        self._count_growth(now)
        answer = self._scheduler.drop(seq, now)
        if answer is Dropped.AFTER_STEP:
            self._only_room = False
            self._on_change(now)
        elif answer is Dropped.BLOCKS_ARE_YOURS and self.limits.stands_for_loads:
            self._on_change(now)
        elif answer is not Dropped.NOT_HERE and self._admission.waiting:
            self._on_admission_event(now)
        return answer

    def advance(self, now: int) -> list[Outcome]:
        """Do everything that is due by `now`. To be called at `wake_at()`; at other times it does nothing.

        While the engine stands still, `wake_at()` may be the current instant: a sequence that arrives before
        `advance` is called joins the same first step.
        """
        outcomes: list[Outcome] = []
        scheduler, log = self._scheduler, self._log
        while (wake := self.wake_ns) is not None and wake <= now:
            steps = self._steps
            if not steps:
                self._plan(now * PS_PER_NS, now, now + 1, True, outcomes)
                continue
            if steps < self._planned_steps and self._only_room and self._goes_on(steps, wake, outcomes):
                continue
            start, end = self._start_ps, self._end_ps
            self._busy_ps += end - start
            if log is not None:
                first, delta, weight = self._first_ps, self._delta_ps, scheduler.batch.size
                fresh = len(scheduler.fresh) + len(scheduler.since)
                if scheduler.prompts_only:
                    log.add(start, first, 0, 1, 0)
                elif not fresh:
                    log.add(start, first, delta, steps, weight)
                else:
                    log.add(start, first, delta, 1, weight - fresh)
                    if steps > 1:
                        log.add(start + first, first + delta, delta, steps - 1, weight)
            if scheduler.since and not scheduler.prompts_only:
                scheduler.end_waits(start + self._first_ps)
            changed = scheduler.complete(steps, end, wake, outcomes)
            admission = self._admission
            if self._first_unseen is None and not admission.waiting and admission.seats_taken == admission.loading:
                # Nobody to compute for, nobody to admit: at most transfers under way.
                self._steps = 0
                self.wake_ns = None
            else:
                self._plan(end, wake, self._known_before(wake, steps), changed, outcomes)
        return outcomes

    # What the driver asks.

    def wake_at(self) -> int | None:
        """Return when `advance` has something to do next. May move after any call, in either direction."""
        return self.wake_ns

    def next_boundary(self, now: int) -> int | None:
        """Return the first step boundary strictly after `now`; None if the engine stands still.

        If the result is `now` itself, a boundary is due at this instant and what follows is not planned yet: ask again
        after `advance(now)`. Later calls never move the boundary that was named. Does not disturb the segment.
        """
        if not self._steps:
            return None
        limit = now * PS_PER_NS
        if self._end_ps <= limit:
            return now
        return -(-boundary_after(self._start_ps, self._first_ps, self._delta_ps, limit)[1] // PS_PER_NS)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return self._admission.waiting

    @property
    def loading(self) -> int:
        """Sequences that have a seat and blocks and wait for their KV."""
        return self._admission.loading

    @property
    def running(self) -> int:
        """Sequences that prefill or decode, or are about to."""
        return self._scheduler.running

    @property
    def chunks(self) -> list[Chunk]:
        """The prompts that the running segment's first step computes, each with the number of its tokens. Read only; a
        list of its own for each step that computes prompts."""
        return self._scheduler.chunks

    @property
    def seats_taken(self) -> int:
        """`running` and `loading`, against `max_num_seqs`."""
        return self._admission.seats_taken

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens of the prompts that came in, each counted once, as vLLM does; 0 if the pool remembers no prefixes."""
        return self._admission.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens of `prefix_cache_queries` whose KV the pool had already."""
        return self._admission.prefix_cache_hits

    def kv_blocks_used(self, now: int) -> int:
        """Return the blocks not free, those that decoding took in the steps begun before `now` included. O(block size).

        `pool.free` alone lags behind: decode's blocks are counted in it at the end of each segment.
        """
        return self.pool.num_blocks - self.pool.free + self._growth_begun_before(now)

    def busy_ps(self, now: int) -> int:
        """Return the time spent in steps up to `now`; exact while the engine stands still, else to the nanosecond."""
        if not self._steps:
            return self._busy_ps
        return self._busy_ps + min(now * PS_PER_NS, self._end_ps) - self._start_ps

    def decoded_by(self, seq: Sequence, now: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        """Return in which steps a sequence has got its tokens up to `now`: runs of steps that are logged, as in
        `seq.token_runs`, and the ends of those of the running segment, in ns. Does not disturb the segment."""
        runs, batch, scheduler = list(seq.token_runs), self._scheduler.batch, self._scheduler
        if seq.phase is not Phase.RUNNING or (seq.local and seq.computed < seq.target):
            return runs, ()  # It does not decode.
        if batch.logged > seq.run_start:
            runs.append((seq.run_start, batch.logged - 1))
        if not self._steps or scheduler.prompts_only:
            return runs, ()
        start, first, delta, limit = self._start_ps, self._first_ps, self._delta_ps, now * PS_PER_NS
        ends = [start + done * first + delta * (done * (done - 1) // 2) for done in range(1, self._steps + 1)]
        return runs, tuple([-(-end // PS_PER_NS) for end in ends if end <= limit])

    # The segment.

    def _plan(self, start_ps: int, start_ns: int, before_ns: int, changed: bool, outcomes: list[Outcome]) -> None:
        """Plan a segment from `start_ps` on, with the events strictly before `before_ns` known.

        `changed`: the engine's own doing may have made room, so the queue is worth a look.
        """
        unseen = self._first_unseen
        scheduler = self._scheduler
        look = changed or (unseen is not None and unseen < before_ns)
        some = scheduler.compose(start_ps, start_ns, before_ns, look, outcomes)
        if not some and before_ns < start_ns:
            before_ns = start_ns
            some = scheduler.compose(start_ps, start_ns, before_ns, changed or unseen is not None, outcomes)
        self._known_ns = before_ns
        unseen = self._earliest_unseen(before_ns)
        if not some:
            self._steps = 0
            self.wake_ns, self._first_unseen = unseen, None
            return
        self._first_unseen = unseen
        chunks = scheduler.chunks
        batch = scheduler.batch
        if scheduler.prompts_only:
            first, delta, steps = batch.prompts_ps(chunks), 0, 1
        else:
            first, delta, steps = batch.segment(chunks, self.pool)
        noise = self._noise
        if noise is not None:
            if chunks:
                first = noise.chunk_step_ps(batch.logged, first)
            else:
                first += noise.decode_step_ps(batch.step, batch.size)
                if steps > 1:
                    steps = min(steps, noise.steps_left(batch.step))
        if self._waking_ps and not self._steps:
            first, steps = first + self._waking_ps, 1
        if chunks or scheduler.fresh:
            end_ns = -(-(start_ps + first) // PS_PER_NS)
            for seq in scheduler.fresh:
                seq.start_ns = start_ns
                seq.first_token_ns = end_ns
            for seq, new in chunks:
                if seq.start_ns < 0:
                    seq.start_ns = start_ns
                if seq.first_token_ns < 0 and seq.computed + new == seq.target:
                    seq.first_token_ns = end_ns
                if self.reports_chunks:
                    outcomes.append(ChunkBegun(seq, seq.computed, new, start_ns, end_ns))
        if scheduler.retry:
            steps = 1
        self._start_ps, self._first_ps, self._delta_ps = start_ps, first, delta
        end_ps = start_ps + steps * first + delta * (steps * (steps - 1) // 2)
        self._steps = self._planned_steps = steps
        self._end_ps = self._planned_end_ps = end_ps
        self.wake_ns = self._planned_wake_ns = wake = -(-end_ps // PS_PER_NS)
        self._only_room = unseen is None
        if unseen is not None and steps > 1 and unseen < wake:
            self._end_segment(unseen)
        if scheduler.awaited:
            self._await_layers()

    def _await_layers(self) -> None:
        """Leave the end of the step that begins open: it waits for KV. Only a host can tell when that is there."""
        raise TypeError("a sequence with loads_in_step needs a HostedEngine")

    def _goes_on(self, steps: int, end_ns: int, outcomes: list[Outcome]) -> bool:
        """Look at the queue at a boundary before the segment's planned end. True if the segment goes on unchanged."""
        scheduler = self._scheduler
        if self.limits.prompts_first:
            return False
        most = scheduler.batch.size * (self._planned_steps // self._block_size + 1)
        before_ns = self._known_before(end_ns, steps)
        if not self._admission.admit_within(end_ns, before_ns, most, steps, outcomes):
            return False
        self._known_ns = before_ns
        self._steps = self._planned_steps
        self._end_ps = self._planned_end_ps
        self.wake_ns = wake = self._planned_wake_ns
        unseen = self._earliest_unseen(before_ns)
        self._first_unseen = unseen
        if unseen is not None and unseen < wake:
            self._end_segment(unseen)
        return True

    def _known_before(self, end_ns: int, steps: int) -> int:
        """Return the instant before which events are known to the step composed next, as `steps` of the segment end."""
        if not self._ahead:
            return end_ns
        done = steps - 1
        begun = self._start_ps + done * self._first_ps + self._delta_ps * (done * (done - 1) // 2)
        return max(self._known_ns, -(-begun // PS_PER_NS))

    def _earliest_unseen(self, before_ns: int) -> int | None:
        """Return the earliest instant of an event that may not be known yet."""
        unseen = self._first_unseen
        if unseen is not None and unseen < before_ns:
            unseen = before_ns if self._last_unseen >= before_ns else None
        missed = self._admission.missed
        if missed < 0:
            return unseen
        if missed > self._last_unseen:
            self._last_unseen = missed
        return missed if unseen is None or missed < unseen else unseen

    def _on_change(self, now: int) -> None:
        """End the segment, after an event at `now`, at the first boundary where a step can be composed that knows of
        it."""
        wake = self.wake_ns
        if not self._steps:
            if wake is None:
                self.wake_ns = now
            return
        if self._first_unseen is None:
            self._first_unseen = now
        self._last_unseen = now
        if self._steps > 1 and wake is not None and now < wake:
            self._end_segment(now)

    def _on_admission_event(self, now: int) -> None:
        """Do what `_on_change` does, unless admitting the head of the queue would surely fail."""
        scheduler = self._scheduler
        spare = self._admission.spare_for_head()
        if spare < 0:
            return
        # Near the limit the answer must not depend on how many steps were planned at once.
        most = scheduler.batch.size * (self._steps // self._block_size + 1)
        if spare >= most or spare >= self._growth_begun_before(now):
            self._on_change(now)

    def _end_segment(self, now: int) -> None:
        """End the segment at the first boundary strictly after `now`, an instant before its end.

        With asynchronous scheduling at the one behind that, unless the segment ends before.
        """
        start, first, limit = self._start_ps, self._first_ps, now * PS_PER_NS
        if not self._ahead:
            self._steps, end = boundary_after(start, first, self._delta_ps, limit)
        elif limit < start or now < self._known_ns:
            self._steps, end = 1, start + first
        else:
            steps, end = boundary_after(start, first, self._delta_ps, limit)
            if steps >= self._steps:
                return
            self._steps = steps + 1
            end += first + self._delta_ps * steps
        self._end_ps = end
        self.wake_ns = -(-end // PS_PER_NS)

    def _growth_begun_before(self, now: int) -> int:
        """Return the blocks taken by the segment's steps begun before `now` that the pool has not counted yet."""
        return self._scheduler.batch.growth_over(self._begun_before(now))

    def _count_growth(self, now: int) -> None:
        """Count decode's blocks in the pool before others come back: what a caching pool forgets must not depend on how
        many steps were planned at once."""
        if self._caches and self._steps:
            self._scheduler.batch.count_growth(self._begun_before(now), self.pool)

    def _begun_before(self, now: int) -> int:
        """Return how many of the segment's steps of the batch have begun before `now`."""
        limit = (now - 1) * PS_PER_NS
        if not self._steps or self._scheduler.prompts_only or self._start_ps > limit:
            return 0
        if self._end_ps <= limit:
            return self._steps
        return boundary_after(self._start_ps, self._first_ps, self._delta_ps, limit)[0]

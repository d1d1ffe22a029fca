"""One engine's scheduler: continuous batching with chunked prefill, paged admission and preemption by recompute.

Decides which sequences are in which step and how long it lasts. Pure: the driver tells it what happened and when, asks
`wake_at()` after every call, and calls `advance()` at that time; older timers may fire and do nothing. It does not know
what a transfer is: D's blocks are admitted here and filled elsewhere, P's blocks outlive the sequence and come back by
`pool.release` and `blocks_freed`.

Steps are back to back, on a clock of picoseconds; what is reported is nanoseconds, rounded up. Two rules make every
result independent of how many steps are planned at once (CORE_SHAPE.md pitfall 1):

- what happens at T is noticed by the first step that starts strictly after T; an engine that would stand still starts
  at T, with everything that is known by then;
- a step that has started completes.

In steady decode a *segment* of many steps is planned at once. Something that may change the batch cuts it to the first
boundary after T; something that cannot (no seat, no blocks, others first in the queue) leaves it alone.

Scheduling order, as in vLLM's v1 scheduler: decodes first, then prompts being prefilled, then the queue, first come
first served and never overtaking, under `max_num_seqs` (sequences whose KV is being loaded count) and
`max_num_batched_tokens`. A prompt needs all its blocks to be admitted. Decoding takes a block when the context crosses
into one; if none is free, the sequence that became running last is preempted: its blocks are freed, it goes to the
head of the queue, nothing is admitted in that step, and later it computes its prompt and its tokens again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from pdflow.cost.progression import span_of, steps_to_reach
from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.sequence import (
    Admitted,
    Dropped,
    Finished,
    Limits,
    NeverFitsError,
    Outcome,
    Phase,
    Prefilled,
    Sequence,
)
from pdflow.engine.walk import WalkedBatch

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


class StepLog(Protocol):
    """Where steps are logged, in order; `pdflow.results.steps.Steps` is one."""

    def add(self, start_ps: int, first_step_ps: int, delta_ps: int, steps: int, itl_weight: int, /) -> None: ...


class Engine:
    """See the module. `exact` plans one step at a time and walks over every sequence: slow, and the same results.

    `log` gets every step, in order, as rows (start, first step's time, growth per step, steps, sequences that waited
    this long for a token after their first). `stalls` gets one such row of one step for each wait that a preemption
    made longer; give the same log twice if only the distribution of inter-token latencies is wanted.
    """

    __slots__ = (
        "_batch",
        "_block_size",
        "_budget",
        "_busy_ps",
        "_chunks",
        "_delta_ps",
        "_end_ps",
        "_first_ps",
        "_fresh",
        "_heard_first",
        "_heard_last",
        "_kick",
        "_leaving",
        "_loading",
        "_log",
        "_prefilling",
        "_queue",
        "_ready",
        "_retry",
        "_running",
        "_seats",
        "_seats_taken",
        "_stalls",
        "_start_ps",
        "_steps",
        "_waiting",
        "_whole_prompts",
        "limits",
        "pool",
        "preemptions",
    )

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        pool: PagedPool,
        exact: bool = False,
        log: StepLog | None = None,
        stalls: StepLog | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.preemptions = 0
        self._block_size = limits.block_size
        self._budget = limits.max_num_batched_tokens
        self._seats = limits.max_num_seqs
        self._whole_prompts = not cost.chunks
        self._log = log
        self._stalls = stalls
        self._batch: DecodeBatch | WalkedBatch = (WalkedBatch if exact else DecodeBatch)(cost, limits.block_size)
        self._queue: deque[Sequence] = deque()
        self._waiting = 0
        self._loading = 0
        self._seats_taken = 0
        self._ready: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []
        self._retry = False
        # Earliest and latest instant of what the next plan must take notice of, while a segment runs.
        self._heard_first: int | None = None
        self._heard_last = -1
        # Standing still, but with something to look at from this instant on.
        self._kick: int | None = None
        self._busy_ps = 0
        self._start_ps = 0
        self._first_ps = 0
        self._delta_ps = 0
        self._steps = 0
        self._end_ps = 0
        self._chunks: list[tuple[Sequence, int]] = []
        self._fresh: list[Sequence] = []

    # What the driver tells.

    def submit(self, seq: Sequence, now: int) -> None:
        """Queue a new sequence. Raises NeverFitsError, changing nothing, if the whole pool is too small for it."""
        tokens = seq.prompt_tokens if seq.prefill_only else seq.prompt_tokens + seq.output_tokens - 1
        needed = -(-tokens // self._block_size)
        if needed > self.pool.num_blocks:
            raise NeverFitsError(
                f"sequence {seq.index} needs {needed} KV blocks for {tokens} tokens, the engine has "
                f"{self.pool.num_blocks} of {self._block_size} tokens"
            )
        if seq.phase != Phase.NEW or seq.prompt_tokens < 1 or seq.output_tokens < 1:
            raise ValueError(f"sequence {seq.index} was submitted before, or has no prompt or no output")
        seq.phase = Phase.WAITING
        seq.stamp = now
        seq.local = not seq.remote_kv
        seq.target = seq.prompt_tokens
        first_in_line = self._waiting == 0
        self._queue.append(seq)
        self._waiting += 1
        if first_in_line and self._may_admit(seq, now):
            self._hear(now)

    def loaded(self, seq: Sequence, now: int) -> None:
        """The KV of an admitted remote sequence has arrived: it decodes from the next step on."""
        if seq.phase != Phase.LOADING:
            raise ValueError(f"sequence {seq.index} is {seq.phase.name}, not LOADING")
        seq.phase = Phase.READY
        seq.stamp = now
        self._loading -= 1
        self._ready.append(seq)
        self._hear(now)

    def blocks_freed(self, now: int) -> None:
        """Someone else gave blocks back to the pool."""
        if self._waiting:
            self._hear_of_room(now)

    def drop(self, seq: Sequence, now: int) -> Dropped:
        """Abort: no outcome of this sequence will be reported any more. Says what happened to its blocks."""
        phase = seq.phase
        if phase in (Phase.NEW, Phase.GONE) or seq.dropping:
            return Dropped.NOT_HERE
        if phase == Phase.RUNNING:
            seq.dropping = True
            seq.stamp = now
            self._leaving.append(seq)
            self._hear(now)
            return Dropped.AFTER_STEP
        seq.phase = Phase.GONE
        if phase == Phase.WAITING:
            self._waiting -= 1
            if self._waiting:
                self._hear_of_room(now)
            return Dropped.AT_ONCE
        self._seats_taken -= 1
        if phase == Phase.LOADING:
            self._loading -= 1
        else:
            self._ready.remove(seq)
            self._give_back(seq, 0)
        if self._waiting:
            self._hear_of_room(now)
        return Dropped.BLOCKS_ARE_YOURS if phase == Phase.LOADING else Dropped.AT_ONCE

    def advance(self, now: int) -> list[Outcome]:
        """Do everything that is due by `now`. To be called at `wake_at()`; at other times it does nothing.

        While the engine stands still, `wake_at()` may be the current instant: whoever arrives before `advance` is
        called joins the same first step.
        """
        outcomes: list[Outcome] = []
        limit = now * PS_PER_NS
        while True:
            if self._steps:
                if self._end_ps > limit:
                    return outcomes
                changed = self._complete(outcomes)
                self._plan(self._end_ps, self._end_ps, changed, outcomes)
            elif self._kick is not None and self._kick <= now:
                self._plan(limit, limit + 1, True, outcomes)
            else:
                return outcomes

    # What the driver asks.

    def wake_at(self) -> int | None:
        """When `advance` has something to do next. May move after any call, in either direction."""
        if self._steps:
            return -(-self._end_ps // PS_PER_NS)
        return self._kick

    def next_boundary(self, now: int) -> int | None:
        """When the first step boundary strictly after `now` comes; None if the engine stands still.

        If it answers `now` itself, a boundary is due at this instant and what follows is not planned yet: ask again
        after `advance(now)`. Later calls never move the boundary that was named. Does not disturb the segment.
        """
        if not self._steps:
            return None
        limit = now * PS_PER_NS
        if self._end_ps <= limit:
            return now
        return -(-self._boundary_after(limit)[1] // PS_PER_NS)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return self._waiting

    @property
    def loading(self) -> int:
        return self._loading

    @property
    def running(self) -> int:
        """Sequences that prefill or decode, or are about to."""
        return len(self._running) + len(self._ready)

    @property
    def seats_taken(self) -> int:
        """`running` and `loading`, against `max_num_seqs`."""
        return self._seats_taken

    def kv_blocks_used(self, now: int) -> int:
        """Blocks not free, those that decoding took in the steps begun before `now` included. O(block size)."""
        return self.pool.num_blocks - self.pool.free + self._growth_begun_before(now)

    def _growth_begun_before(self, now: int) -> int:
        """Blocks that the segment's steps begun before `now` took; the pool counts them when the segment ends."""
        limit = (now - 1) * PS_PER_NS
        if not self._steps or self._start_ps > limit:
            return 0
        return self._batch.growth_over(self._steps if self._end_ps <= limit else self._boundary_after(limit)[0])

    def busy_ps(self, now: int) -> int:
        """Time spent in steps up to `now`; exact while the engine stands still, else to the nanosecond."""
        if not self._steps:
            return self._busy_ps
        return self._busy_ps + min(now * PS_PER_NS, self._end_ps) - self._start_ps

    # Cutting.

    def _may_admit(self, seq: Sequence, now: int) -> bool:
        """False if an attempt would surely fail, so that the segment need not be cut for it."""
        if self._seats_taken >= self._seats:
            return False
        spare = self.pool.free - -(-seq.target // self._block_size)
        if spare >= self._batch.size * (self._steps // self._block_size + 1):
            return True
        # Near the limit the answer must not depend on how many steps were planned at once.
        return spare >= 0 and spare >= self._growth_begun_before(now)

    def _hear_of_room(self, now: int) -> None:
        queue = self._queue
        while queue[0].phase != Phase.WAITING:
            queue.popleft()
        if self._may_admit(queue[0], now):
            self._hear(now)

    def _hear(self, now: int) -> None:
        """Something happened at `now`: be at the first boundary strictly after it."""
        if not self._steps:
            if self._kick is None:
                self._kick = now
            return
        if self._heard_first is None:
            self._heard_first = now
        self._heard_last = now
        if self._steps > 1:
            self._cut(now)

    def _cut(self, now: int) -> None:
        limit = now * PS_PER_NS
        if self._end_ps > limit:
            self._steps, self._end_ps = self._boundary_after(limit)

    def _boundary_after(self, limit_ps: int) -> tuple[int, int]:
        """(steps, end) up to the first boundary strictly after the limit, which must lie before the segment's end."""
        start, first, delta = self._start_ps, self._first_ps, self._delta_ps
        steps = steps_to_reach(first, delta, limit_ps - start + 1) or 1
        return steps, start + span_of(first, delta, steps)

    # Completing what was planned.

    def _complete(self, outcomes: list[Outcome]) -> bool:
        """Account for the segment; say whether room or work has come of it."""
        batch, pool, steps, end = self._batch, self.pool, self._steps, self._end_ps
        self._busy_ps += end - self._start_ps
        if self._log is not None:
            self._log_segment(self._log)
        grown = batch.growth_over(steps)
        if grown and not pool.grow(grown):
            raise AssertionError(f"{grown} blocks were planned for and are gone")
        at_ns = -(-end // PS_PER_NS)
        finished = batch.ran(steps)
        for seq in finished:
            grown = batch.leave(seq)
            seq.token_runs.append((seq.run_start, batch.step - 1))
            self._retire(seq)
            self._give_back(seq, grown)
            if not seq.dropping:
                outcomes.append(Finished(seq, at_ns))
        if self._fresh:
            self._fresh = []
        if self._chunks:
            self._complete_chunks(at_ns, outcomes)
            return True
        return bool(finished) or self._retry

    def _complete_chunks(self, at_ns: int, outcomes: list[Outcome]) -> None:
        last_step = self._batch.step - 1
        for seq, new in self._chunks:
            seq.computed += new
            if seq.computed < seq.target:
                continue
            self._prefilling.remove(seq)
            if seq.prefill_only:
                self._retire(seq)
                if seq.dropping:
                    self._give_back(seq, 0)
                else:
                    outcomes.append(Prefilled(seq, at_ns))
                continue
            if seq.last_token_ps >= 0 and self._stalls is not None:
                self._stalls.add(seq.last_token_ps, self._end_ps - seq.last_token_ps, 0, 1, 1)
            seq.run_start = last_step
            seq.generated += 1
            if seq.generated < seq.output_tokens:
                self._batch.join(seq, seq.target + 1)
                continue
            seq.token_runs.append((last_step, last_step))
            self._retire(seq)
            self._give_back(seq, 0)
            if not seq.dropping:
                outcomes.append(Finished(seq, at_ns))
        self._chunks = []

    def _log_segment(self, log: StepLog) -> None:
        start, first, delta, steps, size = self._start_ps, self._first_ps, self._delta_ps, self._steps, self._batch.size
        fresh = len(self._fresh)
        if fresh:
            log.add(start, first, delta, 1, size - fresh)
            start, first, steps = start + first, first + delta, steps - 1
        if steps:
            log.add(start, first, delta, steps, size)

    def _retire(self, seq: Sequence) -> None:
        seq.phase = Phase.GONE
        del self._running[seq]
        self._seats_taken -= 1

    def _give_back(self, seq: Sequence, grown: int) -> None:
        if grown:
            self.pool.shrink(grown)
        if seq.allocation is not None:
            self.pool.release(seq.allocation)
            seq.allocation = None

    # Planning the next segment.

    def _plan(self, start: int, before: int, changed: bool, outcomes: list[Outcome]) -> None:
        """Compose the step that starts at `start` ps, taking notice of what happened strictly before `before` ps.

        `changed`: the engine's own doing may have made room, so the queue is worth a look.
        """
        self._kick = None
        self._steps = 0
        self._retry = False
        heard = self._heard_first is not None and self._heard_first * PS_PER_NS < before
        if self._leaving:
            changed |= self._let_leave(before)
        if self._ready:
            self._let_join(before)
        batch, pool = self._batch, self.pool
        preempted = batch.growth() > pool.free and self._preempt(start)
        if self._waiting and not preempted and (changed or heard):
            self._chunks = self._prefill_chunks(start, before, True, outcomes)
        elif self._prefilling:
            self._chunks = self._prefill_chunks(start, before, False, outcomes)
        if preempted:
            if batch.size or self._chunks:
                self._retry = True
            else:
                self._chunks = self._prefill_chunks(start, before, True, outcomes)
        if self._heard_first is not None:
            # Whatever is left happened at the instant of this boundary; it is heard once that has passed.
            self._heard_first = self._heard_last if self._heard_last * PS_PER_NS >= before else None
        if batch.size or self._chunks:
            self._begin(start)
        elif self._heard_first is not None:
            self._kick, self._heard_first = self._heard_first, None

    def _begin(self, start: int) -> None:
        first, delta, steps = self._batch.segment(self._chunks, self.pool.free)
        if self._retry:
            steps = 1
        self._start_ps, self._first_ps, self._delta_ps, self._steps = start, first, delta, steps
        self._end_ps = start + (first if steps == 1 else span_of(first, delta, steps))
        if self._fresh or self._chunks:
            self._stamp_first_step(-(-start // PS_PER_NS), -(-(start + first) // PS_PER_NS))
        if self._heard_first is not None and steps > 1:
            self._cut(self._heard_last)

    def _stamp_first_step(self, start_ns: int, end_ns: int) -> None:
        for seq in self._fresh:
            seq.first_token_ns = end_ns
            seq.start_ns = start_ns
        for seq, new in self._chunks:
            if seq.start_ns < 0:
                seq.start_ns = start_ns
            if seq.first_token_ns < 0 and seq.computed + new == seq.target:
                seq.first_token_ns = end_ns

    def _let_leave(self, before: int) -> bool:
        staying = []
        for seq in self._leaving:
            if seq.phase != Phase.RUNNING:
                continue  # finished or preempted since
            if seq.stamp * PS_PER_NS >= before:
                staying.append(seq)
            else:
                self._give_back(seq, self._take_out(seq))
        some = len(staying) < len(self._leaving)
        self._leaving = staying
        return some

    def _take_out(self, seq: Sequence) -> int:
        """Out of the running sequences, between steps; returns the blocks that decoding had added."""
        self._retire(seq)
        if seq.computed < seq.target and seq.local:
            self._prefilling.remove(seq)
            return 0
        grown = self._batch.leave(seq)
        if self._batch.step > seq.run_start:
            seq.token_runs.append((seq.run_start, self._batch.step - 1))
        return grown

    def _let_join(self, before: int) -> None:
        """Take those whose KV has arrived into the batch: they compute the last prompt token's logits first."""
        late = []
        for seq in self._ready:
            if seq.stamp * PS_PER_NS >= before:
                late.append(seq)
                continue
            seq.phase = Phase.RUNNING
            seq.run_start = self._batch.step
            self._running[seq] = None
            self._batch.join(seq, seq.prompt_tokens)
            self._fresh.append(seq)
        self._ready = late

    def _preempt(self, start: int) -> bool:
        """Take the last ones out until the rest have the blocks that their next step needs."""
        batch, pool = self._batch, self.pool
        while batch.growth() > pool.free:
            seq = next(reversed(self._running))
            decoding = not seq.local or seq.computed == seq.target
            self._give_back(seq, self._take_out(seq))
            if seq in self._fresh:
                self._fresh.remove(seq)
            if seq.dropping:
                continue
            self.preemptions += 1
            seq.preemptions += 1
            if decoding and seq.generated:
                seq.last_token_ps = start
            seq.phase = Phase.WAITING
            seq.stamp = -1
            seq.local = True
            seq.target = seq.prompt_tokens + seq.generated
            seq.computed = 0
            self._queue.appendleft(seq)
            self._waiting += 1
        return True

    def _prefill_chunks(
        self, start: int, before: int, admit: bool, outcomes: list[Outcome]
    ) -> list[tuple[Sequence, int]]:
        """Spend the token budget: first on prompts being prefilled, then, if `admit`, on the queue."""
        budget = self._budget - self._batch.size
        chunks: list[tuple[Sequence, int]] = []
        for seq in self._prefilling:
            new = self._chunk(seq, budget, bool(chunks))
            if not new:
                return chunks
            chunks.append((seq, new))
            budget -= new
        queue, pool, reserved = self._queue, self.pool, self._batch.growth()
        while admit and queue:
            seq = queue[0]
            if seq.phase != Phase.WAITING:
                queue.popleft()
                continue
            if seq.stamp * PS_PER_NS >= before:
                # It came at the instant of this boundary. Nobody else will wake the engine for it.
                self._heard_last = seq.stamp
                if self._heard_first is None:
                    self._heard_first = seq.stamp
                break
            if self._seats_taken >= self._seats:
                break
            new = self._chunk(seq, budget, bool(chunks)) if seq.local else 0
            if seq.local and not new:
                break
            needed = -(-seq.target // self._block_size)
            # What this step's decodes grow by is theirs already, though the pool counts it at the segment's end.
            allocation = pool.allocate(needed) if needed + reserved <= pool.free else None
            if allocation is None:
                break
            queue.popleft()
            seq.allocation = allocation
            seq.blocks = needed
            self._admit(seq, start, outcomes)
            if new:
                chunks.append((seq, new))
                budget -= new
        return chunks

    def _chunk(self, seq: Sequence, budget: int, others: bool) -> int:
        """How many of its tokens this step computes. Prompts that must stay whole may exceed the budget alone."""
        left = seq.target - seq.computed
        if left <= budget:
            return left
        if self._whole_prompts:
            return 0 if others else left
        return budget if budget > 0 else 0

    def _admit(self, seq: Sequence, start: int, outcomes: list[Outcome]) -> None:
        self._waiting -= 1
        self._seats_taken += 1
        at_ns = -(-start // PS_PER_NS)
        if seq.admitted_ns < 0:
            seq.admitted_ns = at_ns
        if seq.local:
            seq.phase = Phase.RUNNING
            self._running[seq] = None
            self._prefilling.append(seq)
        else:
            seq.phase = Phase.LOADING
            self._loading += 1
            outcomes.append(Admitted(seq, at_ns))

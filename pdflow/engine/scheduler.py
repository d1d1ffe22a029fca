"""Who is in the next step: queue, seats, blocks, token budget, preemption.

Decides the composition of each step and what its completion means for every sequence. Knows no clock: instants come in
as arguments, only to tell what happened before a step's start from what happened at it. When steps start, and how many
are planned at once, is `engine.py`.

The order is that of vLLM's v1 scheduler: decodes first, then prompts being prefilled, then the queue, first come first
served and never overtaking, under `max_num_seqs` (sequences whose KV is being loaded count) and
`max_num_batched_tokens`. A prompt needs all its blocks to be admitted. Decoding takes a block when the context crosses
into one; if none is free, the sequence that became running last is preempted: its blocks are freed, it goes to the
head of the queue, nothing is admitted in that step, and later it computes its prompt and its tokens again.

With a pool that remembers prefixes, a prompt is computed from where it differs from those before it; its last token is
always computed. As vLLM does, prefix blocks are remembered as soon as a step is to compute them, so that prompts of one
step find each other; those that are transferred, once they are here. Of an answer, where its blocks have names, what
decoding has filled is remembered when it is whole.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdflow.engine.batch import DecodeBatch
from pdflow.engine.log import StepLog
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
from pdflow.memory.caching import CachingPool

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool

Chunk = tuple[Sequence, int]

# Reading a member through its enum costs as much as a function call (CORE_SHAPE.md 2.3).
_NEW, _WAITING, _LOADING, _READY, _RUNNING, _GONE = Phase


class Scheduler:
    """The sequences of one engine. `chunks`: the current step's parts of prompts; `fresh`: its first-time decodes."""

    __slots__ = (
        "_ahead",
        "_block_size",
        "_budget",
        "_cache",
        "_capacity_tokens",
        "_late_blocks",
        "_late_seats",
        "_leaving",
        "_prefilling",
        "_queue",
        "_ready",
        "_running",
        "_seats",
        "_span_tokens",
        "_stalls",
        "_whole_prompts",
        "batch",
        "chunks",
        "fresh",
        "loading",
        "missed",
        "pool",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "retry",
        "seats_taken",
        "waiting",
    )

    def __init__(
        self,
        limits: Limits,
        pool: PagedPool,
        batch: DecodeBatch | WalkedBatch,
        whole_prompts: bool,
        stalls: StepLog | None,
    ) -> None:
        self.pool = pool
        self.batch = batch
        self.chunks: list[Chunk] = []
        self.fresh: list[Sequence] = []
        self.waiting = 0
        self.loading = 0
        self.seats_taken = 0
        self.preemptions = 0
        self.missed = -1
        """Instant at which the head of the queue came, if that is the boundary just planned: too late for it."""
        self.retry = False
        """Something was preempted: the queue is worth a look after one step."""
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._cache = pool if isinstance(pool, CachingPool) else None
        self._span_tokens = pool.span * limits.block_size if isinstance(pool, CachingPool) else 0
        self._block_size = limits.block_size
        self._capacity_tokens = pool.num_blocks * limits.block_size
        self._budget = limits.max_num_batched_tokens
        self._seats = limits.max_num_seqs
        self._ahead = limits.async_scheduling
        # What the end of a step has made free, where the step after it was composed before.
        self._late_seats = 0
        self._late_blocks = 0
        self._whole_prompts = whole_prompts
        self._stalls = stalls
        self._queue: deque[Sequence] = deque()
        self._ready: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running) + len(self._ready)

    # From outside, at any instant.

    def enqueue(self, seq: Sequence, now: int) -> None:
        """Raises NeverFitsError, changing nothing, if the whole pool is too small for it."""
        tokens = seq.prompt_tokens
        if seq.phase is not _NEW or tokens < 1 or seq.output_tokens < 1:
            raise ValueError(f"sequence {seq.index} was submitted before, or has no prompt or no output")
        if not seq.prefill_only:
            tokens += seq.output_tokens - 1
        if tokens > self._capacity_tokens:
            raise NeverFitsError(
                f"sequence {seq.index} needs {-(-tokens // self._block_size)} KV blocks for {tokens} tokens, "
                f"the engine has {self.pool.num_blocks} of {self._block_size} tokens"
            )
        seq.phase = _WAITING
        seq.stamp = now
        seq.local = not seq.remote_kv
        seq.target = seq.remote_tokens or seq.prompt_tokens
        self._queue.append(seq)
        self.waiting += 1

    def arrived(self, seq: Sequence, now: int) -> None:
        """Its KV is here."""
        if seq.phase is not _LOADING:
            raise ValueError(f"sequence {seq.index} is {seq.phase.name}, not LOADING")
        seq.phase = _READY
        seq.stamp = now
        self.loading -= 1
        self._ready.append(seq)
        if seq.prefix and self._cache is not None and seq.allocation is not None:
            tokens = seq.loaded_tokens or seq.target
            self._cache.remember(seq.allocation, min(len(seq.prefix), tokens // self._span_tokens))

    def drop(self, seq: Sequence, now: int) -> Dropped:
        phase = seq.phase
        if phase in (_NEW, _GONE) or seq.dropping:
            return Dropped.NOT_HERE
        if phase is _RUNNING:
            seq.dropping = True
            seq.stamp = now
            self._leaving.append(seq)
            return Dropped.AFTER_STEP
        seq.phase = _GONE
        if phase is _WAITING:
            self.waiting -= 1
            return Dropped.AT_ONCE
        self.seats_taken -= 1
        if phase is _LOADING:
            self.loading -= 1
            return Dropped.BLOCKS_ARE_YOURS
        self._ready.remove(seq)
        self._give_back(seq, 0)
        return Dropped.AT_ONCE

    def spare_for_head(self) -> int:
        """Free blocks that admitting the head of the queue would leave; negative if it cannot be admitted now."""
        if self.seats_taken >= self._seats:
            return -1
        queue = self._queue
        while queue[0].phase is not _WAITING:
            queue.popleft()
        seq = queue[0]
        spare = self.pool.free - -(-seq.target // self._block_size)
        return spare if self._cache is None or not seq.prefix else spare + self._held(self._cache, seq)

    # At the end of a segment.

    def complete(self, steps: int, end_ps: int, end_ns: int, outcomes: list[Outcome]) -> bool:
        """Account for `steps` steps that ended at `end_ps`; say whether room or work has come of it."""
        batch, pool = self.batch, self.pool
        if self.fresh:
            self.fresh = []
        finished = batch.ran(steps, pool)
        if self._ahead:
            self._late_seats, self._late_blocks = self.seats_taken, pool.free
        if finished:
            self.seats_taken -= len(finished)
            last_step = batch.step - 1
            for seq in finished:
                grown = batch.leave(seq)
                seq.token_runs.append((seq.run_start, last_step))
                seq.phase = _GONE
                del self._running[seq]
                if seq.prefix:
                    grown = self._remember_answer(seq, grown)
                if grown:
                    pool.shrink(grown)
                if seq.allocation is not None:
                    pool.release(seq.allocation)
                    seq.allocation = None
                if not seq.dropping:
                    seq.finished_ns = end_ns
                    outcomes.append(Finished(seq, end_ns))
        chunks = bool(self.chunks)
        if chunks:
            self._complete_chunks(end_ps, end_ns, outcomes)
        if self._ahead:
            self._late_seats -= self.seats_taken
            self._late_blocks = pool.free - self._late_blocks
        return chunks or bool(finished) or self.retry

    def _complete_chunks(self, end_ps: int, end_ns: int, outcomes: list[Outcome]) -> None:
        last_step = self.batch.step - 1
        for seq, new in self.chunks:
            seq.computed += new
            if seq.computed < seq.target:
                continue
            self._prefilling.remove(seq)
            if seq.prefill_only:
                self._retire(seq)
                if seq.dropping:
                    self._give_back(seq, 0)
                else:
                    outcomes.append(Prefilled(seq, end_ns))
                continue
            if seq.last_token_ps >= 0 and self._stalls is not None:
                self._stalls.add(seq.last_token_ps, end_ps - seq.last_token_ps, 0, 1, 1)
            seq.run_start = last_step
            seq.generated += 1
            if seq.generated < seq.output_tokens:
                self.batch.join(seq, seq.target + 1)
                continue
            seq.token_runs.append((last_step, last_step))
            self._retire(seq)
            self._give_back(seq, 0)
            if not seq.dropping:
                seq.finished_ns = end_ns
                outcomes.append(Finished(seq, end_ns))
        self.chunks = []

    def _retire(self, seq: Sequence) -> None:
        seq.phase = _GONE
        del self._running[seq]
        self.seats_taken -= 1

    def _give_back(self, seq: Sequence, grown: int) -> None:
        if grown:
            self.pool.shrink(grown)
        if seq.allocation is not None:
            self.pool.release(seq.allocation)
            seq.allocation = None

    # At the start of the next.

    def compose(self, start_ps: int, start_ns: int, before_ns: int, look: bool, outcomes: list[Outcome]) -> bool:
        """Say whether there is a step to run at `start_ps`, and who is in it.

        Takes notice of what happened strictly before `before_ns`; `look`: whether the queue is worth a look.
        """
        self.retry = False
        self.missed = -1
        if before_ns >= start_ns:
            self._late_seats = self._late_blocks = 0
        if self._leaving:
            look |= self._let_leave(before_ns)
        if self._ready:
            self._let_join(before_ns)
        batch = self.batch
        size = batch.size
        free = self.pool.free - self._late_blocks
        if size and size > free and batch.growth() > free:
            self._preempt(start_ps)
            # Nothing is admitted beside the survivors; if there are none, waiting one step would be waiting for ever.
            self.retry = bool(batch.size or self._prefilling)
            look = not self.retry
        if self._prefilling or (look and self.waiting):
            budget = self._budget - batch.size
            if self._prefilling:
                budget = self._continue(budget)
            if look and budget >= 0 and self.waiting:
                self._admit(start_ns, before_ns, budget, outcomes)
        if self._late_seats or self._late_blocks:
            # There for whoever waits when this step has been composed, and the next one is.
            self.retry |= bool(self.waiting)
            self._late_seats = self._late_blocks = 0
        return bool(batch.size or self.chunks)

    def admit_within(self, end_ns: int, before_ns: int, most: int, steps: int, outcomes: list[Outcome]) -> bool:
        """Admit at a boundary within a segment of decode steps, if that leaves the segment as it is.

        It does if only remote sequences come in, which join no step before their KV is here, and if there are blocks
        for them beside the `most` that the whole segment may take. If not, says False: the segment must end at this
        boundary, and those that are still in the queue are looked at then. `steps` of the segment end at this one;
        what happened strictly before `before_ns` is known.
        """
        self.missed = -1
        queue, pool = self._queue, self.pool
        while self.waiting and self.seats_taken < self._seats:
            seq = queue[0]
            if seq.phase is not _WAITING:
                queue.popleft()
                continue
            if seq.stamp >= before_ns:
                self.missed = seq.stamp
                break
            needed = -(-seq.target // self._block_size)
            cache = self._cache if seq.prefix else None
            if seq.local or needed + most > pool.free + (0 if cache is None else self._held(cache, seq)):
                return False
            self.batch.count_growth(steps, pool)
            if cache is None:
                seq.allocation = pool.allocate(needed)
            else:
                self._share(cache, seq, cache.find(seq.prefix, self._most(seq)), needed)
            seq.blocks = needed
            queue.popleft()
            self._seat(seq, end_ns, outcomes)
        return True

    def _let_leave(self, before_ns: int) -> bool:
        staying = []
        for seq in self._leaving:
            if seq.phase is not _RUNNING:
                continue  # finished or preempted since
            if seq.stamp >= before_ns:
                staying.append(seq)
            else:
                self._give_back(seq, self._take_out(seq))
        some = len(staying) < len(self._leaving)
        self._leaving = staying
        return some

    def _take_out(self, seq: Sequence) -> int:
        """Out of the running sequences, between steps; returns the blocks that decoding had added."""
        self._retire(seq)
        if seq.local and seq.computed < seq.target:
            self._prefilling.remove(seq)
            return 0
        grown = self.batch.leave(seq)
        if self.batch.step > seq.run_start:
            seq.token_runs.append((seq.run_start, self.batch.step - 1))
        return grown

    def _let_join(self, before_ns: int) -> None:
        """Take those whose KV has arrived into the batch: they compute the last prompt token's logits first, or, where
        only the prompt's beginning was to come, the rest of it."""
        late = []
        for seq in self._ready:
            if seq.stamp >= before_ns:
                late.append(seq)
                continue
            seq.phase = _RUNNING
            self._running[seq] = None
            if seq.prefill_only:
                seq.local = True
                seq.computed = max(seq.computed, seq.loaded_tokens)
                self._prefilling.append(seq)
                continue
            seq.run_start = self.batch.step
            self.batch.join(seq, seq.prompt_tokens)
            self.fresh.append(seq)
        self._ready = late

    def _preempt(self, start_ps: int) -> None:
        """Take the last ones out until the rest have the blocks that their next step needs."""
        while self.batch.growth() > self.pool.free - self._late_blocks:
            seq = next(reversed(self._running))
            decoding = not seq.local or seq.computed == seq.target
            self._give_back(seq, self._take_out(seq))
            if seq in self.fresh:
                self.fresh.remove(seq)
            if seq.dropping:
                continue
            self.preemptions += 1
            seq.preemptions += 1
            if decoding and seq.generated:
                seq.last_token_ps = start_ps
            seq.phase = _WAITING
            seq.stamp = -1
            seq.local = True
            seq.target = seq.prompt_tokens + seq.generated
            seq.computed = 0
            self._queue.appendleft(seq)
            self.waiting += 1

    def _continue(self, budget: int) -> int:
        """Cut chunks from prompts being prefilled. What they leave of the budget; negative if one of them must wait."""
        chunks = self.chunks
        for seq in self._prefilling:
            new = seq.target - seq.computed
            if new > budget:
                new = self._part(new, budget, bool(chunks))
                if not new:
                    return -1
            chunks.append((seq, new))
            if seq.prefix:
                self._remember(seq, new)
            budget -= new
        return budget if budget > 0 else 0

    def _admit(self, start_ns: int, before_ns: int, budget: int, outcomes: list[Outcome]) -> None:
        """Take from the queue, in order, for as long as there are seats, budget and blocks."""
        queue, pool, chunks = self._queue, self.pool, self.chunks
        # What this step's decodes grow by is theirs already, though the pool counts it at the segment's end.
        reserved = self._late_blocks + (self.batch.growth() if self.batch.size else 0)
        while queue:
            seq = queue[0]
            if seq.phase is not _WAITING:
                queue.popleft()
                continue
            if self.seats_taken + self._late_seats >= self._seats:
                return
            if seq.stamp >= before_ns:
                self.missed = seq.stamp
                return
            new = 0
            cache = self._cache if seq.prefix else None
            found = 0 if cache is None else cache.find(seq.prefix, self._most(seq))
            if seq.local:
                new = seq.target - found * self._span_tokens
                if new > budget:
                    new = self._part(new, budget, bool(chunks))
                    if not new:
                        return
            needed = -(-seq.target // self._block_size)
            if cache is None:
                if needed + reserved > pool.free:
                    return
                seq.allocation = pool.allocate(needed)
            else:
                if needed + reserved > pool.free + self._held(cache, seq):
                    return
                self._share(cache, seq, found, needed)
            queue.popleft()
            seq.blocks = needed
            self._seat(seq, start_ns, outcomes)
            if new:
                chunks.append((seq, new))
                if cache is not None:
                    self._remember(seq, new)
                budget -= new

    # Prefixes.

    def _most(self, seq: Sequence) -> int:
        """How many of its prefix blocks a prompt may find: its last token is computed in any case."""
        return (seq.target - 1) // self._span_tokens

    def _held(self, cache: CachingPool, seq: Sequence) -> int:
        """Blocks that it needs and that others hold."""
        return cache.held(seq.prefix, self._most(seq))

    def _share(self, cache: CachingPool, seq: Sequence, found: int, needed: int) -> None:
        seq.allocation = cache.share(seq.prefix, found, needed - found * cache.span)
        seq.computed = seq.cached_tokens = found * self._span_tokens

    def _remember(self, seq: Sequence, new: int) -> None:
        """Others may share what this step computes."""
        if self._cache is not None and seq.allocation is not None:
            count = (seq.computed + new) // self._span_tokens
            self._cache.remember(seq.allocation, min(count, len(seq.prefix)))

    def _remember_answer(self, seq: Sequence, grown: int) -> int:
        """Others may share what was generated, where it has names. Returns how many blocks are `grown` still."""
        span_tokens = self._span_tokens
        if self._cache is None or seq.allocation is None or len(seq.prefix) * span_tokens <= seq.target:
            return grown
        # The KV of the last token was never computed.
        tokens = seq.prompt_tokens + seq.output_tokens - 1
        seq.allocation = self._cache.named(seq.allocation, grown)
        self._cache.remember(seq.allocation, min(tokens // span_tokens, len(seq.prefix)))
        return 0

    def _part(self, left: int, budget: int, others: bool) -> int:
        """How many of `left` tokens, more than the budget, this step computes. A whole prompt may exceed it alone."""
        if self._whole_prompts:
            return 0 if others else left
        return budget if budget > 0 else 0

    def _seat(self, seq: Sequence, at_ns: int, outcomes: list[Outcome]) -> None:
        self.waiting -= 1
        self.seats_taken += 1
        if seq.admitted_ns < 0:
            seq.admitted_ns = at_ns
            if self._cache is not None:
                self.prefix_cache_queries += seq.target
                self.prefix_cache_hits += seq.cached_tokens
        if seq.local:
            seq.phase = _RUNNING
            self._running[seq] = None
            self._prefilling.append(seq)
        else:
            seq.phase = _LOADING
            self.loading += 1
            outcomes.append(Admitted(seq, at_ns))

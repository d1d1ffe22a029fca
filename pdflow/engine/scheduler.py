"""The composition of the next step: decodes, prompts being prefilled, admissions from the queue; preemption.

Decides the composition of each step and what its completion means for every sequence. Knows no clock: instants are
arguments, only to distinguish events before a step's start from those at it. When steps start, and how many
are planned at once, is decided in `engine.py`; admission from the queue in `admission.py`.

The order is that of vLLM's v1 scheduler: decodes first, then prompts being prefilled, then the queue, under
`max_num_batched_tokens`. Decoding takes a block when the context crosses into one; if none is free, the sequence that
became running last is preempted: its blocks are freed, it goes to the head of the queue, nothing is admitted in that
step, and later it computes its prompt and its tokens again. With `prompts_first` the order is that of vLLM V0: the
queue first, and decodes in a step of their own if nothing of it can be admitted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdflow.engine.admission import AdmissionQueue, Chunk
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.log import StepLog
from pdflow.engine.sequence import (
    Dropped,
    Finished,
    Limits,
    Outcome,
    Phase,
    Prefilled,
    Sequence,
)
from pdflow.engine.walk import WalkedBatch

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool

# Reading a member through its enum costs as much as a function call.
_NEW, _WAITING, _LOADING, _READY, _RUNNING, _GONE = Phase


class Scheduler:
    """The sequences of one engine. `chunks`: the current step's parts of prompts; `fresh`: its first-time decodes;
    `admission`: the queue and the count of seats; `awaited`: the sequences for whose KV the current step waits;
    `prompts_only`: the batch does not decode in the current step; `since`: sequences of the batch whose next token
    takes longer than one step, and the ps of their last one."""

    __slots__ = (
        "_ahead",
        "_budget",
        "_late_blocks",
        "_late_seats",
        "_leaving",
        "_most_chunk",
        "_prefilling",
        "_prefixes",
        "_prompts_first",
        "_ready",
        "_running",
        "_stalls",
        "_stands_for_loads",
        "admission",
        "awaited",
        "batch",
        "chunks",
        "fresh",
        "pool",
        "preemptions",
        "prompts_only",
        "retry",
        "since",
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
        self.awaited: set[Sequence] = set()
        self.prompts_only = False
        self.since: dict[Sequence, int] = {}
        self.admission = AdmissionQueue(limits, pool, batch, whole_prompts)
        self.preemptions = 0
        self.retry = False
        """A sequence was preempted: the queue is worth a look after one step."""
        self._prefixes = self.admission.prefixes
        self._budget = limits.max_num_batched_tokens
        self._most_chunk = self.admission.most_chunk
        self._ahead = limits.async_scheduling
        self._prompts_first = limits.prompts_first
        self._stands_for_loads = limits.stands_for_loads
        # What the end of a step has made free, where the step after it was composed before.
        self._late_seats = 0
        self._late_blocks = 0
        self._stalls = stalls
        self._ready: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running) + len(self._ready)

    # From outside, at any instant.

    def arrived(self, seq: Sequence, now: int) -> None:
        """Record that the KV of an admitted remote sequence has arrived."""
        if seq.phase is not _LOADING:
            raise ValueError(f"sequence {seq.index} is {seq.phase.name}, not LOADING")
        seq.phase = _READY
        seq.stamp = now
        self.admission.loading -= 1
        self._ready.append(seq)
        if seq.prefix and self._prefixes is not None:
            self._prefixes.remember_loaded(seq)

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
        admission = self.admission
        if phase is _WAITING:
            admission.waiting -= 1
            return Dropped.AT_ONCE
        admission.seats_taken -= 1
        if phase is _LOADING:
            admission.loading -= 1
            return Dropped.BLOCKS_ARE_YOURS
        self._ready.remove(seq)
        self._give_back(seq, 0)
        return Dropped.AT_ONCE

    # At the end of a segment.

    def complete(self, steps: int, end_ps: int, end_ns: int, outcomes: list[Outcome]) -> bool:
        """Account for `steps` steps that ended at `end_ps`; return whether blocks, seats or work have come of it."""
        batch, pool, admission = self.batch, self.pool, self.admission
        if self.fresh:
            self.fresh = []
        if self.prompts_only:
            finished: list[Sequence] = []
            self._pass_by()
        else:
            finished = batch.ran(steps, pool)
        if self._ahead:
            self._late_seats, self._late_blocks = admission.seats_taken, pool.free
        if finished:
            admission.seats_taken -= len(finished)
            last_step = batch.logged - 1
            for seq in finished:
                grown = batch.leave(seq)
                seq.token_runs.append((seq.run_start, last_step))
                seq.phase = _GONE
                del self._running[seq]
                if seq.prefix and self._prefixes is not None:
                    grown = self._prefixes.remember_answer(seq, grown)
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
            self._late_seats -= admission.seats_taken
            self._late_blocks = pool.free - self._late_blocks
        return chunks or bool(finished) or self.retry

    def _complete_chunks(self, end_ps: int, end_ns: int, outcomes: list[Outcome]) -> None:
        last_step = self.batch.logged - 1
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
                if self.prompts_only:
                    self.since[seq] = end_ps
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
        self.admission.seats_taken -= 1

    def _give_back(self, seq: Sequence, grown: int) -> None:
        if grown:
            self.pool.shrink(grown)
        if seq.allocation is not None:
            self.pool.release(seq.allocation)
            seq.allocation = None

    # At the start of the next.

    def compose(self, start_ps: int, start_ns: int, before_ns: int, look: bool, outcomes: list[Outcome]) -> bool:
        """Compose the step that starts at `start_ps`, and return whether there is one to run.

        Events strictly before `before_ns` are known; `look`: whether the queue is worth a look.
        """
        admission = self.admission
        self.retry = False
        admission.missed = -1
        if before_ns >= start_ns:
            self._late_seats = self._late_blocks = 0
        if self._leaving:
            look |= self._let_leave(before_ns)
        if self._prompts_first:
            composed = self._compose_prompts(start_ps, start_ns, before_ns, look, outcomes)
            if composed is not None:
                return composed
            look = False
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
            if look and self._prompts_first:
                return bool(self._compose_prompts(start_ps, start_ns, before_ns, True, outcomes))
        if self._prefilling or (look and admission.waiting):
            budget = self._budget - batch.size
            if self._prefilling:
                budget = self._continue(budget)
            if look and budget >= 0 and admission.waiting:
                self._admit(start_ns, before_ns, budget, outcomes)
        if self._late_seats or self._late_blocks:
            # There for whoever waits when this step has been composed, and the next one is.
            self.retry |= bool(admission.waiting)
            self._late_seats = self._late_blocks = 0
        return bool(batch.size or self.chunks)

    # With prompts first.

    def _compose_prompts(
        self, start_ps: int, start_ns: int, before_ns: int, look: bool, outcomes: list[Outcome]
    ) -> bool | None:
        """Compose a step of prompts: those whose KV has arrived, else what can be admitted. Return whether there is a
        step to run; None if the batch may decode."""
        admission = self.admission
        loading = admission.loading
        if self._ready:
            self._let_compute(before_ns)
        if self._prefilling:
            self._continue(self._budget)
        elif look and admission.waiting:
            self._admit(start_ns, before_ns, self._budget, outcomes)
        self.prompts_only = bool(self.chunks)
        if not self.chunks and not (self._stands_for_loads and admission.loading > loading):
            return None
        computed = {seq for seq, _ in self.chunks}
        for seq in self._running:
            if seq not in computed:
                self.since.setdefault(seq, start_ps)
        return self.prompts_only

    def _let_compute(self, before_ns: int) -> None:
        """Let the prompts whose KV has arrived compute their last token. Of one whose last token is P's, there is
        nothing left to compute: it decodes."""
        late = []
        for seq in self._ready:
            if seq.stamp >= before_ns or seq.target != seq.prompt_tokens or seq.prefill_only:
                late.append(seq)
                continue
            seq.phase = _RUNNING
            self._running[seq] = None
            seq.local = True
            seq.computed = seq.target - 1
            self._prefilling.append(seq)
        self._ready = late

    def _pass_by(self) -> None:
        """End the runs of those that decode: the step that has ended gave them no token."""
        computed = {seq for seq, _ in self.chunks}
        now = self.batch.logged
        for seq in self._running:
            if seq in computed:
                continue
            if now > seq.run_start:
                seq.token_runs.append((seq.run_start, now - 1))
            seq.run_start = now + 1
        self.batch.pass_by()

    def end_waits(self, end_ps: int) -> None:
        """Log the waits of those that have a token at `end_ps` for the first time since a step of prompts."""
        if self._stalls is not None:
            for since_ps, weight in Counter(self.since.values()).items():
                self._stalls.add(since_ps, end_ps - since_ps, 0, 1, weight)
        self.since = {}

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
        """Remove a running sequence, between steps; return the blocks that decoding had added."""
        self._retire(seq)
        if seq.local and seq.computed < seq.target:
            self._prefilling.remove(seq)
            return 0
        grown = self.batch.leave(seq)
        self.since.pop(seq, None)
        if self.batch.logged > seq.run_start:
            seq.token_runs.append((seq.run_start, self.batch.logged - 1))
        return grown

    def _let_join(self, before_ns: int) -> None:
        """Add the sequences whose KV has arrived to the batch: they compute the last prompt token's logits first, or,
        where only the prompt's beginning was to come, the rest of it."""
        late = []
        for seq in self._ready:
            if seq.stamp >= before_ns:
                late.append(seq)
                continue
            seq.phase = _RUNNING
            if not seq.prefill_only:
                self._join(seq)
                continue
            self._running[seq] = None
            seq.local = True
            seq.computed = max(seq.computed, seq.loaded_tokens)
            self._prefilling.append(seq)
        self._ready = late

    def _join(self, seq: Sequence) -> None:
        """Add a sequence whose KV came from elsewhere to the batch."""
        self._running[seq] = None
        seq.run_start = self.batch.logged
        self.batch.join(seq, seq.prompt_tokens)
        self.fresh.append(seq)

    def _preempt(self, start_ps: int) -> None:
        """Preempt the sequences that became running last until the rest have the blocks that their next step needs."""
        while self.batch.growth() > self.pool.free - self._late_blocks:
            seq = next(reversed(self._running))
            decoding = not seq.local or seq.computed == seq.target
            last_ps = self.since.get(seq, start_ps)
            self._give_back(seq, self._take_out(seq))
            if seq in self.fresh:
                self.fresh.remove(seq)
            if seq.dropping:
                continue
            self.preemptions += 1
            seq.preemptions += 1
            if decoding and seq.generated:
                seq.last_token_ps = last_ps
            self.admission.put_back(seq)

    def _continue(self, budget: int) -> int:
        """Cut chunks from prompts being prefilled. Returns the rest of the budget; negative if one of them must
        wait."""
        chunks = self.chunks
        for seq in self._prefilling:
            new = seq.target - seq.computed
            if new > budget or new > self._most_chunk:
                new = self.admission.chunk_tokens(new, budget, bool(chunks))
                if not new:
                    return -1
            chunks.append((seq, new))
            if seq.prefix and self._prefixes is not None:
                self._prefixes.remember(seq, new)
            budget -= new
        return budget if budget > 0 else 0

    def _admit(self, start_ns: int, before_ns: int, budget: int, outcomes: list[Outcome]) -> None:
        # What this step's decodes grow by is theirs already, though the pool counts it at the segment's end.
        reserved = self._late_blocks + (self.batch.growth() if self.batch.size else 0)
        self.admission.admit(start_ns, before_ns, budget, reserved, self._late_seats, self.chunks, outcomes)
        for seq in self.admission.entered:
            if seq.local:
                self._running[seq] = None
                self._prefilling.append(seq)
            else:
                self.awaited.add(seq)
                self._join(seq)

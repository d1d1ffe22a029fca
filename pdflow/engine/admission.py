"""The queue of an engine: sequences that wait, and their admission to a step, with a seat and with blocks.

First come first served and never overtaking, under `max_num_seqs` (sequences whose KV is being loaded count) and what a
step's token budget leaves, as in vLLM's v1 scheduler. A prompt needs all its blocks to be admitted. With a pool that
remembers prefixes, it is computed from where it differs from those before it; its last token is always computed. The
other sequences of a step, and preemption, are in `scheduler.py`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdflow.engine.batch import DecodeBatch
from pdflow.engine.prefixes import PrefixSharing
from pdflow.engine.sequence import Admitted, Limits, NeverFitsError, Outcome, Phase, Sequence
from pdflow.engine.walk import WalkedBatch
from pdflow.memory.caching import CachingPool

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool

Chunk = tuple[Sequence, int]
"""(prompt, how many of its tokens a step computes)."""

# Reading a member through its enum costs as much as a function call.
_NEW, _WAITING, _LOADING, _READY, _RUNNING, _GONE = Phase


class AdmissionQueue:
    """The waiting sequences, and how many seats are taken. `prefixes`: prefix sharing, None if the pool has none."""

    __slots__ = (
        "_batch",
        "_block_size",
        "_capacity_tokens",
        "_extra",
        "_next_replica",
        "_pool",
        "_queue",
        "_replicas",
        "_seats",
        "_whole_prompts",
        "entered",
        "loading",
        "missed",
        "most_chunk",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prefixes",
        "seats_taken",
        "waiting",
    )

    def __init__(self, limits: Limits, pool: PagedPool, batch: DecodeBatch | WalkedBatch, whole_prompts: bool) -> None:
        self.prefixes = PrefixSharing(pool, limits.block_size) if isinstance(pool, CachingPool) else None
        self.waiting = 0
        self.loading = 0
        """The number of seats of sequences whose KV is being transferred."""
        self.seats_taken = 0
        self.missed = -1
        """Instant at which the head of the queue arrived, if too late for the boundary just planned; else -1."""
        self.entered: list[Sequence] = []
        """Admitted sequences that the step which admits them computes, in order."""
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._pool = pool
        self._batch = batch
        self._queue: deque[Sequence] = deque()
        self._block_size = limits.block_size
        self._replicas = limits.replicas
        self._next_replica = 0
        self.most_chunk = limits.max_num_batched_tokens // (1 if whole_prompts else limits.replicas)
        """What one replica computes of a prompt in a step."""
        self._extra = limits.extra
        self._capacity_tokens = pool.num_blocks // limits.replicas * limits.block_size
        self._seats = limits.max_num_seqs
        self._whole_prompts = whole_prompts

    def enqueue(self, seq: Sequence, now: int) -> None:
        """Append a new sequence. Raises NeverFitsError, changing nothing, if the whole pool is too small for it."""
        tokens = seq.prompt_tokens
        if seq.phase is not _NEW or tokens < 1 or seq.output_tokens < 1:
            raise ValueError(f"sequence {seq.index} was submitted before, or has no prompt or no output")
        if not seq.prefill_only:
            tokens += seq.output_tokens - 1
        blocks = -(-tokens // self._block_size)
        if self._extra is not None:
            seq.extra_blocks = self._extra.of(blocks)
        blocks += seq.extra_blocks
        if blocks * self._block_size > self._capacity_tokens:
            raise NeverFitsError(
                f"sequence {seq.index} needs {blocks} KV blocks for {tokens} tokens, "
                f"the engine has {self._capacity_tokens // self._block_size} of {self._block_size} tokens"
                f"{' for each replica' if self._replicas > 1 else ''}"
            )
        seq.phase = _WAITING
        seq.stamp = now
        seq.local = not seq.remote_kv
        seq.target = seq.remote_tokens or seq.prompt_tokens
        self._queue.append(seq)
        self.waiting += 1

    def put_back(self, seq: Sequence) -> None:
        """Put a preempted sequence at the head of the queue; it computes its prompt and its tokens again."""
        seq.phase = _WAITING
        seq.stamp = -1
        seq.local = True
        seq.target = seq.prompt_tokens + seq.generated
        seq.computed = 0
        self._queue.appendleft(seq)
        self.waiting += 1

    def spare_for_head(self) -> int:
        """Return the free blocks that admitting the head of the queue would leave; negative if it cannot be admitted
        now."""
        if self.seats_taken >= self._seats:
            return -1
        queue = self._queue
        while queue[0].phase is not _WAITING:
            queue.popleft()
        seq = queue[0]
        spare = self._pool.free - -(-seq.target // self._block_size) - seq.extra_blocks
        return spare if self.prefixes is None or not seq.prefix else spare + self.prefixes.held(seq)

    def admit(
        self,
        start_ns: int,
        before_ns: int,
        budget: int,
        reserved: int,
        late_seats: int,
        chunks: list[Chunk],
        outcomes: list[Outcome],
    ) -> None:
        """Admit sequences, in the order of the queue, for as long as there are seats, budget and blocks.

        `chunks`: those of the step that begins at `start_ns`, to which those of admitted prompts are added, within
        `budget` tokens. `reserved` free blocks and `late_seats` free seats are not available yet. Events
        strictly before `before_ns` are known.
        """
        queue, pool = self._queue, self._pool
        self.entered = []
        while queue:
            seq = queue[0]
            if seq.phase is not _WAITING:
                queue.popleft()
                continue
            if self.seats_taken + late_seats >= self._seats:
                return
            if seq.stamp >= before_ns:
                self.missed = seq.stamp
                return
            new = 0
            prefixes = self.prefixes if seq.prefix else None
            found = 0 if prefixes is None else prefixes.found(seq)
            if seq.local:
                new = seq.target if prefixes is None else seq.target - found * prefixes.span_tokens
                if new > budget or new > self.most_chunk:
                    new = self.chunk_tokens(new, budget, bool(chunks))
                    if not new:
                        return
            elif seq.loads_in_step:
                if budget < 1:
                    return
                # It decodes in the step that begins, which may take a block beyond those of its prompt.
                reserved += -(-seq.prompt_tokens // self._block_size) + (-seq.target // self._block_size)
            needed = -(-seq.target // self._block_size) + seq.extra_blocks
            if prefixes is None:
                if needed + reserved > pool.free:
                    return
                seq.allocation = pool.allocate(needed)
            else:
                if needed + reserved > pool.free + prefixes.held(seq):
                    return
                prefixes.share(seq, found, needed)
            queue.popleft()
            seq.blocks = needed - seq.extra_blocks
            if seq.extra_blocks and seq.allocation is not None:
                seq.allocation = pool.divided(seq.allocation, len(seq.allocation.blocks) - seq.extra_blocks)
            self._seat(seq, start_ns, outcomes)
            if new:
                chunks.append((seq, new))
                if prefixes is not None:
                    prefixes.remember(seq, new)
                budget -= new
            elif seq.phase is _RUNNING:
                budget -= 1

    def admit_within(self, end_ns: int, before_ns: int, most: int, steps: int, outcomes: list[Outcome]) -> bool:
        """Admit at a boundary within a segment of decode steps, if that leaves the segment as it is.

        It does if only remote sequences are admitted which join no step before their KV has arrived, and if there are
        blocks for them beside the `most` that the whole segment may take. If not, returns False: the segment must end
        at this boundary, and the rest of the queue is looked at then. `steps` of the segment end at this boundary;
        events strictly before `before_ns` are known.
        """
        self.missed = -1
        queue, pool = self._queue, self._pool
        while self.waiting and self.seats_taken < self._seats:
            seq = queue[0]
            if seq.phase is not _WAITING:
                queue.popleft()
                continue
            if seq.stamp >= before_ns:
                self.missed = seq.stamp
                break
            needed = -(-seq.target // self._block_size) + seq.extra_blocks
            prefixes = self.prefixes if seq.prefix else None
            if seq.local or seq.loads_in_step:
                return False
            if needed + most > pool.free + (0 if prefixes is None else prefixes.held(seq)):
                return False
            self._batch.count_growth(steps, pool)
            if prefixes is None:
                seq.allocation = pool.allocate(needed)
            else:
                prefixes.share(seq, prefixes.found(seq), needed)
            seq.blocks = needed - seq.extra_blocks
            if seq.extra_blocks and seq.allocation is not None:
                seq.allocation = pool.divided(seq.allocation, len(seq.allocation.blocks) - seq.extra_blocks)
            queue.popleft()
            self._seat(seq, end_ns, outcomes)
        return True

    def chunk_tokens(self, left: int, budget: int, others: bool) -> int:
        """Return how many of `left` tokens, more than the budget or than one replica's, this step computes. A whole
        prompt may exceed it alone."""
        if self._whole_prompts:
            return 0 if others else left
        return min(left, budget, self.most_chunk) if budget > 0 else 0

    def _seat(self, seq: Sequence, at_ns: int, outcomes: list[Outcome]) -> None:
        self.waiting -= 1
        self.seats_taken += 1
        if seq.admitted_ns < 0:
            seq.admitted_ns = at_ns
            if self._replicas > 1:
                seq.replica = self._next_replica
                self._next_replica = (seq.replica + 1) % self._replicas
            if self.prefixes is not None:
                self.prefix_cache_queries += seq.target
                self.prefix_cache_hits += seq.cached_tokens
        if seq.local:
            seq.phase = _RUNNING
            self.entered.append(seq)
        elif seq.loads_in_step:
            seq.phase = _RUNNING
            self.entered.append(seq)
            if seq.prefix and self.prefixes is not None:
                self.prefixes.remember_loaded(seq)
            outcomes.append(Admitted(seq, at_ns))
        else:
            seq.phase = _LOADING
            self.loading += 1
            outcomes.append(Admitted(seq, at_ns))

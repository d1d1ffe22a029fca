"""The sequences that decode together, in O(1) or O(log n) per change and with closed forms for runs of steps.

Every decoding sequence gets one token in every step of the engine, so nothing needs to be done per token: the batch
keeps a step counter, the sum of contexts, a heap of absolute finish steps, and, for blocks, how many sequences cross
into a new block at each residue of the step counter modulo the block size. `walk.py` computes the same sequence by
sequence and step by step; the two share the cost's coefficients and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pdflow.cost.step import StepCost
from pdflow.engine.sequence import Sequence

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


class DecodeBatch:
    """The decode batch: `size` sequences that decode in the batch's next step, `step`, and read `context` tokens in it.
    `logged`: the number of that step among all of the engine's, of which those of prompts alone pass the batch by."""

    __slots__ = (
        "_base_ps",
        "_block_size",
        "_cost",
        "_counted",
        "_crossing",
        "_finish",
        "_order",
        "_prepaid",
        "context",
        "logged",
        "size",
        "step",
    )

    def __init__(self, cost: StepCost, block_size: int) -> None:
        self.step = 0
        self.logged = 0
        self.size = 0
        self.context = 0
        self._cost = cost
        self._block_size = block_size
        # Twice in a row, so that what is ahead is one slice.
        self._crossing = [0] * (2 * block_size)
        self._prepaid = 0
        self._counted = 0
        self._order = 0
        self._finish: list[tuple[int, int, Sequence]] = []
        # By number of decodes: a step's time without what its context costs.
        self._base_ps: list[int] = []

    def join(self, seq: Sequence, context: int) -> None:
        """Add a sequence, which decodes from the next step on. `context`: tokens its first step reads, its own
        included."""
        step = self.step
        block_size = self._block_size
        self._order = order = self._order + 1
        seq.order = order
        seq.join_step = step
        seq.join_context = context
        heappush(self._finish, (step + seq.output_tokens - seq.generated, order, seq))
        self.size += 1
        self.context += context
        # Context c begins a new block when c = 1 modulo the block size.
        ahead = (1 - context) % block_size
        at = (step + ahead) % block_size
        self._crossing[at] += 1
        self._crossing[at + block_size] += 1
        if not ahead and context <= seq.blocks * block_size:
            self._prepaid += 1

    def leave(self, seq: Sequence) -> int:
        """Remove a sequence between steps and update its `generated`. Returns the blocks that decoding had added."""
        block_size = self._block_size
        join_step, join_context = seq.join_step, seq.join_context
        done = self.step - join_step
        context = join_context + done
        ahead = (1 - join_context) % block_size
        if not done and not ahead and context <= seq.blocks * block_size:
            self._prepaid -= 1
        self.size -= 1
        self.context -= context
        at = (join_step + ahead) % block_size
        self._crossing[at] -= 1
        self._crossing[at + block_size] -= 1
        seq.order = -1
        seq.generated += done
        grown = -(-(context - 1) // block_size) - seq.blocks
        return grown if grown > 0 else 0

    def growth(self) -> int:
        """Return the blocks that the next step needs beyond those held."""
        return self._crossing[self.step % self._block_size] - self._prepaid

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        """Return (first step's ps, growth per step in ps, steps) of the longest run of steps in which the batch is the
        same.

        With prompt chunks that is one step. Otherwise up to the first finish, or to the last step for which the pool's
        free blocks are enough.
        """
        cost = self._cost
        size = self.size
        if chunks:
            return cost.step_sums_ps(*sums_of(chunks), size, self.context), 0, 1
        heap = self._finish
        while heap[0][2].order != heap[0][1]:
            heappop(heap)
        steps = heap[0][0] - self.step
        if size * (steps // self._block_size + 1) > pool.free:
            steps = self._affordable(steps, pool.free)
        base = self._base_ps
        while len(base) <= size:
            base.append(cost.decode_step_ps(len(base), 0))
        c2 = cost.c2
        return base[size] + c2 * self.context, c2 * size, steps

    def prompts_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        """Return the ps of a step of these prompts alone."""
        return self._cost.step_sums_ps(*sums_of(chunks), 0, 0)

    def pass_by(self) -> None:
        """Take note of a step of the engine in which no sequence of the batch decoded."""
        self.logged += 1

    def growth_over(self, steps: int) -> int:
        """Return the blocks that the next `steps` steps need beyond those held and those that the pool has counted."""
        return max(0, self._growth_over(steps) - self._counted)

    def _growth_over(self, steps: int) -> int:
        block_size = self._block_size
        begin = self.step % block_size
        partial = sum(self._crossing[begin : begin + steps % block_size])
        return steps // block_size * self.size + partial - self._prepaid

    def count_growth(self, steps: int, pool: PagedPool) -> None:
        """Count the blocks that the next `steps` steps take in the pool. The steps are still to be `ran`."""
        grown = self.growth_over(steps)
        if grown:
            if not pool.grow(grown):
                raise AssertionError(f"{grown} blocks were planned but are not available")
            self._counted += grown

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        """Move past `steps` steps. Returns the sequences that have all their tokens, in order of joining; they must
        leave."""
        finished: list[Sequence] = []
        if self.size:
            grown = self._growth_over(steps) - self._counted
            if grown > 0 and not pool.grow(grown):
                raise AssertionError(f"{grown} blocks were planned but are not available")
            # A host may end the run before a step whose blocks are counted.
            self._prepaid, self._counted = 0, max(0, -grown)
            self.context += steps * self.size
        self.step = step = self.step + steps
        self.logged += steps
        heap = self._finish
        while heap and heap[0][0] <= step:
            _, order, seq = heappop(heap)
            if seq.order == order:
                finished.append(seq)
        return finished

    def _affordable(self, steps: int, free: int) -> int:
        """Return how many of the next `steps` steps the free blocks are enough for."""
        size, block_size = self.size, self._block_size
        # In any `block_size` consecutive steps every sequence takes exactly one block.
        cycles, rest = divmod(free + self._prepaid, size)
        within = cycles * block_size
        begin = self.step
        while within < steps:
            needed = self._crossing[(begin + within) % block_size]
            if needed > rest:
                return within
            rest -= needed
            within += 1
        return steps


def sums_of(chunks: Seq[tuple[Sequence, int]]) -> tuple[int, int]:
    """Return how many tokens of prompts these are, and how many tokens they attend to together."""
    tokens = attended = 0
    for seq, new in chunks:
        tokens += new
        attended += new * seq.computed + new * (new + 1) // 2
    return tokens, attended

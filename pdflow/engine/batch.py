"""The sequences that decode together, in O(1) or O(log n) per change and with closed forms for runs of steps.

Every decoding sequence gets one token in every step of the engine, so nothing needs to be done per token: the batch
keeps a step counter, the sum of contexts, a heap of absolute finish steps, and, for blocks, how many sequences cross
into a new block at each residue of the step counter modulo the block size. `walk.py` says the same sequence by
sequence and step by step; the two share the cost's coefficients and nothing else.

Source: SIM_PEERS.md section 3, "How to do it in pdflow and stay exact".
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
    """`step` numbers the engine's next step; `size` sequences will decode in it and read `context` tokens."""

    __slots__ = ("_block_size", "_cost", "_crossing", "_finish", "_order", "_prepaid", "context", "size", "step")

    def __init__(self, cost: StepCost, block_size: int) -> None:
        self.step = 0
        self.size = 0
        self.context = 0
        self._cost = cost
        self._block_size = block_size
        self._crossing = [0] * block_size
        self._prepaid = 0
        self._order = 0
        self._finish: list[tuple[int, int, Sequence]] = []

    def join(self, seq: Sequence, context: int) -> None:
        """Decode from the next step on; `context` is what its first step reads, its own token included."""
        step = self.step
        self._order = order = self._order + 1
        seq.order = order
        seq.join_step = step
        seq.join_context = context
        heappush(self._finish, (step + seq.output_tokens - seq.generated, order, seq))
        self.size += 1
        self.context += context
        # Context c begins a new block when c = 1 modulo the block size.
        self._crossing[(step + 1 - context) % self._block_size] += 1
        self._prepaid += self._is_prepaid(seq)

    def leave(self, seq: Sequence) -> int:
        """Take it out between steps; its `generated` is then right. Returns the blocks that decoding had added."""
        done = self.step - seq.join_step
        context = seq.join_context + done
        if not done:
            self._prepaid -= self._is_prepaid(seq)
        self.size -= 1
        self.context -= context
        self._crossing[(seq.join_step + 1 - seq.join_context) % self._block_size] -= 1
        seq.order = -1
        seq.generated += done
        grown = -(-(context - 1) // self._block_size) - seq.blocks
        return grown if grown > 0 else 0

    def growth(self) -> int:
        """Blocks that the next step needs beyond those held."""
        return self._crossing[self.step % self._block_size] - self._prepaid

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        """(first step's ps, growth per step in ps, steps) of the longest stretch in which nothing changes by itself.

        With prompt chunks that is one step. Otherwise up to the first finish, or to the last step for which the pool's
        free blocks are enough.
        """
        cost = self._cost
        if not chunks:
            decodes = self.size
            return cost.decode_step_ps(decodes, self.context), cost.c2 * decodes, self._horizon(pool)
        tokens = attended = 0
        for seq, new in chunks:
            tokens += new
            attended += new * seq.computed + new * (new + 1) // 2
        return cost.step_sums_ps(tokens, attended, self.size, self.context), 0, 1

    def growth_over(self, steps: int) -> int:
        """Blocks that the next `steps` steps need beyond those held."""
        if not steps or not self.size:
            return 0
        block_size, crossing = self._block_size, self._crossing
        cycles, rest = divmod(steps, block_size)
        begin = self.step % block_size
        end = begin + rest
        if end <= block_size:
            partial = sum(crossing[begin:end])
        else:
            partial = sum(crossing[begin:]) + sum(crossing[: end - block_size])
        return cycles * self.size + partial - self._prepaid

    def ran(self, steps: int) -> list[Sequence]:
        """Move past `steps` steps. Returns those that have all their tokens, by order of joining; they must leave."""
        self.step = step = self.step + steps
        self.context += steps * self.size
        self._prepaid = 0
        heap = self._finish
        finished: list[Sequence] = []
        while heap and heap[0][0] <= step:
            _, order, seq = heappop(heap)
            if seq.order == order:
                finished.append(seq)
        return finished

    def _horizon(self, pool: PagedPool) -> int:
        heap = self._finish
        while heap[0][2].order != heap[0][1]:
            heappop(heap)
        steps = heap[0][0] - self.step
        size, block_size = self.size, self._block_size
        free = pool.free
        if size * (steps // block_size + 1) <= free:
            return steps
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

    def _is_prepaid(self, seq: Sequence) -> bool:
        """Whether its first step crosses into a block that admission has already taken."""
        context = seq.join_context
        return (context - 1) % self._block_size == 0 and context <= seq.blocks * self._block_size

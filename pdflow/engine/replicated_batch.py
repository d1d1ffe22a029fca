"""The decode batch of an engine with several replicas of attention, whose steps are in lockstep.

Every step lasts as long as that of the replica that takes longest. In a run of decode steps each replica's time grows
by its number of sequences, so that the longest is the same one until another, with more sequences, overtakes it: a run
ends there at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pdflow.cost.step import StepCost
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.sequence import Sequence

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


class ReplicatedBatch(DecodeBatch):
    """A decode batch that knows the sequences and the context of each replica."""

    __slots__ = ("_contexts", "_sizes")

    def __init__(self, cost: StepCost, block_size: int, replicas: int) -> None:
        super().__init__(cost, block_size)
        self._sizes = [0] * replicas
        self._contexts = [0] * replicas

    def join(self, seq: Sequence, context: int) -> None:
        super().join(seq, context)
        self._sizes[seq.replica] += 1
        self._contexts[seq.replica] += context

    def leave(self, seq: Sequence) -> int:
        self._sizes[seq.replica] -= 1
        self._contexts[seq.replica] -= seq.join_context + self.step - seq.join_step
        return super().leave(seq)

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        for replica, size in enumerate(self._sizes):
            self._contexts[replica] += steps * size
        return super().ran(steps, pool)

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        cost = self._cost
        if chunks:
            return self._chunk_step_ps(chunks), 0, 1
        _, _, steps = super().segment(chunks, pool)
        running = [
            (cost.own_sums_ps(0, 0, size, context), cost.c2 * size)
            for size, context in zip(self._sizes, self._contexts, strict=True)
            if size
        ]
        return self._until_overtaken(running, steps)

    def _until_overtaken(self, running: list[tuple[int, int]], steps: int) -> tuple[int, int, int]:
        """Return `segment` of replicas that run, by the ps of the first step of each and how much longer the next is,
        for at most `steps` steps."""
        slowest, growth = max(running)
        for other, grows in running:
            if grows > growth:
                # Step k of the run is the last in which the other one is not slower.
                steps = min(steps, (slowest - other) // (grows - growth) + 1)
        return slowest + self._cost.experts_ps(self.size), growth, steps

    def _sums(self, chunks: Seq[tuple[Sequence, int]]) -> list[tuple[int, int, int, int]]:
        """Return P, A, D and C of each replica in a step with these chunks."""
        tokens, attended = [0] * len(self._sizes), [0] * len(self._sizes)
        for seq, new in chunks:
            tokens[seq.replica] += new
            attended[seq.replica] += new * seq.computed + new * (new + 1) // 2
        return list(zip(tokens, attended, self._sizes, self._contexts, strict=True))

    def _chunk_step_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        cost = self._cost
        slowest = max([cost.own_sums_ps(*each) for each in self._sums(chunks) if each[0] or each[2]])
        return slowest + cost.experts_ps(sum([new for _, new in chunks]) + self.size)

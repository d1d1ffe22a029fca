"""The decode batch of an engine with several replicas of attention, whose steps are in lockstep.

Every step lasts as long as that of the replica that takes longest. In a run of decode steps each replica's time grows
by its number of sequences, so that the longest is the same one until another, with more sequences, overtakes it: a run
ends there at the latest. Where layers have a window, it also ends where a sequence of any replica reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pdflow.cost.step import StepCost
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.sequence import Sequence
from pdflow.engine.windowed import WindowedContexts

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


class ReplicatedBatch(DecodeBatch):
    """A decode batch that knows the sequences and the context of each replica."""

    __slots__ = ("_contexts", "_sizes", "_windowed")

    def __init__(self, cost: StepCost, block_size: int, replicas: int) -> None:
        super().__init__(cost, block_size)
        self._sizes = [0] * replicas
        self._contexts = [0] * replicas
        # Of each replica, also where no layer has a window: engines of several replicas are few.
        self._windowed = [WindowedContexts(cost.window) for _ in range(replicas)]

    def join(self, seq: Sequence, context: int) -> None:
        super().join(seq, context)
        self._sizes[seq.replica] += 1
        self._contexts[seq.replica] += context
        self._windowed[seq.replica].join(seq)

    def leave(self, seq: Sequence) -> int:
        self._sizes[seq.replica] -= 1
        self._contexts[seq.replica] -= seq.join_context + self.step - seq.join_step
        self._windowed[seq.replica].leave(seq, self.step)
        return super().leave(seq)

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        for replica, size in enumerate(self._sizes):
            self._contexts[replica] += steps * size
            self._windowed[replica].ran(self.step + steps, steps)
        return super().ran(steps, pool)

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        cost = self._cost
        if chunks:
            return self._chunk_step_ps(chunks), 0, 1
        _, _, steps = super().segment(chunks, pool)
        running = []
        for size, context, windowed in zip(self._sizes, self._contexts, self._windowed, strict=True):
            if size:
                first = cost.own_sums_ps(0, 0, size, context) + cost.window_ps(0, windowed.context)
                running.append((first, cost.c2 * size + cost.window_ps(0, windowed.growing)))
                steps = windowed.alike(self.step, steps)
        slowest, growth = max(running)
        for other, grows in running:
            if grows > growth:
                # Step k of the run is the last in which the other one is not slower.
                steps = min(steps, (slowest - other) // (grows - growth) + 1)
        return slowest + cost.experts_ps(self.size), growth, steps

    def _chunk_step_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        cost = self._cost
        tokens, attended = [0] * len(self._sizes), [0] * len(self._sizes)
        windowed_ps = [cost.window_ps(0, windowed.context) for windowed in self._windowed]
        for seq, new in chunks:
            tokens[seq.replica] += new
            attended[seq.replica] += new * seq.computed + new * (new + 1) // 2
            windowed_ps[seq.replica] += cost.window_ps(cost.within_window(new, seq.computed), 0)
        sums = zip(tokens, attended, self._sizes, self._contexts, windowed_ps, strict=True)
        slowest = max([cost.own_sums_ps(*each) + ps for *each, ps in sums if each[0] or each[2]])
        return slowest + cost.experts_ps(sum(tokens) + self.size)

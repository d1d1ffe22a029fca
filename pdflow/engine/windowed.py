"""What decoding sequences read in layers that attend to a window: the sum over them of min(context, window).

The sum grows by one per step for each sequence that is shorter than the window. A run of steps in which the same
sequences are is a run whose durations grow by a constant, so it ends where the first of them reaches the window: a heap
of these steps is all that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pdflow.cost.step import StepCost
from pdflow.engine.batch import DecodeBatch
from pdflow.engine.replicated_batch import ReplicatedBatch
from pdflow.engine.sequence import Sequence

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


class WindowedContexts:
    """The sequences of a batch, as far as a window counts: `context` is the sum in the next step, `growing` the number
    of those that are shorter than the window there."""

    __slots__ = ("_reaching", "_window", "context", "growing")

    def __init__(self, window: int) -> None:
        self.context = 0
        self.growing = 0
        self._window = window
        # (step in which its context is the whole window, order, sequence); those that have left are skipped.
        self._reaching: list[tuple[int, int, Sequence]] = []

    def join(self, seq: Sequence) -> None:
        """Add a sequence that has just joined the batch."""
        missing = self._window - seq.join_context
        if missing > 0:
            self.growing += 1
            self.context += seq.join_context
            heappush(self._reaching, (seq.join_step + missing, seq.order, seq))
        else:
            self.context += self._window

    def leave(self, seq: Sequence, step: int) -> None:
        """Remove a sequence that is about to leave the batch before `step`."""
        context = seq.join_context + step - seq.join_step
        if context < self._window:
            self.growing -= 1
            self.context -= context
        else:
            self.context -= self._window

    def alike(self, step: int, steps: int) -> int:
        """Return how many of the next `steps` steps, from `step` on, each read `growing` tokens more than the one
        before."""
        reaching = self._reaching
        while reaching and reaching[0][2].order != reaching[0][1]:
            heappop(reaching)
        return min(steps, reaching[0][0] - step + 1) if reaching else steps

    def ran(self, step: int, steps: int) -> None:
        """Move past `steps` steps, before `step`."""
        self.context += steps * self.growing
        reaching = self._reaching
        while reaching and reaching[0][0] <= step:
            at, order, seq = heappop(reaching)
            if seq.order == order:
                self.growing -= 1
                self.context -= step - at


class WindowedBatch(DecodeBatch):
    """A decode batch of a model in which layers have a window."""

    __slots__ = ("_windowed",)

    def __init__(self, cost: StepCost, block_size: int) -> None:
        super().__init__(cost, block_size)
        self._windowed = WindowedContexts(cost.window)

    def join(self, seq: Sequence, context: int) -> None:
        super().join(seq, context)
        self._windowed.join(seq)

    def leave(self, seq: Sequence) -> int:
        self._windowed.leave(seq, self.step)
        return super().leave(seq)

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        finished = super().ran(steps, pool)
        self._windowed.ran(self.step, steps)
        return finished

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        cost, windowed = self._cost, self._windowed
        first, growth, steps = super().segment(chunks, pool)
        first += cost.window_ps(self._attended(chunks), windowed.context)
        if chunks:
            return first, 0, 1
        return first, growth + cost.window_ps(0, windowed.growing), windowed.alike(self.step, steps)

    def prompts_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        return super().prompts_ps(chunks) + self._cost.window_ps(self._attended(chunks), 0)

    def _attended(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        within = self._cost.within_window
        return sum([within(new, seq.computed) for seq, new in chunks])


class WindowedReplicas(ReplicatedBatch):
    """A decode batch of several replicas of attention, of a model in which layers have a window."""

    __slots__ = ("_windowed",)

    def __init__(self, cost: StepCost, block_size: int, replicas: int) -> None:
        super().__init__(cost, block_size, replicas)
        self._windowed = [WindowedContexts(cost.window) for _ in range(replicas)]

    def join(self, seq: Sequence, context: int) -> None:
        super().join(seq, context)
        self._windowed[seq.replica].join(seq)

    def leave(self, seq: Sequence) -> int:
        self._windowed[seq.replica].leave(seq, self.step)
        return super().leave(seq)

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        finished = super().ran(steps, pool)
        for windowed in self._windowed:
            windowed.ran(self.step, steps)
        return finished

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        cost = self._cost
        if chunks:
            return self._windowed_chunk_step_ps(chunks), 0, 1
        _, _, steps = DecodeBatch.segment(self, chunks, pool)
        running = []
        for size, context, windowed in zip(self._sizes, self._contexts, self._windowed, strict=True):
            if size:
                first = cost.own_sums_ps(0, 0, size, context) + cost.window_ps(0, windowed.context)
                running.append((first, cost.c2 * size + cost.window_ps(0, windowed.growing)))
                steps = windowed.alike(self.step, steps)
        return self._until_overtaken(running, steps)

    def _windowed_chunk_step_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        cost = self._cost
        within = [0] * len(self._sizes)
        for seq, new in chunks:
            within[seq.replica] += cost.within_window(new, seq.computed)
        slowest, tokens = 0, self.size + sum([new for _, new in chunks])
        for each, windowed, attended in zip(self._sums(chunks), self._windowed, within, strict=True):
            if each[0] or each[2]:
                slowest = max(slowest, cost.own_sums_ps(*each) + cost.window_ps(attended, windowed.context))
        return slowest + cost.experts_ps(tokens)

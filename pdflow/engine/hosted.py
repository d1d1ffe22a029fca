"""An engine whose steps can be delayed by its host, which waits for something else or is paused.

A step that runs is split from those that were planned behind it, so that it can end later than planned; these are
planned again when it has ended. Such a host may also load KV while a step runs: the end of a step with sequences that
load in it stays open until all of that has landed.
"""

from __future__ import annotations

from pdflow.cost.progression import boundary_after
from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.engine.engine import Engine
from pdflow.engine.layered import LayeredLoad
from pdflow.engine.log import StepLog
from pdflow.engine.noise import StepNoise
from pdflow.engine.sequence import Limits, Outcome, Sequence
from pdflow.memory.paged import PagedPool
from pdflow.protocol.values import Instant


class HostedEngine(Engine):
    """An engine whose current step can be frozen or stretched by its host."""

    __slots__ = ("_frozen_ps", "_least_end_ps")

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
        super().__init__(limits, cost, pool, exact, log, stalls, noise)
        self._frozen_ps = -1
        self._least_end_ps = 0
        """When a step that waits for KV may end, for other reasons."""

    @property
    def frozen(self) -> bool:
        return self._frozen_ps >= 0

    def freeze(self, now: Instant) -> list[Outcome]:
        """Stop the step that runs at `now` until `thaw`: its host waits for something first."""
        outcomes = self._split(now)
        self._frozen_ps = 0
        if self._steps:
            self._frozen_ps = max(0, self._start_ps + self._first_ps - now * PS_PER_NS)
            self._steps = self._planned_steps = 1
            self.wake_ns = None
        return outcomes

    def thaw(self, now: Instant) -> None:
        """Continue the frozen step: the rest of it runs from `now` on."""
        left, self._frozen_ps = self._frozen_ps, -1
        if self._steps:
            self._end_first_at(now * PS_PER_NS + left)
        elif self.wake_ns is not None or self._scheduler.running:
            self.wake_ns = now

    def stretch(self, now: Instant, until: Instant) -> list[Outcome]:
        """Delay the end of the step that runs at `now` to `until`, unless it ends later anyway. No effect without a
        step.

        The step becomes a segment of its own; what was planned behind it is planned again when it ends.
        """
        outcomes = self._split(now)
        if self._steps:
            self._end_first_at(max(self._start_ps + self._first_ps, until * PS_PER_NS))
        return outcomes

    def lengthen(self, now: Instant, ns: int) -> list[Outcome]:
        """Delay the end of the step that runs at `now` by `ns`, as `stretch` does. No effect without a step."""
        outcomes = self._split(now)
        if self._steps:
            self._end_first_at(self._start_ps + self._first_ps + ns * PS_PER_NS)
        return outcomes

    @property
    def awaits_layers(self) -> bool:
        """Whether the end of the running step is open, since it waits for KV."""
        return bool(self._scheduler.awaited)

    def next_boundary(self, now: Instant) -> Instant | None:
        """Return the first step boundary strictly after `now`; None also while the end of the step is open."""
        return None if self._scheduler.awaited else super().next_boundary(now)

    def awaits(self, seq: Sequence) -> bool:
        """Whether the running step waits for the KV of this sequence."""
        return seq in self._scheduler.awaited

    def wait_no_more(self, seq: Sequence, now: Instant, load: LayeredLoad | None) -> None:
        """Take note that all KV of a sequence that the running step waits for is in blocks, or that the sequence needs
        none. When that holds for all of them, the step ends as `load`, the copies that were made, lets it."""
        awaited = self._scheduler.awaited
        awaited.remove(seq)
        if awaited:
            return
        step_ps = self._first_ps
        end_ps = self._start_ps + step_ps if load is None else load.end_ps(self._start_ps, step_ps)
        now_ps = now * PS_PER_NS
        if self.frozen:
            self._frozen_ps = max(self._frozen_ps, end_ps - now_ps)
        else:
            self._end_first_at(max(end_ps, self._least_end_ps, now_ps))
        self._least_end_ps = 0

    def _await_layers(self) -> None:
        self._steps = self._planned_steps = 1
        self._end_ps = self._planned_end_ps = self._start_ps + self._first_ps
        self.wake_ns = None

    def _split(self, now: Instant) -> list[Outcome]:
        """End the segment before the step that runs at `now`, which begins a new segment."""
        start, first, delta = self._start_ps, self._first_ps, self._delta_ps
        if self._steps <= 1 or not first:
            return []
        begun, _ = boundary_after(start, first, delta, now * PS_PER_NS)
        done = min(begun, self._steps) - 1
        if done < 1:
            return []
        self._steps = self._planned_steps = done
        self._end_ps = self._planned_end_ps = end = start + done * first + delta * (done * (done - 1) // 2)
        self.wake_ns = self._planned_wake_ns = -(-end // PS_PER_NS)
        return self.advance(now)

    def _end_first_at(self, end: int) -> None:
        """Cut the segment to its first step, and let that end at `end`, or later where it waits for KV."""
        if self._scheduler.awaited:
            self._least_end_ps = end
            return
        would_end_ns = -(-(self._start_ps + self._first_ps) // PS_PER_NS)
        self._steps = self._planned_steps = 1
        self._first_ps = end - self._start_ps
        self._end_ps = self._planned_end_ps = end
        self.wake_ns = self._planned_wake_ns = end_ns = -(-end // PS_PER_NS)
        scheduler = self._scheduler
        for seq in (*scheduler.fresh, *(seq for seq, _ in scheduler.chunks)):
            if seq.first_token_ns == would_end_ns:
                seq.first_token_ns = end_ns

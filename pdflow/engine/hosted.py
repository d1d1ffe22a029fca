"""An engine whose steps can be delayed by its host, which waits for something else or is paused.

A step that runs is split from those that were planned behind it, so that it can end later than planned; these are
planned again when it has ended.
"""

from __future__ import annotations

from pdflow.cost.progression import boundary_after
from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.engine.engine import Engine
from pdflow.engine.log import StepLog
from pdflow.engine.noise import StepNoise
from pdflow.engine.sequence import Limits, Outcome
from pdflow.memory.paged import PagedPool
from pdflow.protocol.values import Instant


class HostedEngine(Engine):
    """An engine whose current step can be frozen or stretched by its host."""

    __slots__ = ("_frozen_ps",)

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
        elif self.wake_ns is not None:
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
        """Cut the segment to its first step, and let that end at `end`."""
        would_end_ns = -(-(self._start_ps + self._first_ps) // PS_PER_NS)
        self._steps = self._planned_steps = 1
        self._first_ps = end - self._start_ps
        self._end_ps = self._planned_end_ps = end
        self.wake_ns = self._planned_wake_ns = end_ns = -(-end // PS_PER_NS)
        scheduler = self._scheduler
        for seq in (*scheduler.fresh, *(seq for seq, _ in scheduler.chunks)):
            if seq.first_token_ns == would_end_ns:
                seq.first_token_ns = end_ns

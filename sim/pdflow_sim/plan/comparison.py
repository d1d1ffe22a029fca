"""Which of two designs is better, and how sure that is: by rates of the same seeds, in pairs, and by the cost model."""

from __future__ import annotations

import math
from typing import Final

import attrs

from pdflow.results.figures.intervals import of_mean
from pdflow.scenario.costs.error_bars import step_time_error
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.plan.search import Goal, MeasuredDesign

RESOLUTION: Final = 0.02
"""Rates are searched no finer."""
UNCOMPARED_ERROR: Final = 0.25
"""The error of step times that is assumed where none is known, one way or the other."""


@attrs.frozen
class DesignComparison:
    """How much more one design is worth than another: 1.4 is 40 % more. `low` and `high` bound the mean over all seeds
    with 95 % confidence, None of a single seed; `step_error` is the half width of the cost model's error bar."""

    better: MeasuredDesign
    other: MeasuredDesign
    ratio: float
    low: float | None
    high: float | None
    step_error: float

    @property
    def tied_by_seeds(self) -> bool:
        """Whether other seeds could turn the order."""
        return self.ratio < 1 + RESOLUTION or (self.low is not None and self.low <= 1.0)

    @property
    def tied_by_costs(self) -> bool:
        """Whether step times that are as wrong as they may be could turn the order."""
        return self.ratio < 1 + self.step_error

    @property
    def tied(self) -> bool:
        """Whether the two are to be called a tie."""
        return self.tied_by_seeds or self.tied_by_costs


def compare(one: MeasuredDesign, other: MeasuredDesign, goal: Goal, step_error: float = 0.0) -> DesignComparison | None:
    """Compare two designs, the better one first in the answer; None if neither meets the service level at any rate."""
    pairs = list(zip(one.rates, other.rates, strict=False))
    mine, theirs = (goal.worth(it.design, it.rate) for it in (one, other))
    if mine == theirs == 0:
        return None
    if mine == 0 or theirs == 0:
        better, worse = (one, other) if theirs == 0 else (other, one)
        return DesignComparison(better, worse, math.inf, None, None, step_error)
    logs = [math.log(goal.worth(one.design, a) / goal.worth(other.design, b)) for a, b in pairs if a > 0 and b > 0]
    interval = of_mean(logs) if len(logs) == len(pairs) else None
    log_ratio = math.log(mine / theirs) if interval is None else math.fsum(logs) / len(logs)
    if log_ratio < 0:
        return compare(other, one, goal, step_error)
    low, high = (None, None) if interval is None else (math.exp(interval.low), math.exp(interval.high))
    return DesignComparison(one, other, math.exp(log_ratio), low, high, step_error)


def step_error_of(*scenarios: ResolvedScenario) -> tuple[float, list[str]]:
    """Return the half width of the widest error bar of these clusters' step times, and the GPUs whose steps were never
    compared with a measurement."""
    widest, unknown = 0.0, []
    for scenario in scenarios:
        for pool in scenario.pools:
            error = step_time_error(scenario.model, pool)
            if error is None:
                unknown.append(f"{scenario.model.name} on {pool.gpu.name}, {pool.gpus_per_engine} GPUs an engine")
            low, high = error or (-UNCOMPARED_ERROR, UNCOMPARED_ERROR)
            widest = max(widest, (high - low) / 2)
    return widest, list(dict.fromkeys(unknown))

"""Fit of the canonical step cost to steps whose duration is known, and its errors.

Every coefficient is at least 0 and L(T) never decreases: a step with more in it never takes less. Within that, the sum
of the squared relative errors is least (non-negative least squares, Lawson and Hanson 1974), so that short steps count
as much as long ones. Where steps that prefill and steps that decode could share a cost or each have their own, they
share it, in L: weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import attrs
import numpy as np

from pdflow.cost.step import PS_PER_S, LinearTable, LinearTime, StepCost

OWN: Final = ("hp", "a1", "a2", "c0", "c1", "c2", "hw")
RELUCTANCE: Final = 1e-3
"""Penalty on a coefficient beside L, against 1 of a relative error: enough to decide between equals."""


@attrs.frozen
class Step:
    """A measured step: the sums of `pdflow.cost.step`, its duration, and `waking`: whether it was the first step of an
    engine that stood still."""

    prefill_tokens: int
    attended: int
    decodes: int
    context: int
    seconds: float
    waking: bool = False

    def predicted_s(self, cost: StepCost) -> float:
        """Return the duration of this step according to `cost`, in seconds."""
        sums = cost.step_sums_ps(self.prefill_tokens, self.attended, self.decodes, self.context)
        return (sums + cost.hw * self.waking) / PS_PER_S


@attrs.frozen
class Misfit:
    """The errors of a cost: median, p95 and largest of |predicted / measured - 1|; the mean of the signed errors."""

    median: float
    p95: float
    max: float
    bias: float


def prompt_step(prompts: int, new: int, seconds: float, prefix: int = 0) -> Step:
    """Return a step that prefills `new` tokens behind `prefix` others, of each of `prompts` prompts."""
    return Step(prompts * new, prompts * (new * prefix + new * (new + 1) // 2), 0, 0, seconds)


def decode_step(decodes: int, context: int, seconds: float) -> Step:
    """Return a step that decodes one token of each of `decodes` sequences of the same context."""
    return Step(0, 0, decodes, decodes * context, seconds)


def fitted(steps: Sequence[Step], knots: Sequence[int], held_against: Sequence[float] | None = None) -> StepCost:
    """Fit the cost nearest to these steps, its L(T) straight between `knots` (1 first); without knots there is no L.

    An error is relative to the duration of its step; or to that of `held_against`, in seconds: where many steps are
    alike and their durations spread, the cost is then their mean, and else below it.

    Knots after the first count only where some step lies: nothing would determine the others. The provenance is left
    empty. Raises ValueError if fewer than two of the knots count.
    """
    seen = {step.prefill_tokens + step.decodes for step in steps}
    knots = [*knots[:1], *(knot for knot in knots[1:] if knot in seen)]
    seconds = np.array([step.seconds for step in steps])
    scale = seconds if held_against is None else np.array(held_against)
    columns = np.array([_row(step, knots) for step in steps]) / scale[:, None]
    size = np.linalg.norm(columns, axis=0)
    size[size == 0] = 1.0
    reluctant = np.zeros((len(OWN), columns.shape[1]))
    reluctant[:, -len(OWN) :] = np.eye(len(OWN)) * RELUCTANCE
    found = _non_negative(np.vstack([columns / size, reluctant]), np.concatenate([seconds / scale, np.zeros(len(OWN))]))
    values = found / size * PS_PER_S
    times = tuple(round(ps) for ps in np.cumsum(values[: len(knots)]).tolist())
    own = {name: round(value) for name, value in zip(OWN, values[len(knots) :].tolist(), strict=True)}
    return StepCost(**own, linear=LinearTable(tokens=tuple(knots), ps=times) if knots else LinearTime())


def misfit(cost: StepCost, steps: Sequence[Step]) -> Misfit:
    """Return the errors of a cost against measured steps."""
    errors = np.array([step.predicted_s(cost) / step.seconds for step in steps])
    errors -= 1.0
    off = np.abs(errors)
    return Misfit(*(float(value) for value in (np.median(off), np.quantile(off, 0.95), off.max(), errors.mean())))


def _row(step: Step, knots: Sequence[int]) -> list[float]:
    """Return the factor of each unknown in this step: the rises of L from knot to knot, then those of OWN."""
    tokens = step.prefill_tokens + step.decodes
    rises = [1.0] if knots else []
    for low, high in pairwise(knots):
        share = (tokens - low) / (high - low)
        rises.append(max(0.0, share if high == knots[-1] else min(1.0, share)))
    prefills, decodes = float(step.prefill_tokens > 0), float(step.decodes > 0)
    return [*rises, prefills, step.prefill_tokens, step.attended, decodes, step.decodes, step.context, step.waking]


def _non_negative(matrix: Any, target: Any) -> Any:
    """The x >= 0 that makes |matrix x - target| least: Lawson and Hanson's active sets."""
    unknowns = matrix.shape[1]
    x, free = np.zeros(unknowns), np.zeros(unknowns, dtype=bool)
    for _ in range(10 * unknowns):
        pull = matrix.T @ (target - matrix @ x)
        pull[free] = -np.inf
        best = int(np.argmax(pull))
        if pull[best] <= 1e-10:
            break
        free[best] = True
        while True:
            trial = np.zeros(unknowns)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            x += (trial - x) * float(np.min(x[below] / (x[below] - trial[below] + 1e-300)))
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    return x

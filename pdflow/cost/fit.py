"""Coefficients of the canonical form from steps whose duration is known, and how far off they are.

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
"""What a coefficient beside L costs, against one of a relative error's: enough to decide between equals."""


@attrs.frozen
class Step:
    """One step that was measured: the sums of `pdflow.cost.step`, what it took, and whether it was `waking`: the first
    of an engine that stood still."""

    prefill_tokens: int
    attended: int
    decodes: int
    context: int
    seconds: float
    waking: bool = False

    def predicted_s(self, cost: StepCost) -> float:
        """What it takes by that cost."""
        sums = cost.step_sums_ps(self.prefill_tokens, self.attended, self.decodes, self.context)
        return (sums + cost.hw * self.waking) / PS_PER_S


@attrs.frozen
class Misfit:
    """Of |predicted / measured - 1| the median, p95 and largest; the mean of the signed errors."""

    median: float
    p95: float
    max: float
    bias: float


def prompt_step(prompts: int, new: int, seconds: float, prefix: int = 0) -> Step:
    """A step that prefills `new` tokens behind `prefix` others, of each of some prompts."""
    return Step(prompts * new, prompts * (new * prefix + new * (new + 1) // 2), 0, 0, seconds)


def decode_step(decodes: int, context: int, seconds: float) -> Step:
    """A step that decodes one token each of sequences of one context."""
    return Step(0, 0, decodes, decodes * context, seconds)


def fitted(steps: Sequence[Step], knots: Sequence[int], held_against: Sequence[float] | None = None) -> StepCost:
    """The cost nearest to these steps, its L(T) straight between `knots` (1 first); without knots there is no L.

    An error is relative to what a step took; or to `held_against`, in seconds, of each: where many steps are alike and
    what they took is spread, the cost is then their mean, and else below it.

    Of the knots after the first those count at which some step lies: nothing would hold the others. Says nothing of its
    provenance. Raises ValueError if fewer than two of the knots count.
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
    """How far a cost is from steps that were measured."""
    errors = np.array([step.predicted_s(cost) / step.seconds for step in steps])
    errors -= 1.0
    off = np.abs(errors)
    return Misfit(*(float(value) for value in (np.median(off), np.quantile(off, 0.95), off.max(), errors.mean())))


def _row(step: Step, knots: Sequence[int]) -> list[float]:
    """What each unknown is multiplied by: the rises of L from knot to knot, then those of OWN."""
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

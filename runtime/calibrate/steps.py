"""Step times of a pool's engines, as they were noted, in the canonical form of `pdflow.cost.step`.

What disturbs a step, another process on its core above all, makes it longer and never shorter, and often: so steps of
one composition count as one, with the median of what they took. Contexts grow by a token with every step; those within
a tenth are taken for one. Half of the steps are kept out, to say how near the fit is to steps that it has not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import log
from statistics import fmean, median
from typing import Final

import attrs

from pdflow.cost.fit import Misfit, Step, fitted, misfit
from pdflow.cost.step import StepCost
from pdflow.protocol.values import S
from runtime.diary import Stepped

ALIKE: Final = 0.1
KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Where L(T) may bend; what counts is where steps were seen."""
MOST_TIMES: Final = 5
"""What a kind that was seen often weighs, against one that was seen once."""
ENOUGH: Final = 8
"""Compositions, below which nothing is fitted."""


class TooFewStepsError(ValueError):
    """Nothing could be said of this pool."""


@attrs.frozen
class StepFit:
    cost: StepCost
    kept_out: Misfit
    steps: int
    kinds: int
    """Compositions that the steps were of."""


def fit_steps(noted: Sequence[Stepped]) -> StepFit:
    """TooFewStepsError if there is not enough to go by."""
    kinds = compositions(noted)
    if len(kinds) < ENOUGH:
        raise TooFewStepsError(f"its engines have made steps of {len(kinds)} kinds, and {ENOUGH} are needed")
    seen = sorted({step.prefill_tokens + step.decodes for step in kinds})
    knots = _knots(seen)
    cost = fitted(compositions(noted[::2], MOST_TIMES), knots)
    kept_out = misfit(cost, compositions(noted[1::2]))
    return StepFit(fitted(compositions(noted, MOST_TIMES), knots), kept_out, len(noted), len(kinds))


def compositions(noted: Iterable[Stepped], times: int = 1) -> list[Step]:
    """Steps of one kind as one; or as many as they were, up to so many times, so that they weigh more."""
    kinds: defaultdict[tuple[int, ...], list[Stepped]] = defaultdict(list)
    for step in noted:
        alike = tuple(round(log(total) / ALIKE) if total else -1 for total in (step.attended, step.context))
        kinds[step.prefill_tokens, step.decodes, *alike].append(step)
    return [step for steps in kinds.values() for step in [_typical(steps)] * min(len(steps), times)]


def _typical(steps: Sequence[Stepped]) -> Step:
    one = steps[0]
    attended, context = (round(fmean(getattr(step, total) for step in steps)) for total in ("attended", "context"))
    return Step(one.prefill_tokens, attended, one.decodes, context, median(step.lasted_ns for step in steps) / S)


def _knots(seen: Sequence[int]) -> list[int]:
    """Of the sizes that were seen those next to KNOTS, from 1 on, so that a straight line is never drawn far."""
    near = {min(seen, key=lambda size: abs(log(size / knot))) for knot in KNOTS if knot <= 2 * seen[-1]}
    return sorted({1, *near})

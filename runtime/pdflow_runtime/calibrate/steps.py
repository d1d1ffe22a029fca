"""The step times of a pool's engines, as they were noted, in the canonical form of `pdflow.cost.step`.

What disturbs a step, another process on its core above all, makes it longer and never shorter. So a first fit is to
medians, of steps that were made of the same; contexts grow by a token with every step, those within a tenth are taken
for one. The first step of an engine that stood still is another: its caches are cold. By that fit steps are known that
were disturbed beyond measure. The second fit is to all of them, each taken for no longer than twice what the first one
says: in the mean it is right for such traffic, which is what queues are made of. Half of the steps are kept out, to say
how near a fit is to steps that it has not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import log
from statistics import fmean, median
from typing import Final, NamedTuple

import attrs

from pdflow.cost.fit import Misfit, Step, fitted, misfit
from pdflow.cost.step import StepCost
from pdflow.protocol.values import S
from pdflow_runtime.observe.event_log import Page, Stepped

ALIKE: Final = 0.1
KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Where L(T) may bend; what counts is where steps were seen."""
ENOUGH: Final = 8
"""Kinds of steps, below which nothing is fitted."""
STILL_NS: Final = 50_000
"""An engine that pauses longer between two steps was idle."""
FARTHEST: Final = 2.0
"""Beyond so many times what it ought to take, a step says nothing but that it was disturbed."""


class TooFewStepsError(ValueError):
    """The steps of a pool are of too few kinds for a fit."""


@attrs.frozen
class StepFit:
    cost: StepCost
    kept_out: Misfit
    steps: int
    kinds: int
    """The number of kinds among them."""


class ObservedStep(NamedTuple):
    """A step, and whether its engine was idle before it."""

    step: Stepped
    waking: bool


def steps_seen(pages: Iterable[Page]) -> list[ObservedStep]:
    """Return the steps of all engines, those of each in their order."""
    found = []
    for page in pages:
        ended = None
        for step in page.notes:
            if isinstance(step, Stepped):
                found.append(ObservedStep(step, ended is None or step.t - ended > STILL_NS))
                ended = step.t + step.lasted_ns
    return found


def fit_steps(noted: Sequence[ObservedStep]) -> StepFit:
    """Fit a cost to the steps. TooFewStepsError if they are of too few kinds."""
    kinds = compositions(noted)
    if len(kinds) < ENOUGH:
        raise TooFewStepsError(
            f"its engines ran steps of {len(kinds)} different sizes; {ENOUGH} are needed: measure for longer"
        )
    kept_out = misfit(_fit(noted[::2]), compositions(noted[1::2]))
    return StepFit(_fit(noted), kept_out, len(noted), len(kinds))


def _fit(noted: Sequence[ObservedStep]) -> StepCost:
    kinds = compositions(noted)
    knots = _knots(sorted({step.prefill_tokens + step.decodes for step in kinds}))
    first = fitted(kinds, knots)
    steps, expected = [], []
    for one, waking in noted:
        step = Step(one.prefill_tokens, one.attended, one.decodes, one.context, one.lasted_ns / S, waking)
        seconds = step.predicted_s(first)
        if seconds:
            steps.append(attrs.evolve(step, seconds=min(step.seconds, FARTHEST * seconds)))
            expected.append(seconds)
    return fitted(steps, knots, expected)


def compositions(noted: Iterable[ObservedStep]) -> list[Step]:
    """Group the steps that consist of the same work; return one typical step for each group."""
    kinds: defaultdict[tuple[int, ...], list[Stepped]] = defaultdict(list)
    for step, waking in noted:
        alike = tuple(round(log(total) / ALIKE) if total else -1 for total in (step.attended, step.context))
        kinds[waking, step.prefill_tokens, step.decodes, *alike].append(step)
    return [_typical(steps, bool(kind[0])) for kind, steps in kinds.items()]


def _typical(steps: Sequence[Stepped], waking: bool) -> Step:
    one = steps[0]
    attended, context = (round(fmean(getattr(step, total) for step in steps)) for total in ("attended", "context"))
    seconds = median(step.lasted_ns for step in steps) / S
    return Step(one.prefill_tokens, attended, one.decodes, context, seconds, waking)


def _knots(seen: Sequence[int]) -> list[int]:
    """Return the observed sizes that are nearest to KNOTS, from 1 on, so that no line is drawn far beyond the data."""
    near = {min(seen, key=lambda size: abs(log(size / knot))) for knot in KNOTS if knot <= 2 * seen[-1]}
    return sorted({1, *near})

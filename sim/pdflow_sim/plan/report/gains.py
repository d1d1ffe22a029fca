"""What the levers gain, as bars: the largest first, without those that gain nothing."""

from __future__ import annotations

from typing import Final

from pdflow.results.page.bars import BarChart, NamedShare
from pdflow.results.page.picture import Picture
from pdflow_sim.plan.levers import LeverResult, gain_text
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.report.runs import WIDTH

_NOTHING: Final = 0.005
"""A gain that rounds to 0 %."""


def gaining(outcome: PlanOutcome) -> list[LeverResult]:
    """Return the levers with a gain or a loss, the largest gain first."""
    return sorted((it for it in outcome.levers if abs(it.gain) >= _NOTHING), key=lambda it: -it.gain)


def without_gain(outcome: PlanOutcome) -> list[LeverResult]:
    """Return the levers without any."""
    return [it for it in outcome.levers if abs(it.gain) < _NOTHING]


def gains_chart(outcome: PlanOutcome) -> Picture | None:
    """Draw the gain of each lever that has one; None if none has."""
    levers, others = gaining(outcome), len(without_gain(outcome))
    if not levers:
        return None
    bars = [NamedShare(it.lever.name, it.gain, gain_text(it.gain)) for it in levers]
    by_scale = any(it.scale is not None for it in levers)
    unit = "gain in the factor by which bounds are missed" if by_scale else "gain in the highest rate"
    unit += f"; {others} other{'s' if others > 1 else ''}: none" if others else ""
    texts = ", ".join(f"{bar.name} {bar.text}" for bar in bars)
    return BarChart(bars, WIDTH, unit).picture(f"{unit[0].upper()}{unit[1:]} with one change: {texts}.")

"""The share of requests that meet all bounds, against the rate: the best design of each kind, with all its seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs

from pdflow.results import formatting
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.results.page.chart import Axis, Chart, Point
from pdflow.results.page.legend import Entry, Legend
from pdflow.results.page.markup import Html
from pdflow.results.page.picture import Picture
from pdflow_sim.plan.options import KINDS
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.probes import DesignProbe, ProbeResult
from pdflow_sim.plan.report.runs import (
    HEIGHT,
    WIDTH,
    cell_of,
    hollow_entry,
    rate_text,
    run_hint,
    unchanged_runs,
    whole_runs,
)
from pdflow_sim.plan.search import MeasuredDesign
from pdflow_sim.plan.verdict import PER_S

BySeed: TypeAlias = Mapping[int, Sequence[Point]]
"""The (rate, share) of each run by its seed's number, the lowest rate first."""


@attrs.frozen
class AttainmentCurve:
    """A design, its longest runs, and the mean share over its seeds."""

    row: MeasuredDesign
    runs: Sequence[tuple[DesignProbe, ProbeResult]]
    mean: Sequence[Point]


def attainment_curves(outcome: PlanOutcome) -> list[AttainmentCurve]:
    """Return the curve of the best design of each kind."""
    curves = []
    for kind in KINDS:
        row = outcome.best_of(kind)
        if row is None:
            continue
        mine = [
            (probe, it)
            for probe, it in unchanged_runs(outcome)
            if probe.design == row.design and it.figures.get("slo_attainment") is not None
        ]
        runs = whole_runs(outcome, mine, lambda run: run[0])
        if runs:
            by_seed: dict[int, list[Point]] = {}
            for probe, it in sorted(runs, key=lambda run: run[0].rate):
                by_seed.setdefault(probe.nth, []).append((probe.rate, it.figures["slo_attainment"]))
            curves.append(AttainmentCurve(row, runs, mean_over_seeds(by_seed)))
    return curves


def mean_over_seeds(by_seed: BySeed) -> list[Point]:
    """Return the mean over all seeds, as far as each has a run at that rate or a higher one.

    Between two runs of a seed its share is interpolated. Below its lowest rate it is taken to be what it is there: the
    share falls with the rate, so it is hardly lower.
    """
    last = min(points[-1][0] for points in by_seed.values())
    rates = sorted({rate for points in by_seed.values() for rate, _ in points if rate <= last})
    return [(rate, sum(_at(points, rate) for points in by_seed.values()) / len(by_seed)) for rate in rates]


def _at(points: Sequence[Point], rate: float) -> float:
    if rate <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if rate <= high:
            return before + (after - before) * (rate - low) / (high - low)
    return points[-1][1]


def required_share(level: ServiceLevel) -> float | None:
    """Return the share of requests that must meet all bounds; None if the service level does not demand one.

    A single bound on a percentile of requests demands just that share. Several demand none: different requests may miss
    each.
    """
    if level.attainment is not None:
        return level.attainment / 100
    if len(level.bounds) == 1 and level.bounds[0].latency != "itl" and level.bounds[0].percentile is not None:
        return level.bounds[0].percentile / 100
    return None


def attainment_chart(outcome: PlanOutcome) -> Picture | None:
    """Draw the curves, the required share and the rate to serve; None if there is no run to draw."""
    curves = attainment_curves(outcome)
    if not curves:
        return None
    own = outcome.wanted_rate or outcome.traffic.rate
    rates = [own, *(probe.rate for curve in curves for probe, _ in curve.runs)]
    shares = [it.figures["slo_attainment"] for curve in curves for _, it in curve.runs]
    required = required_share(outcome.level)
    axis = Axis.around(min(rates), max(rates))
    kinds = [curve.row.design.kind for curve in curves]
    entries = [_entry(curve) for curve in curves]
    if any(not it.meets for curve in curves for _, it in curve.runs):
        entries.append(hollow_entry(kinds))
    asked = f"{'rate asked for' if outcome.wanted_rate else 'rate of the scenario'}: {rate_text(own)}"
    entries.append(Entry(asked, bound="x"))
    described = [asked]
    if required is not None:
        described.append(f"required share: {formatting.percent(required)}")
        entries.append(Entry(described[-1], bound="y"))
    chart = Chart(
        axis,
        Axis(_floor(min([*shares, *([] if required is None else [required])])), 1),
        HEIGHT,
        f"{PER_S}{'; log scale' if axis.log else ''}",
        percent=True,
        y_unit="share of requests that meet all bounds",
        legend=Legend(entries, WIDTH),
        width=WIDTH,
    )
    drawn = [chart.bound(own), *([] if required is None else [chart.level(required)])]
    for curve in curves:
        kind = curve.row.design.kind
        drawn += _marks(chart, outcome, curve)
        if len(curve.mean) > 1:
            drawn.append(chart.line(curve.mean, kind))
        described.append(f"{curve.row.design.text}: {_described(curve, outcome)}")
    return chart.drawing(drawn, f"Share of requests that meet all bounds, by rate. {'; '.join(described)}.")


def _marks(chart: Chart, outcome: PlanOutcome, curve: AttainmentCurve) -> list[Html]:
    drawn: dict[tuple[object, ...], Html] = {}
    for probe, it in curve.runs:
        share = it.figures["slo_attainment"]
        key = it.meets, cell_of(chart.project((probe.rate, share)))
        if key not in drawn:
            hint = f"{run_hint(outcome, probe, it)}; {formatting.percent(share)} of requests meet all bounds"
            drawn[key] = chart.mark((probe.rate, share), probe.design.kind, hollow=not it.meets, hint=hint)
    return list(drawn.values())


def _floor(share: float) -> float:
    """Return where the axis begins: a fifth or more below which nothing is drawn is left out."""
    return math.floor(share * 5 - 1e-9) / 5 if share > 0 else 0.0


def _entry(curve: AttainmentCurve) -> Entry:
    kind = curve.row.design.kind
    return Entry(f"{kind}: {curve.row.design.shape_text}", (kind,), line=kind if len(curve.mean) > 1 else None)


def _described(curve: AttainmentCurve, outcome: PlanOutcome) -> str:
    ends = [curve.mean[0], curve.mean[-1]] if len(curve.mean) > 1 else list(curve.mean)
    return ", ".join(f"{formatting.percent(share)} at {rate_text(rate)}" for rate, share in ends)

"""The Pareto frontier: tokens per second of a GPU against tokens per second of a user, a point for each run.

Short runs carry higher rates than whole ones, so a frontier is that of the longest runs of its kind that meet the
service level; shorter ones are drawn as small marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from pdflow.results import formatting
from pdflow.results.page.chart import Axis, Chart, Point
from pdflow.results.page.legend import RADIUS, SMALL, Entry, Legend
from pdflow.results.page.markup import Html
from pdflow.results.page.picture import Picture
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.options import Kind
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.probes import DesignProbe, ProbeResult
from pdflow_sim.plan.report.runs import (
    HEIGHT,
    WIDTH,
    cell_of,
    hollow_entry,
    kinds_in,
    run_hint,
    unchanged_runs,
    whole_runs,
)

_FIGURES: Final = ("output_tokens_per_s", "tpot_mean_ms")


@attrs.frozen
class RunPoint:
    """A run, and its point: tokens per second of a user, and of a GPU."""

    probe: DesignProbe
    found: ProbeResult
    at: Point

    @property
    def kind(self) -> Kind:
        """The kind of its design."""
        return self.probe.design.kind


def speeds(design: Design, figures: Mapping[str, Any]) -> Point | None:
    """Return the tokens per second of a user and of a GPU; None of a run that completed nothing."""
    tokens, tpot = figures.get("output_tokens_per_s"), figures.get("tpot_mean_ms")
    return (1000 / tpot, tokens / design.gpus) if tokens and tpot else None


def run_points(outcome: PlanOutcome) -> list[RunPoint]:
    """Return the runs that have a point."""
    found = ((probe, it, speeds(probe.design, it.figures)) for probe, it in unchanged_runs(outcome))
    return [RunPoint(probe, it, at) for probe, it, at in found if at is not None]


def frontiers(outcome: PlanOutcome, points: Sequence[RunPoint]) -> dict[Kind, list[Point]]:
    """Return, by kind, the best points of the whole runs that meet the service level, the fastest for a user last."""
    found: dict[Kind, list[Point]] = {}
    for kind in kinds_in(it.kind for it in points):
        mine = [it for it in points if it.kind == kind and it.found.meets]
        best = _undominated(it.at for it in whole_runs(outcome, mine, lambda it: it.probe))
        if best:
            found[kind] = best
    return found


def _undominated(points: Iterable[Point]) -> list[Point]:
    best: list[Point] = []
    for point in sorted(points, reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def frontier_chart(outcome: PlanOutcome) -> Picture | None:
    """Draw the runs, the frontier of each kind, and the recommended design; None if no run has a point."""
    points = run_points(outcome)
    if not points:
        return None
    best = outcome.best
    chosen = None if best is None else speeds(best.design, {name: best.figure(name) for name in _FIGURES})
    shown = [it.at for it in points] + ([] if chosen is None else [chosen])
    whole = outcome.traffic.requests
    kinds = kinds_in(it.kind for it in points)
    lines = frontiers(outcome, points)
    entries = [
        Entry(f"{kind}, and its frontier", (kind,), line=kind) if kind in lines else Entry(kind, (kind,))
        for kind in kinds
    ]
    if any(not it.found.meets for it in points):
        entries.append(hollow_entry(kinds))
    if any(it.probe.requests < whole for it in points):
        entries.append(Entry("shorter runs", tuple(kinds), small=True))
    name = "" if best is None else f"{'recommended' if outcome.meets else 'the nearest'}: {best.design.shape_text}"
    if chosen is not None:
        entries.append(Entry(name, ringed=True))
    chart = Chart(
        Axis.up_to(max(x for x, _ in shown)),
        Axis.up_to(max(y for _, y in shown)),
        HEIGHT,
        "output tokens/s of a user (1000 / mean TPOT in ms)",
        y_unit="output tokens/s of a GPU",
        legend=Legend(entries, WIDTH),
        width=WIDTH,
    )
    drawn = [*_marks(chart, outcome, points), *(chart.line(_stairs(chart, line), kind) for kind, line in lines.items())]
    described = [f"{len(points):,} runs", *(_described(kind, line) for kind, line in lines.items())]
    if chosen is not None:
        drawn.append(chart.ring(chosen, name))
        described.append(f"{name} at {_at(chosen)}")
    return chart.drawing(drawn, f"Output tokens per second of a GPU against those of a user. {'; '.join(described)}.")


def _marks(chart: Chart, outcome: PlanOutcome, points: Sequence[RunPoint]) -> list[Html]:
    """Draw the runs: short ones and those that miss below the others."""
    whole = outcome.traffic.requests
    drawn: dict[tuple[object, ...], Html] = {}
    for it in sorted(points, key=lambda it: (it.probe.requests >= whole, it.found.meets)):
        short, hollow = it.probe.requests < whole, not it.found.meets
        key = it.kind, short, hollow, cell_of(chart.project(it.at))
        if key not in drawn:
            hint = f"{run_hint(outcome, it.probe, it.found)}; {_at(it.at)}"
            radius = SMALL if short else RADIUS
            drawn[key] = chart.mark(it.at, it.kind, radius=radius, hollow=hollow, hint=hint)
    return list(drawn.values())


def _stairs(chart: Chart, line: Sequence[Point]) -> list[Point]:
    """Return the edge of the area in which some point of the line is at least as good both ways."""
    corners = [(0.0, line[0][1])]
    for x, y in {cell_of(chart.project(point)): point for point in line}.values():
        corners += [(corners[-1][0], y), (x, y)]
    return [*corners, (line[-1][0], 0.0)]


def _described(kind: Kind, line: Sequence[Point]) -> str:
    return f"frontier of {kind} designs from {_at(line[0])} to {_at(line[-1])}"


def _at(point: Point) -> str:
    return f"{formatting.number(point[1])} tokens/s of a GPU and {formatting.number(point[0])} of a user"

"""The runs of a plan that charts show, and what all charts say of a run in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from pdflow.results import formatting
from pdflow.results.page.chart import Point
from pdflow.results.page.legend import Entry
from pdflow_sim.plan.options import KINDS, Kind
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.probes import UNCHANGED, DesignProbe, ProbeResult
from pdflow_sim.plan.verdict import PER_S

T = TypeVar("T")

WIDTH: Final = 360
"""A chart's width in units: about the pixels of a telephone, so that its text is as large there as it was drawn."""
HEIGHT: Final = 270
_CELL: Final = 2.0


def unchanged_runs(outcome: PlanOutcome) -> Iterator[tuple[DesignProbe, ProbeResult]]:
    """Yield the runs of designs as they are on at most the plan's GPUs: without faults and levers."""
    for probe, found in outcome.probes.items():
        if probe.change == UNCHANGED and found.error is None and probe.design.gpus <= outcome.gpus:
            yield probe, found


def rate_text(rate: float) -> str:
    """Return a rate with its unit."""
    return f"{formatting.number(rate)} {PER_S}"


def whole_runs(outcome: PlanOutcome, runs: Sequence[T], probe_of: Callable[[T], DesignProbe]) -> list[T]:
    """Return the runs that have as many requests as a whole run; or the longest, if none has."""
    longest = max((probe_of(run).requests for run in runs), default=0)
    return [run for run in runs if probe_of(run).requests >= min(longest, outcome.traffic.requests)]


def run_hint(outcome: PlanOutcome, probe: DesignProbe, found: ProbeResult) -> str:
    """Return a run in words: what was run, and whether it met the service level."""
    met = "meets the service level" if found.meets else "misses the service level"
    rate = rate_text(probe.rate)
    seed = outcome.scenario.seed + probe.nth
    return f"{probe.design.text}: {rate}, seed {seed}, {probe.requests:,} requests; {met}"


def cell_of(position: Point) -> tuple[int, int]:
    """Return the cell of a picture that a position is in. Of marks that look the same, one in each cell is drawn, so
    that a page stays small."""
    return round(position[0] / _CELL), round(position[1] / _CELL)


def kinds_in(kinds: Iterable[Kind]) -> list[Kind]:
    """Return the kinds that occur, in their usual order."""
    found = set(kinds)
    return [kind for kind in KINDS if kind in found]


def hollow_entry(kinds: Iterable[Kind]) -> Entry:
    """Return the legend's entry of runs that miss the service level."""
    return Entry("misses the service level", tuple(kinds), hollow=True)

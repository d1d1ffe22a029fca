"""The differences between two runs' figures, each with how sure it is.

A figure is worked out as a run's own report does. Of two single runs, latencies, stages and the share that met the SLO
belong to single requests, so their differences have an interval (`intervals` says what it means); a rate belongs to the
whole run, of which there is one, so it has none. Of several seeds on both sides every figure is a mean over runs, and
its difference has the interval of independent runs, of pairs where the seeds are the same. Against a single run
nothing can be said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import numpy as np

from pdflow.results.comparison.runs import OneRun, Runs, SeedRuns
from pdflow.results.comparison.seeds import RATES
from pdflow.results.figures import intervals, spread
from pdflow.results.figures.intervals import FEWEST_BLOCKS, Floats, Interval
from pdflow.results.records import stage_durations_ns, stages_seen
from pdflow.results.table import LATENCY_COLUMNS

_STAGE: Final = "stage_"
"""Before a stage's name in seeds.json."""

How: TypeAlias = Literal["paired requests", "unpaired requests", "paired seeds", "unpaired seeds", "single run"]
"""The data that a comparison's intervals were computed over; against a single run there are none."""


@attrs.frozen(eq=False)
class Figures:
    """The figures of one run by name, with each request's contribution to them: NaN where it does not count."""

    run: OneRun
    values: dict[str, float]
    latencies: dict[str, Floats]
    """ttft, tpot and e2e in ms; request_itl, the percentile of each request's own that the SLO bounds, if it does."""
    shares: dict[str, Floats]
    """Each stage in ms, and `slo_attainment` as 0 or 1: of these only the mean is reported."""

    @staticmethod
    def of(run: OneRun) -> Figures:
        """Return the figures of one run."""
        served, done = run.served, run.done
        count = len(done)
        tpot = np.full(len(served.output), np.nan)
        tpot[served.output > 1] = served.tpot_ns
        columns = {"ttft": served.first - served.arrival, "tpot": tpot, "e2e": served.last - served.arrival}
        spreads = {
            "ttft": spread.of_ints(served.first - served.arrival),
            "tpot": spread.of_floats(served.tpot_ns),
            "e2e": spread.of_ints(served.last - served.arrival),
        }
        if served.itl is not None:
            columns["request_itl"] = np.where(served.output > 1, served.itl, np.nan)
            spreads["request_itl"] = spread.of_ints(served.itl[served.output > 1])
        # Of nothing there are no latencies: a run that completed nothing would be the fastest.
        values = {
            f"{name}_{statistic}_ms": getattr(each, f"{statistic}_ms")
            for name, each in spreads.items()
            if each.count
            for statistic in LATENCY_COLUMNS
        }
        shares = {}
        for stage, durations in zip(stages_seen(run.records), stage_durations_ns(run.records), strict=False):
            if done.any():
                values[f"{stage}_ms"] = spread.of_ints(durations[done]).mean_ms
            shares[f"{stage}_ms"] = _over(done, durations[done] / spread.NS_PER_MS, count)
        if run.good is not None:
            ended = np.array([outcome is not None for outcome in run.records.outcome])
            good = np.where(ended, 0.0, np.nan)
            good[done] = run.good
            shares["slo_attainment"] = good
            values["slo_attainment"] = float(np.count_nonzero(run.good)) / max(int(np.count_nonzero(ended)), 1)
        if served.stalled_share is not None:
            values["stalled_share"] = served.stalled_share
        for rate in RATES:
            if (value := getattr(run, rate)) is not None:
                values[rate] = value
        latencies = {name: _over(done, column / spread.NS_PER_MS, count) for name, column in columns.items()}
        return Figures(run, values, latencies, shares)

    def resampled(self, name: str) -> dict[str, Floats]:
        """Return each figure that has an interval, in each resample."""
        taken = intervals.resampled_blocks(len(self.run.done), name)
        found = {share: intervals.means(column, taken) for share, column in self.shares.items()}
        for latency, column in self.latencies.items():
            found[f"{latency}_mean_ms"] = intervals.means(column, taken)
            for statistic, values in zip(LATENCY_COLUMNS[1:], intervals.percentiles(column, taken).T, strict=True):
                found[f"{latency}_{statistic}_ms"] = values
        return found


@attrs.frozen(eq=False)
class SeedFigures:
    """The figures of several runs by name: the value of each in each run, and their mean."""

    run: Runs
    seeds: Sequence[int]
    samples: Mapping[str, Sequence[float]]
    values: dict[str, float]

    @staticmethod
    def of(runs: SeedRuns) -> SeedFigures:
        """Return the figures of several runs."""
        report = runs.report
        named = {name.removeprefix(_STAGE): estimate for name, estimate in report.figures.items()}
        samples = {name: estimate.values for name, estimate in named.items()}
        return SeedFigures(runs, report.seeds, samples, {name: estimate.mean for name, estimate in named.items()})

    @staticmethod
    def of_one(figures: Figures) -> SeedFigures:
        """Return the figures of a single run, as if it were several."""
        seeds, samples = (figures.run.seed,), {name: (value,) for name, value in figures.values.items()}
        return SeedFigures(figures.run, seeds, samples, figures.values)


def _over(done: Any, values: Floats, count: int) -> Floats:
    """Spread the values of completed requests over all requests of the workload, NaN for those not completed."""
    column = np.full(count, np.nan)
    column[done] = values
    return column


@attrs.frozen
class Difference:
    """The difference of one figure: that of a later run less that of the first. `percent` None where the first is 0."""

    before: float
    after: float
    interval: Interval | None

    @property
    def change(self) -> float:
        """The difference in the figure's unit."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """The difference in per cent of the first run's figure."""
        return 100 * self.change / self.before if self.before else None


@attrs.frozen
class Comparison:
    """The differences of a later run from the first."""

    how: How
    differences: dict[str, Difference]

    @staticmethod
    def of(first: Figures | SeedFigures, other: Figures | SeedFigures) -> Comparison:
        """Compare the figures that both have."""
        if isinstance(first, Figures) and isinstance(other, Figures):
            return _request_by_request(first, other)
        before, after = (SeedFigures.of_one(it) if isinstance(it, Figures) else it for it in (first, other))
        return _seed_by_seed(before, after)


def _request_by_request(first: Figures, other: Figures) -> Comparison:
    paired = _same_requests(first.run, other.run)
    before, after = first.resampled("first"), other.resampled("first" if paired else "other")
    few = min(len(first.run.done), len(other.run.done)) < FEWEST_BLOCKS
    differences = {}
    for name in (name for name in first.values if name in other.values):
        interval = None
        if name in before and name in after and not few:
            interval = intervals.of_resamples(after[name] - before[name])
        differences[name] = Difference(first.values[name], other.values[name], interval)
    return Comparison("paired requests" if paired else "unpaired requests", differences)


def _same_requests(first: OneRun, other: OneRun) -> bool:
    a, b = first.records, other.records
    return (a.arrival_ns, a.input_tokens, a.output_tokens) == (b.arrival_ns, b.input_tokens, b.output_tokens)


def _seed_by_seed(first: SeedFigures, other: SeedFigures) -> Comparison:
    """Compare the means over seeds. Where both have the same seeds, the seeds' differences are independent samples,
    whether the scenarios draw the same traffic from a seed or not."""
    paired = list(first.seeds) == list(other.seeds)
    differences = {}
    for name in (name for name in first.samples if name in other.samples):
        before, after = first.samples[name], other.samples[name]
        if paired:
            interval = intervals.of_mean([b - a for a, b in zip(before, after, strict=True)])
        else:
            interval = intervals.of_difference(before, after)
        differences[name] = Difference(first.values[name], other.values[name], interval)
    if min(len(first.seeds), len(other.seeds)) < 2:
        return Comparison("single run", differences)
    return Comparison("paired seeds" if paired else "unpaired seeds", differences)

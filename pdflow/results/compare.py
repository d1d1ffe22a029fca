"""Runs side by side: each one's figures beside the first's, the difference, and how sure it is.

A figure is worked out as a run's own report does. Latencies, stages and the share that met the SLO belong to single
requests, so their differences have an interval (`intervals` says what it means); a rate belongs to the whole run, of
which there is one, so it has none: several seeds say how it varies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pdflow.results import intervals, spread, words
from pdflow.results.intervals import CONFIDENCE, FEWEST_BLOCKS, RESAMPLES, Floats, Interval
from pdflow.results.read import SavedRun
from pdflow.results.records import STAGES, stage_durations_ns

_WIDEST = 80
_PARTS: Final = ("mean", "p50", "p90", "p99")
_RATES: Final = {"requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s", "goodput_rps": "goodput/s"}


@attrs.frozen(eq=False)
class Figures:
    """One run's figures by name, with what each request adds to them: NaN where it does not count."""

    run: SavedRun
    values: dict[str, float]
    latencies: dict[str, Floats]
    """ttft, tpot and e2e in ms."""
    shares: dict[str, Floats]
    """Each stage in ms, and `slo_attainment` as 0 or 1: of these only the mean is told."""

    @staticmethod
    def of(run: SavedRun) -> Figures:
        """Those of one run."""
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
        values = {f"{name}_{part}_ms": getattr(spreads[name], f"{part}_ms") for name in spreads for part in _PARTS}
        shares = {}
        for stage, durations in zip(STAGES, stage_durations_ns(run.records), strict=True):
            values[f"{stage}_ms"] = spread.of_ints(durations[done]).mean_ms
            shares[f"{stage}_ms"] = _over(done, durations[done] / spread.NS_PER_MS, count)
        if run.good is not None:
            ended = np.array([outcome is not None for outcome in run.records.outcome])
            good = np.where(ended, 0.0, np.nan)
            good[done] = run.good
            shares["slo_attainment"] = good
            values["slo_attainment"] = float(np.count_nonzero(run.good)) / max(int(np.count_nonzero(ended)), 1)
        for rate in _RATES:
            if (value := getattr(run, rate)) is not None:
                values[rate] = value
        latencies = {name: _over(done, column / spread.NS_PER_MS, count) for name, column in columns.items()}
        return Figures(run, values, latencies, shares)

    def resampled(self, name: str) -> dict[str, Floats]:
        """Each figure that has an interval, in each resample."""
        taken = intervals.resampled_blocks(len(self.run.done), name)
        found = {share: intervals.means(column, taken) for share, column in self.shares.items()}
        for latency, column in self.latencies.items():
            found[f"{latency}_mean_ms"] = intervals.means(column, taken)
            for part, values in zip(_PARTS[1:], intervals.percentiles(column, taken).T, strict=True):
                found[f"{latency}_{part}_ms"] = values
        return found


def _over(done: Any, values: Floats, count: int) -> Floats:
    """One value per request of the workload, NaN for those that were not completed."""
    column = np.full(count, np.nan)
    column[done] = values
    return column


@attrs.frozen
class Difference:
    """One figure of a later run less that of the first. `percent` None where the first is 0."""

    before: float
    after: float
    interval: Interval | None

    @property
    def change(self) -> float:
        """In the figure's unit."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """Of the first run's."""
        return 100 * self.change / self.before if self.before else None


@attrs.frozen
class Comparison:
    """A later run against the first. `paired`: both served the same requests."""

    paired: bool
    differences: dict[str, Difference]


@attrs.frozen(eq=False)
class Comparisons:
    """All runs against the first; prints with rich, and as JSON."""

    figures: Sequence[Figures]
    against_first: Sequence[Comparison]

    @staticmethod
    def of(runs: Sequence[SavedRun]) -> Comparisons:
        """Work the differences out. The same runs give the same intervals."""
        figures = [Figures.of(run) for run in runs]
        first = figures[0]
        first_resampled = first.resampled("first")
        found = []
        for other in figures[1:]:
            paired = _same_requests(first.run, other.run)
            resampled = other.resampled("first" if paired else "other")
            few = min(len(first.run.done), len(other.run.done)) < FEWEST_BLOCKS
            differences = {}
            for name in (name for name in first.values if name in other.values):
                interval = None
                if name in resampled and name in first_resampled and not few:
                    interval = intervals.of_resamples(resampled[name] - first_resampled[name])
                differences[name] = Difference(first.values[name], other.values[name], interval)
            found.append(Comparison(paired, differences))
        return Comparisons(figures, found)

    def as_dict(self) -> dict[str, Any]:
        """For --json: every run's figures, and each later run's differences from the first."""
        return {
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "runs": [
                {
                    "path": str(each.run.path),
                    "name": each.run.name,
                    "seed": each.run.seed,
                    "interrupted": each.run.interrupted,
                    "requests": len(each.run.done),
                    "completed": int(np.count_nonzero(each.run.done)),
                    "figures": each.values,
                }
                for each in self.figures
            ],
            "against_first": [
                {
                    "run": number,
                    "paired": one.paired,
                    "differences": {
                        name: {
                            "difference": it.change,
                            "percent": it.percent,
                            "low": None if it.interval is None else it.interval.low,
                            "high": None if it.interval is None else it.interval.high,
                        }
                        for name, it in one.differences.items()
                    },
                }
                for number, one in enumerate(self.against_first, start=1)
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=min(options.max_width, _WIDEST))
        for number, each in enumerate(self.figures):
            yield from console.render(_legend(_letter(number), each.run), options)
        for number, one in enumerate(self.against_first, start=1):
            yield ""
            yield from console.render(_how(_letter(number), one), options)
            yield from console.render(_table(_letter(number), one), options)


def _same_requests(first: SavedRun, other: SavedRun) -> bool:
    a, b = first.records, other.records
    return (a.arrival_ns, a.input_tokens, a.output_tokens) == (b.arrival_ns, b.input_tokens, b.output_tokens)


def _letter(number: int) -> str:
    """A to Z, then AA."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _legend(letter: str, run: SavedRun) -> Text:
    line = Text.assemble((f"{letter}  ", "bold"), str(run.path))
    done = int(np.count_nonzero(run.done))
    asked = f"{words.count(done)} of {words.count(len(run.done))} requests completed"
    line.append(f"  {run.name}, seed {run.seed}, {asked}", style="dim")
    return line.append("; interrupted, partial", style="yellow") if run.interrupted else line


def _how(letter: str, one: Comparison) -> Text:
    how = "request by request: both served the same" if one.paired else "unpaired: their requests are not the same"
    return Text.assemble((f"{letter} against A", "bold"), (f"  {how}", "dim"))


def _table(letter: str, one: Comparison) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", style="bold")
    for name in ("A", letter, f"{letter} - A", "%", "95 % interval"):
        table.add_column(name, justify="right")
    for name, label in _labels(one.differences):
        it = one.differences[name]
        scale = 100.0 if name == "slo_attainment" else 1.0
        digits = words.decimals_for(max(abs(it.before), abs(it.after)) * scale)
        percent = "" if it.percent is None else _signed(it.percent, 1)
        table.add_row(
            label,
            *(f"{value * scale:,.{digits}f}" for value in (it.before, it.after)),
            _signed(it.change * scale, digits),
            percent,
            "" if it.interval is None else _range(it.interval, scale, digits),
        )
    return table


def _labels(differences: dict[str, Difference]) -> Iterator[tuple[str, str]]:
    """The rows, in the order of a run's own report: latencies, stages that took anything, rates."""
    for name in ("ttft", "tpot", "e2e"):
        for part in _PARTS:
            yield f"{name}_{part}_ms", f"{name.upper()} {part}, ms"
    for stage in STAGES:
        if differences[f"{stage}_ms"].before or differences[f"{stage}_ms"].after:
            yield f"{stage}_ms", f"  {stage}, ms"
    if "slo_attainment" in differences:
        yield "slo_attainment", "SLO met, %"
    for name, label in _RATES.items():
        if name in differences:
            yield name, label


def _signed(value: float, digits: int) -> str:
    text = f"{value:+,.{digits}f}"
    return "0" if not float(text.replace(",", "")) else text


def _range(interval: Interval, scale: float, digits: int) -> str:
    return f"{_signed(interval.low * scale, digits)} to {_signed(interval.high * scale, digits)}"

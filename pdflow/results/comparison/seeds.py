"""Several runs of one scenario that differ in their seed alone: each headline figure as a mean with its interval.

Runs are independent, so the interval is Student's t over them: it says where the mean over all seeds lies, with 95 %
confidence, and needs no assumption on how the requests of one run depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.figures.intervals import CONFIDENCE, Interval, of_mean
from pdflow.results.table import LATENCY_COLUMNS

_WIDEST = 80
LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "request_itl": "request ITL", "e2e": "E2E"}
"""Their labels. A request's ITL is the percentile of its own that the SLO bounds; none without a bound."""
RATES: Final = {"requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s", "goodput_rps": "goodput/s"}
SHARES: Final = {"slo_attainment": "SLO met, %", "stalled_share": "stalled, %"}


@attrs.frozen
class Estimate:
    """The mean of one figure over runs, with its interval: None of a single run."""

    values: tuple[float, ...]
    mean: float
    interval: Interval | None

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Estimate the mean of a figure from its values in the runs."""
        return Estimate(tuple(values), math.fsum(values) / len(values), of_mean(values))

    def text(self, sign: str, digits: int, scale: float = 1.0) -> str:
        """Return the mean and half the interval's width: 7.03 ±0.01"""
        mean = f"{self.mean * scale:,.{digits}f}"
        if self.interval is None:
            return mean
        return f"{mean} {sign}{(self.interval.high - self.interval.low) / 2 * scale:,.{digits}f}"


@attrs.frozen(kw_only=True)
class SeedsReport:
    """The report of several runs together; prints with rich. `seeds` are those that ran to their end, of `asked`."""

    name: str
    seeds: Sequence[int]
    asked: int
    figures: Mapping[str, Estimate]
    costs: Sequence[str] = ()
    """Where step times come from, and how wrong they may be, in words; the same for every seed."""

    @staticmethod
    def of(name: str, asked: int, summaries: Mapping[int, Mapping[str, Any]], costs: Sequence[str] = ()) -> SeedsReport:
        """Make the report from the summary of each seed's `Result`."""
        rows = [dict(_flat(summary)) for summary in summaries.values()]
        names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
        figures = {name: Estimate.of([row[name] for row in rows]) for name in names}
        return SeedsReport(name=name, seeds=list(summaries), asked=asked, figures=figures, costs=costs)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of seeds.json."""
        return {
            "name": self.name,
            "seeds": list(self.seeds),
            "interrupted": len(self.seeds) < self.asked,
            "confidence": CONFIDENCE,
            "cost": list(self.costs),
            "figures": {
                name: {
                    "mean": it.mean,
                    "low": None if it.interval is None else it.interval.low,
                    "high": None if it.interval is None else it.interval.high,
                    "values": list(it.values),
                }
                for name, it in self.figures.items()
            },
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=min(options.max_width, _WIDEST))
        sign = "+-" if options.ascii_only else "±"
        renderables: list[RenderableType] = [self._title(sign)]
        if self.figures:
            renderables += ["", self._latencies(sign), "", self._others(sign)]
            if len(self.seeds) > 1 and all(len(set(it.values)) == 1 for it in self.figures.values()):
                renderables.append(
                    Text("All seeds gave the same results: this scenario has no randomness.", style="dim")
                )
            renderables += [Text(f"step times  {formatting.plain(statement)}", style="dim") for statement in self.costs]
        for renderable in renderables:
            yield from console.render(renderable, options)

    def _title(self, sign: str) -> Text:
        line = Text(self.name or "run", style="bold")
        line.append(", " + self._ran(sign), style="not bold dim")
        if len(self.seeds) < self.asked:
            line.append(f"; interrupted, {self.asked} requested", style="not dim bold yellow")
        return line

    def _ran(self, sign: str) -> str:
        if len(self.seeds) < 2:
            return f"1 run with seed {self.seeds[0]}" if self.seeds else "no run"
        ran = f"{len(self.seeds)} runs with seeds {self.seeds[0]} to {self.seeds[-1]}"
        return f"{ran}: mean {sign} half of its 95 % interval"

    def _latencies(self, sign: str) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("ms", style="bold")
        for name in LATENCY_COLUMNS:
            table.add_column(name, justify="right")
        for name, label in LATENCIES.items():
            row = [self.figures.get(f"{name}_{statistic}_ms") for statistic in LATENCY_COLUMNS]
            known = [it for it in row if it is not None]
            if known:
                digits = formatting.decimals_for(max(it.mean for it in known))
                table.add_row(label, *(it.text(sign, digits) for it in known))
        return table

    def _others(self, sign: str) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, label, scale in self._rows():
            it = self.figures[name]
            table.add_row(label, it.text(sign, formatting.decimals_for(abs(it.mean) * scale), scale))
        return table

    def _rows(self) -> Iterator[tuple[str, str, float]]:
        for name, label in RATES.items():
            if name in self.figures:
                yield name, label, 1.0
        for name, label in SHARES.items():
            if name in self.figures:
                yield name, label, 100.0
        for name, it in self.figures.items():
            if name.startswith("stage_") and any(it.values):
                yield name, f"{name.removeprefix('stage_').removesuffix('_ms')}, ms", 1.0


def _flat(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of one run that have a mean over runs: not counts, nor those that the scenario does not
    ask for."""
    for name in (*(f"{of}_{statistic}_ms" for of in LATENCIES for statistic in LATENCY_COLUMNS), *RATES, *SHARES):
        if summary.get(name) is not None:
            yield name, summary[name]
    for stage, mean_ms in summary["stages_mean_ms"].items():
        yield f"stage_{stage}_ms", mean_ms

"""Runs side by side, printed or as JSON: each run's figures, and each later run's differences from the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult

from pdflow.results.comparison import compare_table
from pdflow.results.comparison.differences import Comparison, Figures, SeedFigures
from pdflow.results.comparison.runs import OneRun, Runs, SeedRuns
from pdflow.results.figures.intervals import CONFIDENCE, RESAMPLES


@attrs.frozen(eq=False)
class Comparisons:
    """All runs against the first; prints with rich, and as JSON."""

    figures: Sequence[Figures | SeedFigures]
    against_first: Sequence[Comparison]

    @staticmethod
    def of(runs: Sequence[Runs]) -> Comparisons:
        """Compute the differences. The same runs give the same intervals."""
        figures = [Figures.of(run) if isinstance(run, OneRun) else SeedFigures.of(run) for run in runs]
        return Comparisons(figures, [Comparison.of(figures[0], other) for other in figures[1:]])

    def as_dict(self) -> dict[str, Any]:
        """Return every run's figures, and each later run's differences from the first, for --json."""
        return {
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "runs": [{**_described(each.run), "figures": each.values} for each in self.figures],
            "against_first": [
                {
                    "run": number,
                    "paired": one.how in ("paired requests", "paired seeds"),
                    "over": one.how,
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
        options = options.update(width=min(options.max_width, compare_table.WIDEST))
        for number, each in enumerate(self.figures):
            yield from console.render(compare_table.legend(number, each.run), options)
        for number, one in enumerate(self.against_first, start=1):
            yield ""
            yield from console.render(compare_table.heading(number, one.how), options)
            yield from console.render(compare_table.table(number, one.differences), options)
        yield ""
        for line in compare_table.step_times([each.run for each in self.figures]):
            yield from console.render(line, options)


def _described(run: Runs) -> dict[str, Any]:
    if isinstance(run, SeedRuns):
        report = run.report
        fields = {"seeds": list(report.seeds), "interrupted": len(report.seeds) < report.asked}
        return {"path": str(run.path), "name": report.name, **fields}
    return {
        "path": str(run.path),
        "name": run.name,
        "seed": run.seed,
        "interrupted": run.interrupted,
        "requests": len(run.done),
        "completed": int(np.count_nonzero(run.done)),
        **({} if run.records.wrong_kv is None else {"wrong_kv": len(run.records.wrong_kv)}),
    }

"""The result of a run as `pdflow.simulate` returns it: figures, requests, files, a printed report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from pdflow.results import formatting
from pdflow.results.figures.itls import itls_s
from pdflow.results.figures.slo import ClassMetrics
from pdflow.results.files.bench_json import bench_json, statements
from pdflow.results.files.write import REQUESTS_NAME, RESULTS_NAME, write_requests, write_results
from pdflow.results.finished import FinishedRun

if TYPE_CHECKING:
    import pandas as pd

    from pdflow.results.plots import RunFigure


def _class_summary(row: ClassMetrics) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "completed": row.completed,
        "goodput_rps": None if row.slo is None else row.slo.goodput_rps,
        "slo_attainment": None if row.slo is None else row.slo.attainment,
        **{
            f"{name}_{statistic}_ms": getattr(getattr(row, name), f"{statistic}_ms")
            for name in ("ttft", "tpot", "e2e")
            for statistic in ("mean", "p50", "p90", "p99")
        },
    }


@attrs.frozen(eq=False, repr=False)
class Result(FinishedRun):
    """The result of one run.

    `records` are the requests, each a dict when it is iterated over; `requests` is the same as a table. `steps` has
    each engine's step log under the engine's name. `scenario` is what was run, where `pdflow.simulate` ran it.
    """

    @property
    def summary(self) -> dict[str, Any]:
        """The headline figures: outcomes, rates, and {ttft,tpot,itl,e2e}_{mean,p50,p90,p99}_ms. Where the SLO bounds
        ITL, request_itl_* and `stalled_share` too."""
        metrics = self.metrics
        figures: dict[str, Any] = {
            "requests": metrics.requests,
            **metrics.outcomes,
            **({} if metrics.wrong_kv is None else {"wrong_kv": metrics.wrong_kv}),
            "duration_s": metrics.duration_ns / 1e9,
            "requests_per_s": metrics.per_second(metrics.completed),
            "output_tokens_per_s": metrics.per_second(metrics.output_tokens),
            "total_tokens_per_s": metrics.per_second(metrics.input_tokens + metrics.output_tokens),
            "goodput_rps": None if metrics.slo is None else metrics.slo.goodput_rps,
            "slo_attainment": None if metrics.slo is None else metrics.slo.attainment,
        }
        if metrics.stalled_share is not None:
            figures["stalled_share"] = metrics.stalled_share
        bounded = () if metrics.stalled_share is None else ("request_itl",)
        for name in ("ttft", "tpot", "itl", *bounded, "e2e"):
            spread = getattr(metrics, name)
            for statistic in ("mean", "p50", "p90", "p99"):
                figures[f"{name}_{statistic}_ms"] = getattr(spread, f"{statistic}_ms")
        if metrics.classes:
            figures["classes"] = {name: _class_summary(row) for name, row in metrics.classes.items()}
        figures["stages_mean_ms"] = {stage: spread.mean_ms for stage, spread in metrics.stages.items()}
        figures["bytes_moved"] = self.totals.bytes_moved
        figures["stranded_kv_byte_s"] = self.totals.stranded_byte_ns / 1e9
        figures["posting_busy_share"] = self.totals.busiest_lane()[1]
        figures["gpu_busy_share"] = {role: self.totals.gpu_busy_share(role) for role in self.totals.roles()}
        figures["interrupted"] = self.header.interrupted
        return figures

    @property
    def requests(self) -> pd.DataFrame:
        """The requests as a table, a row each, in the order of the workload: docs/python.md has the columns.

        Raises MissingBackendError without pandas; `records` needs nothing.
        """
        from pdflow.results.comparison.frame import requests_frame

        return requests_frame(self.records, self.header.warmup_ns)

    def plot_ttft(self, *others: Result, labels: Sequence[str] = ()) -> RunFigure:
        """Plot the distribution of TTFT over completed requests: the share that had its first token within each time.

        `others` are drawn beside it, and all are called `labels`, or what was edited in their scenarios. Raises
        MissingBackendError without matplotlib.
        """
        from pdflow.results.plots import ttft_figure

        return ttft_figure([self, *others], labels)

    def plot_waterfall(self, *others: Result, labels: Sequence[str] = ()) -> RunFigure:
        """Plot mean TTFT stage by stage; `others` as bars below. Raises MissingBackendError."""
        from pdflow.results.plots import waterfall_figure

        return waterfall_figure([self, *others], labels)

    def plot_timeline(self) -> RunFigure:
        """Plot the requests in each stage and the GPUs at work over time. Raises MissingBackendError."""
        from pdflow.results.plots import timeline_figure

        return timeline_figure(self)

    def save(self, directory: str | Path, *, detailed: bool = False) -> None:
        """Write results.json and requests.jsonl there. `detailed` adds the per-token lists of vLLM's --save-detailed.

        Raises OutputError if the disk refuses; no half file is left.
        """
        where = Path(directory)
        write_requests(where / REQUESTS_NAME, self.records)
        counted = self.records.arriving_from(self.header.warmup_ns)
        itls = itls_s(counted, self.steps) if detailed else None
        content = bench_json(self.header, counted, self.metrics, self.totals, itls_s=itls, aftermaths=self.aftermaths)
        write_results(where / RESULTS_NAME, content)

    def _repr_html_(self) -> str:
        from pdflow.results.page.cell import cell

        return cell(self)

    def __repr__(self) -> str:
        metrics = self.metrics
        ended = ", ".join(
            f"{formatting.count(number)} {outcome}" for outcome, number in metrics.outcomes.items() if number
        )
        good = "" if metrics.slo is None else f", goodput {formatting.number(metrics.slo.goodput_rps)} requests/s"
        lines = [
            f"<Result {self.header.scenario_name!r} seed {self.header.seed}: {ended or 'no requests'}"
            f"{' (interrupted)' if self.header.interrupted else ''}",
            f"  {formatting.duration(metrics.duration_ns)} of {self.header.kind_of_time},"
            f" {formatting.number(metrics.per_second(metrics.completed))} requests/s{good}",
        ]
        for name in ("ttft", "tpot", "itl", "e2e"):
            spread = getattr(metrics, name)
            if not spread.count:
                continue
            mean, p99 = formatting.number(spread.mean_ms), formatting.number(spread.p99_ms)
            lines.append(f"  {name.upper():<4} mean {mean} ms, p99 {p99} ms")
        lines += [f"  step times {statement}" for statement in statements(self.header.costs)]
        return "\n".join(lines) + ">"

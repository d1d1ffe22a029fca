"""Plots of finished runs, by matplotlib. Their figures are computed elsewhere: `page.curves`, `metrics`.

Figures are no part of pyplot's state: a notebook shows one that ends a cell once, a script saves it, and nothing must
be closed.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pdflow.errors import PdflowError
from pdflow.results import formatting
from pdflow.results.extra import notebook_extra
from pdflow.results.figures.slo import bounds_ms
from pdflow.results.finished import FinishedRun
from pdflow.results.page.curves import LEVELS, PERCENTS, SLICES, Curve, distributions_ms, over_time
from pdflow.results.palette import ROLES, SERIES
from pdflow.results.palette import STAGES as STAGE_COLOURS
from pdflow.results.totals import NS_PER_S
from pdflow.scenario.reading.convert import shown
from pdflow.scenario.reading.editable import Scenario

with notebook_extra():
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE: Final = 8.0
"""Inches."""
_BEYOND: Final = 2.0
"""An SLO that is so many times as far as the bars reach is not drawn to scale."""
_DASHES: Final = ("--", ":", "-.")
_BAR: Final[Mapping[str, Any]] = {"height": 0.6, "edgecolor": "white", "linewidth": 0.4}
_LINES: Final = {"waiting": ":", "loading": "--"}
_STYLES: Final = {name: (ROLES[kind], _LINES.get(level, "-")) for (kind, level), name in LEVELS.items()}
"""The colour and the dashes of a line, by its name: the colour is the role's, and what waits is dotted."""
_TOO_FAR: Final = 10
"""Latencies that lie so many times apart are drawn on a logarithmic axis."""


class RunFigure(Figure):
    """A matplotlib Figure that knows which runs it shows. `alt` describes it in words, for those who do not see it."""

    alt: str = ""

    def __init__(self, *arguments: Any, results: Sequence[FinishedRun] = (), **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.results = tuple(results)

    def to_scenario(self, which: int = 0) -> Scenario:
        """Return the scenario of the run; of several runs, that of the first, or of number `which`.

        Raises PdflowError if the run was not made by `pdflow.simulate`, and IndexError if there is no such run.
        """
        scenario = self.results[which].scenario
        if scenario is None:
            raise PdflowError("this result has no scenario: only results of pdflow.simulate have one")
        return scenario

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG, with its description inside."""
        page = io.BytesIO()
        self.savefig(page, format="png", bbox_inches="tight", metadata={"Description": self.alt})
        return page.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """Return the figure for a cell of a notebook, with its description as the picture's alternative text."""
        picture = base64.b64encode(self._repr_png_()).decode("ascii")
        return {"image/png": picture}, {"image/png": {"alt": self.alt}}


def ttft_figure(results: Sequence[FinishedRun], labels: Sequence[str]) -> RunFigure:
    """Draw the distributions of TTFT through their percentiles, with the SLO's bounds."""
    figure, axes = _figure(results, "Time to first token", 4.0)
    axes.set_prop_cycle(color=SERIES)
    shown, described = [], []
    for result, label in zip(results, _labels(results, labels), strict=True):
        curve = distributions_ms(result.records.arriving_from(result.header.warmup_ns))["TTFT"]
        axes.plot(curve, [percent / 100 for percent in PERCENTS[: len(curve)]], label=label)
        shown += curve
        if curve:
            p50, p99 = (formatting.number(curve[percent]) for percent in (50, 99))
            described.append(f"{label}: median {p50} ms, 99th percentile {p99} ms")
    for number, (name, bound) in enumerate(_ttft_bounds(results)):
        axes.axvline(bound, color="0.4", linestyle=_DASHES[number % len(_DASHES)], linewidth=1, label=name)
        shown.append(bound)
        described.append(name)
    figure.alt = f"Distribution of the time to first token. {'; '.join(described) or 'No request has completed'}."
    if shown and 0 < _TOO_FAR * min(shown) < max(shown):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="TTFT in ms", ylabel="share of completed requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if len(axes.get_lines()) > 1:
        axes.legend(frameon=False)
    return figure


def waterfall_figure(results: Sequence[FinishedRun], labels: Sequence[str]) -> RunFigure:
    """Draw mean TTFT by stage: of one run a bar for each stage, one after the other; of several a bar for each run."""
    stages = [{name: it.mean_ms for name, it in result.metrics.stages.items()} for result in results]
    several = len(results) > 1
    high = 1.6 + 0.45 * len(results) if several else 1.2 + 0.32 * len(stages[0])
    figure, axes = _figure(results, "Where the time to first token went", high)
    rows = _labels(results, labels) if several else list(stages[0])
    begins = [0.0] * len(rows)
    whole = max(sum(each.values()) for each in stages)
    for index, name in enumerate(stages[0]):
        if several:
            spent = [each[name] for each in stages]
            if any(value > whole / 1000 for value in spent):
                axes.barh(rows, spent, left=begins, label=name, color=STAGE_COLOURS[name], **_BAR)
            begins = [begin + value for begin, value in zip(begins, spent, strict=True)]
        else:
            begin, value = sum(list(stages[0].values())[:index]), stages[0][name]
            axes.barh(name, value, left=begin, color=STAGE_COLOURS[name], **_BAR)
            label = f" {formatting.number(value)} ms, {formatting.percent(value / whole if whole else 0)}"
            axes.text(begin + value, index, label, va="center", fontsize="small")
    axes.invert_yaxis()
    wide = whole * (1.02 if several else 1.3) or 1
    axes.set(xlabel="mean TTFT in ms", xlim=(0, _with_bounds(axes, results, wide)))
    figure.alt = _waterfall_alt(_labels(results, labels), stages)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.spines[["top", "right"]].set_visible(False)
    if several:
        figure.legend(frameon=False, ncols=5, loc="outside lower center", fontsize="small")
    return figure


def timeline_figure(result: FinishedRun) -> RunFigure:
    """Draw means over equal slices of the run, with the warm-up's end. A role has one colour in both panels."""
    requests, busy = over_time(result)
    requests, busy = ([curve for curve in curves if any(curve.highest)] for curves in (requests, busy))
    with notebook_extra():
        figure = RunFigure(results=[result], figsize=(_WIDE, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    seconds = result.totals.duration_ns / NS_PER_S
    _courses(top, requests, seconds)
    _courses(bottom, busy, seconds)
    top.set(title=f"{result.header.scenario_name}: where requests were", ylabel="requests")
    bottom.set(xlabel="seconds since the start", ylabel="GPUs at work", ylim=(0, 1.02), xlim=(0, seconds or 1))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    means = (f"{curve.name}: {formatting.number(sum(curve.means) / SLICES)}" for curve in requests)
    shares = (f"{curve.name}: {formatting.percent(sum(curve.means) / SLICES)}" for curve in busy)
    figure.alt = (
        f"Requests in each stage and GPUs at work over {seconds:g} s. On average {', '.join((*means, *shares))}."
    )
    if result.header.warmup_ns:
        for axes in (top, bottom):
            axes.axvline(result.header.warmup_ns / NS_PER_S, color="0.5", linestyle="--", linewidth=1)
    return figure


def _courses(axes: Axes, curves: Sequence[Curve], seconds: float) -> None:
    middles = [(index + 0.5) * seconds / SLICES for index in range(SLICES)]
    for curve in curves:
        colour, line = _STYLES.get(curve.name) or (ROLES[curve.name.split()[0]], "-")  # "prefill GPUs at work"
        axes.plot(middles, curve.means, linewidth=1.4, color=colour, linestyle=line, label=curve.name)
    if curves:
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _figure(results: Sequence[FinishedRun], title: str, high: float) -> tuple[RunFigure, Axes]:
    figure = RunFigure(results=results, figsize=(_WIDE, high), layout="constrained")
    axes = figure.add_subplot()
    name = results[0].header.scenario_name
    axes.set_title(f"{name}: {title[0].lower()}{title[1:]}" if name else title)
    return figure, axes


def _ttft_bounds(results: Sequence[FinishedRun]) -> list[tuple[str, float]]:
    """Return the bounds on TTFT that any of the runs has, by label, the lowest first."""
    headers = [result.header for result in results]
    found = {each for header in headers for each in bounds_ms(header.slo, header.class_slos, "ttft")}
    return sorted(found, key=lambda each: (each[1], each[0]))


def _with_bounds(axes: Axes, results: Sequence[FinishedRun], wide: float) -> float:
    """Draw the bounds on TTFT over bars that need an axis as wide, and return how wide it is then. A bound far beyond
    the bars is said in words: the bars would shrink to nothing.
    """
    for number, (label, bound) in enumerate(_ttft_bounds(results)):
        near = bound <= _BEYOND * wide
        if near:
            axes.axvline(bound, color="0.4", linestyle=_DASHES[number % len(_DASHES)], linewidth=1)
            wide = max(wide, bound * 1.02)
        axes.annotate(
            label if near else f"{label} \N{RIGHTWARDS ARROW}",
            (bound if near else 1, 0),
            xycoords=axes.get_xaxis_transform() if near else "axes fraction",
            xytext=(-4, 4 + 12 * number),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color="0.3",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        )
    return wide


def _waterfall_alt(labels: Sequence[str], stages: Sequence[Mapping[str, float]]) -> str:
    rows = []
    for label, each in zip(labels, stages, strict=True):
        longest = sorted(each.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{name} {formatting.number(value)} ms" for name, value in longest if value)
        rows.append(f"{label}: {formatting.number(sum(each.values()))} ms" + (f", of which {shares}" if shares else ""))
    return f"Mean time to first token by stage. {'; '.join(rows)}."


def _labels(results: Sequence[FinishedRun], labels: Sequence[str]) -> list[str]:
    if labels and len(labels) != len(results):
        raise ValueError(f"{len(labels)} labels for {len(results)} runs")
    edits = [{} if result.scenario is None else dict(result.scenario.edits) for result in results]
    common = {key for key, value in edits[0].items() if all(key in it and it[key] == value for it in edits)}
    own = [[f"{key} = {shown(value)}" for key, value in it.items() if key not in common] for it in edits]
    names = [result.header.scenario_name or "run" for result in results]
    return list(labels) or [
        ", ".join(changes).replace('"', "") or name for changes, name in zip(own, names, strict=True)
    ]

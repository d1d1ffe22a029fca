"""The charts of the page and their titles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pdflow.results import formatting
from pdflow.results.figures.slo import bounds_ms
from pdflow.results.finished import FinishedRun
from pdflow.results.page.chart import Axis, Chart
from pdflow.results.page.curves import SLICES, Curve, distributions_ms, over_time
from pdflow.results.page.markup import Html, tag
from pdflow.results.recording import Recording
from pdflow.results.totals import NS_PER_S

_HIGH = 190
_FLAT = 120
BOUNDS_SHOWN: Final = 8
"""The most lines of SLOs in one chart."""


def distributions(result: FinishedRun) -> Iterator[Html]:
    """Yield the distributions of latencies with the SLO's bounds; a latency that no request has is left out. That of
    ITL is of each request's percentile that its SLO bounds."""
    header = result.header
    bounds = {
        "TTFT": bounds_ms(header.slo, header.class_slos, "ttft"),
        "TPOT": bounds_ms(header.slo, header.class_slos, "tpot"),
        "request ITL": bounds_ms(header.slo, header.class_slos, "itl"),
    }
    curves = distributions_ms(result.records.arriving_from(header.warmup_ns))
    figures = [_distribution(name, curve, bounds[name][:BOUNDS_SHOWN]) for name, curve in curves.items() if curve]
    if figures:
        names = [name for name, curve in curves.items() if curve]
        yield tag("h2", f"Distribution of {' and '.join([', '.join(names[:-1]), *names[-1:]] if names[1:] else names)}")
        yield tag("div", *figures, class_="charts")


def _distribution(name: str, percentiles: Sequence[float], bounds: Sequence[tuple[str, float]]) -> Html:
    shown = [*percentiles, *(bound for _, bound in bounds)]
    axis = Axis.around(min(shown), max(shown))
    chart = Chart(axis, Axis(0, 1), _HIGH, f"{name} in ms{'; log scale' if axis.log else ''}", percent=True)
    last = len(percentiles) - 1
    drawn = [chart.line([(value, index / last) for index, value in enumerate(percentiles)])]
    drawn += [chart.bound(bound, label, row) for row, (label, bound) in enumerate(bounds)]
    caption = tag("figcaption", tag("b", name), ": share of completed requests up to this latency")
    p50, p99 = (formatting.number(percentiles[round(last * share)]) for share in (0.5, 0.99))
    lines = "".join(f", {label}" for label, _ in bounds)
    described = f"Distribution of {name}: median {p50} ms, 99th percentile {p99} ms{lines}"
    return tag("figure", caption, chart.picture(drawn, described))


def courses(result: FinishedRun, recording: Recording | None) -> Iterator[Html]:
    """Yield the charts over time of the whole run, warm-up included: requests by stage, GPUs, KV blocks, links."""
    if result.totals.duration_ns < SLICES:
        return
    seconds, warmup_s = result.totals.duration_ns / NS_PER_S, result.header.warmup_ns / NS_PER_S
    requests, shares = over_time(result, recording)
    figures = [
        *(_course(curve, seconds, warmup_s, percent=False) for curve in requests if any(curve.highest)),
        *(_course(curve, seconds, warmup_s, percent=True) for curve in shares if any(curve.highest)),
    ]
    if not figures:
        return
    each = formatting.duration(result.totals.duration_ns // SLICES)
    sentences = [f"Lines are means over {each}; the shaded areas are maxima of requests in that time."]
    never = [curve.name for curve in (*requests, *shares) if not any(curve.highest)]
    if never:
        sentences.append(f"Always zero: {', '.join(never)}.")
    if warmup_s:
        sentences.append("The dashed line is the end of the warm-up.")
    yield tag("h2", "Over time")
    yield tag("p", " ".join(sentences))
    yield tag("div", *figures, class_="charts")


def _course(curve: Curve, seconds: float, warmup_s: float, *, percent: bool) -> Html:
    mean, most = sum(curve.means) / SLICES, max(curve.highest)
    chart = Chart(
        Axis(0, seconds), Axis(0, 1) if percent else Axis.up_to(most, least=1), _FLAT, "s since the start", percent
    )
    drawn = [
        chart.area(_steps(curve.means if percent else curve.highest, seconds)),
        chart.line(_steps(curve.means, seconds)),
    ]
    if 0 < warmup_s < seconds:
        drawn.append(chart.bound(warmup_s))
    average = formatting.percent(mean) if percent else formatting.number(mean)
    caption = f"{average} on average" + ("" if percent else f", {most:,.0f} at most")
    picture = chart.picture(drawn, f"{curve.name} over time: {caption}")
    return tag("figure", tag("figcaption", tag("b", curve.name), f": {caption}"), picture)


def _steps(values: Sequence[float], seconds: float) -> list[tuple[float, float]]:
    """Return a point for each slice's value, at its middle; the first and last are extended to the ends of the run."""
    middle = [((index + 0.5) * seconds / len(values), value) for index, value in enumerate(values)]
    return [(0.0, values[0]), *middle, (seconds, values[-1])]

"""The report on a trace's figures as text of at most 80 columns, in ASCII, for a terminal, a pipe or a mail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

ROWS = 8
"""Lines of the plot."""


def described(title: str, figures: Mapping[str, Any], note: str = "") -> str:
    """Return the report of `pdflow trace describe`."""
    return "\n".join(line.rstrip() for line in _lines(title, figures, note)) + "\n"


def _lines(title: str, figures: Mapping[str, Any], note: str) -> Iterator[str]:
    yield title[:80]
    for line in wrap(note, 78):
        yield f"  {line}"
    yield ""
    arrivals = figures["arrivals"]
    yield _row("requests", f"{figures['requests']:,}" + (f" in {_span(arrivals['span_s'])}" if arrivals else ""))
    if arrivals is None:
        yield _row("arrivals", "no arrival times in the trace, or all equal")
    else:
        yield from _arrivals(arrivals)
    yield ""
    yield from _lengths(figures)
    if figures["prefix"] is not None:
        yield ""
        yield from _prefix(figures["prefix"])
    if figures["classes"] is not None:
        yield ""
        yield from _classes(figures["classes"])
    if arrivals is not None:
        yield ""
        yield from plot(arrivals["over_time"]["rate_rps"], arrivals["over_time"]["window_s"])


def _arrivals(arrivals: Mapping[str, Any]) -> Iterator[str]:
    peaks = "".join(f", {_figure(rate)}/s in the busiest {scale}" for scale, rate in arrivals["peak_rps"].items())
    yield _row("rate", f"{_figure(arrivals['rate_rps'])}/s on average{peaks}")
    same = arrivals["same_instant"]  # as the arrival before
    together = f", {same:.1%} at one instant" if same else ""
    yield _row("gaps", f"coefficient of variation {_figure(arrivals['gap_cv'])} (Poisson: 1){together}")
    if arrivals["dispersion"]:
        spread = ", ".join(f"{_figure(value)} in {scale}" for scale, value in arrivals["dispersion"].items())
        yield _row("dispersion", spread)
        yield _row("", "variance / mean of counts in such windows (Poisson: 1)")


def _lengths(figures: Mapping[str, Any]) -> Iterator[str]:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    yield f"{'tokens':<12}" + "".join(f"{name:>9}" for name in columns) + f"{'total':>14}"
    for name in ("input", "output"):
        row = figures[f"{name}_tokens"]
        if row["total"]:
            cells = "".join(f"{round(row[column]):>9,}" for column in columns)
            yield f"{name:<12}{cells}{row['total']:>14,}"


def _prefix(prefix: Mapping[str, Any]) -> Iterator[str]:
    hits = f"{prefix['hit_blocks']:.1%} of blocks, {prefix['hit_tokens']:.1%} of prompt tokens"
    yield _row("prefix hits", f"{hits}, if nothing is evicted")
    yield _row("", f"{prefix['requests_with_hits']:.1%} of requests hit; {prefix['distinct_blocks']:,} distinct blocks")


def _classes(classes: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'class':<28}{'requests':>10}{'share':>8}{'input p50':>11}{'p99':>8}{'output p50':>12}"[:80]
    for name, row in classes.items():
        inputs, outputs = row["input_tokens"], row["output_tokens"]
        yield (
            f"{name[:27]:<28}{row['requests']:>10,}{row['share']:>8.1%}"
            f"{round(inputs['p50']):>11,}{round(inputs['p99']):>8,}{round(outputs['p50']):>12,}"
        )


def plot(rates: Sequence[float], window_s: float) -> Iterator[str]:
    """Yield bars of the rate over time, scaled to the highest."""
    top = max(rates)
    yield f"requests/s over time, one column for {_span(window_s)}"
    for row in range(ROWS, 0, -1):
        label = _figure(top * row / ROWS) if row in (ROWS, ROWS // 2) else ""
        bars = "".join(_cell(rate / top * ROWS - (row - 1)) for rate in rates)
        yield f"{label:>10} |{bars}"
    yield f"{0:>10} +{'-' * len(rates)}"
    end = _span(window_s * len(rates))
    yield f"{'':>11}0{end:>{len(rates)}}"


def _cell(height: float) -> str:
    if height >= 0.75:
        return "#"
    return "-" if height >= 0.25 else " " if height <= 0.0 else "."


def _row(name: str, value: str) -> str:
    return f"{name:<12}{value}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _span(seconds: float) -> str:
    """Format a length of time in its usual unit."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"

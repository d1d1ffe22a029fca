"""The printed form of a comparison: which runs it is of, then one table for each later run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.comparison.differences import Difference, How
from pdflow.results.comparison.runs import Runs, SeedRuns
from pdflow.results.comparison.seeds import LATENCIES, RATES, SHARES
from pdflow.results.figures.intervals import Interval
from pdflow.results.records import STAGES
from pdflow.results.table import LATENCY_COLUMNS

WIDEST: Final = 80

_HOW: Final[Mapping[How, str]] = {
    "paired requests": "paired by request: both runs have the same requests",
    "unpaired requests": "unpaired: the runs have different requests",
    "paired seeds": "means over seeds, paired: both have the same seeds",
    "unpaired seeds": "means over seeds, unpaired: the seeds differ",
    "single run": "no interval: there is only one run on one side",
}


def letter(number: int) -> str:
    """Return the letter of a run: A to Z, then AA."""
    return (letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def legend(number: int, run: Runs) -> Text:
    """Return the line that says which run a letter stands for."""
    line = Text.assemble((f"{letter(number)}  ", "bold"), formatting.plain(str(run.path)))
    if isinstance(run, SeedRuns):
        report = run.report
        interrupted = len(report.seeds) < report.asked
        line.append(f"  {formatting.plain(report.name)}, {_seeds(report.seeds)}", style="dim")
    else:
        interrupted = run.interrupted
        done = int(np.count_nonzero(run.done))
        asked = f"{formatting.count(done)} of {formatting.count(len(run.done))} requests completed"
        line.append(f"  {formatting.plain(run.name)}, seed {run.seed}, {asked}", style="dim")
        if run.records.wrong_kv:
            line.append(f"; {formatting.count(len(run.records.wrong_kv))} decoded with wrong KV", style="yellow")
    return line.append("; interrupted, partial", style="yellow") if interrupted else line


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{formatting.count(len(seeds))} seeds, {seeds[0]} to {seeds[-1]}"
    return f"{formatting.count(len(seeds))} seeds"


def step_times(runs: Sequence[Runs]) -> Iterator[Text]:
    """Yield where each run's step times come from and how wrong they may be; runs that agree share a line."""
    letters: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for statement in run.report.costs if isinstance(run, SeedRuns) else run.costs:
            letters.setdefault(formatting.plain(statement), []).append(letter(number))
    for statement, those in letters.items():
        yield Text(f"step times of {', '.join(those)}  {statement}", style="dim")


def heading(number: int, how: How) -> Text:
    """Return the heading of a table: the runs compared, and what the intervals were computed over."""
    return Text.assemble((f"{letter(number)} against A", "bold"), (f"  {_HOW[how]}", "dim"))


def table(number: int, differences: Mapping[str, Difference]) -> Table:
    """Return the table of differences, a row per figure."""
    other = letter(number)
    rows = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    rows.add_column("", style="bold")
    for name in ("A", other, f"{other} - A", "%", "95 % interval"):
        rows.add_column(name, justify="right")
    for name, label in _labels(differences):
        it = differences[name]
        scale = 100.0 if name in SHARES else 1.0
        digits = formatting.decimals_for(max(abs(it.before), abs(it.after)) * scale)
        percent = "" if it.percent is None else _signed(it.percent, 1)
        rows.add_row(
            label,
            *(f"{value * scale:,.{digits}f}" for value in (it.before, it.after)),
            _signed(it.change * scale, digits),
            percent,
            "" if it.interval is None else _range(it.interval, scale, digits),
        )
    return rows


def _labels(differences: Mapping[str, Difference]) -> Iterator[tuple[str, str]]:
    """The rows, in the order of a run's own report: latencies, stages that took anything, rates."""
    labels = {
        f"{name}_{statistic}_ms": f"{label} {statistic}, ms"
        for name, label in LATENCIES.items()
        for statistic in LATENCY_COLUMNS
    }
    stages = {f"{stage}_ms": f"  {stage}, ms" for stage in STAGES}
    for name, label in {**labels, **stages, **SHARES, **RATES}.items():
        it = differences.get(name)
        if it is not None and (name not in stages or it.before or it.after):
            yield name, label


def _signed(value: float, digits: int) -> str:
    text = f"{value:+,.{digits}f}"
    return "0" if not float(text.replace(",", "")) else text


def _range(interval: Interval, scale: float, digits: int) -> str:
    return f"{_signed(interval.low * scale, digits)} to {_signed(interval.high * scale, digits)}"

"""`pdflow sweep`: many points of one scenario from the command line, as a table and as CSV.

What a run is and what is kept of it is `pdflow.sweep`'s; this reads the points from options and prints.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pdflow.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, Problem, ScenarioError, before_simulating
from pdflow.results import formatting
from pdflow.results.comparison.seeds import SHARES
from pdflow.results.files.write import guarding, replacing
from pdflow.scenario.reading.convert import MisfitError, shown
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.overrides import parse_override, values_of
from pdflow_sim.experiments.counting import counting
from pdflow_sim.experiments.executors import executor_of
from pdflow_sim.experiments.sweep import NOT_RUN, run_tasks, table_of, tasks_of
from pdflow_sim.run import print_report, stderr_console

Row = Mapping[str, Any]

FIGURES: Final = {
    "gpus": "GPUs",
    "goodput_rps": "goodput\nper s",
    "slo_attainment": "SLO\nmet",
    "requests_per_s": "requests\nper s",
    "ttft_p50_ms": "TTFT\np50 ms",
    "ttft_p99_ms": "TTFT\np99 ms",
    "tpot_p50_ms": "TPOT\np50 ms",
    "tpot_p99_ms": "TPOT\np99 ms",
    "request_itl_p99_ms": "ITL\np99 ms",
    "stalled_share": "stalled",
}
"""The columns that are printed, with their headings. The CSV file has all columns."""


def sweep(
    path: str,
    sets: Sequence[str],
    *,
    seeds: int,
    jobs: int,
    executor: str = "process",
    cache: str | None,
    to_csv: str | None,
    quiet: bool,
) -> int:
    """Run the command: all combinations of the values of `sets`, with progress; then the table. Returns the exit code:
    2 if a point could not be run, 130 if the sweep was interrupted.

    Raises ScenarioError if the scenario itself is wrong, MissingBackendError, OutputError.
    """
    with before_simulating():
        fixed, grid = read_sets(sets)
        scenario = Scenario.load(path, fixed)
        tasks = tasks_of(scenario, grid, seeds, cache)
        chosen = executor_of(executor, min(jobs, len(tasks)))
    console = stderr_console()
    left = (TextColumn("left"), TimeRemainingColumn())
    with counting(console, "runs", *left, watched=not quiet) as progress:
        bar = progress.add_task(scenario.name, total=len(tasks))
        rows, interrupted = run_tasks(tasks, chosen, lambda: progress.advance(bar))
    table, columns = table_of(tasks, rows)
    if to_csv is not None:
        write_csv(Path(to_csv), table, columns)
    if not quiet:
        print_report(sweep_view(table, list(grid), several_seeds=seeds > 1))
        if to_csv is not None:
            console.print(f"written to {to_csv}", style="dim", soft_wrap=True)
    if interrupted:
        done = sum(row.error != NOT_RUN for row in rows)
        resumed = ", and the same command goes on from there" if cache is not None else ""
        console.print(f"interrupted: {done:,} of {len(rows):,} runs are done{resumed}", style="yellow")
        return EXIT_INTERRUPTED
    return EXIT_BAD_INPUT if any(row.error is not None for row in rows) else EXIT_DONE


def read_sets(texts: Iterable[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the values that hold for every point, and those to run every combination of, by dotted key.

    Raises ScenarioError for what is no KEY=VALUE, or for a key that is there twice.
    """
    fixed: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    problems: list[Problem] = []
    for text in texts:
        key, _, value = text.partition("=")
        try:
            parse_override(text)
            if key in fixed or key in grid:
                raise MisfitError("the key is there twice; give all its values at once, with commas between them")
            values = values_of(value)
        except MisfitError as error:
            problems.append(Problem(f"--set {text}", "", str(error)))
            continue
        if len(values) == 1:
            fixed[key] = values[0]
        else:
            grid[key] = values
    if problems:
        raise ScenarioError(problems)
    return fixed, grid


def write_csv(path: Path, table: Iterable[Row], columns: Sequence[str]) -> None:
    """Write the table, with every figure. Raises OutputError."""
    with replacing(path) as file, guarding(path):
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        text.detach()


def sweep_view(table: Sequence[Row], swept: Sequence[str], *, several_seeds: bool) -> RenderableType:
    """Return the printed table: the values of each point and its headline figures, then what went wrong."""
    keys = [*swept, *(["seed"] if several_seeds else [])]
    known = [name for name in FIGURES if any(row.get(name) is not None for row in table)]
    if "goodput_rps" in known:
        known.remove("requests_per_s")
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for key in keys:
        grid.add_column("\n".join(key.split(".")[-2:]), style="bold", overflow="fold")
    for name in known:
        grid.add_column(FIGURES[name], justify="right")
    for row in table:
        values = [shown(row.get(key)).strip('"') for key in keys]
        figures = [_figure(name, row.get(name)) for name in known]
        grid.add_row(*map(Text, values), *(["not run" if known else ""] if row["error"] else figures))
    errors = Counter(row["error"] for row in table if row["error"] not in (None, NOT_RUN))
    lines = [Text(f"{runs:,} of {len(table):,} runs: {error}", style="yellow") for error, runs in errors.items()]
    return Group(grid, *([Text()] if lines else []), *lines)


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "gpus":
        return formatting.count(value)
    return formatting.percent(value) if name in SHARES else formatting.number(value)

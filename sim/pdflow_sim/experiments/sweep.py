"""`pdflow.sweep`: many points of one scenario, as a table. Its arguments are documented there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdflow.results.extra import notebook_extra
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.executors import TaskExecutor, executor_of
from pdflow_sim.experiments.points import points_of
from pdflow_sim.experiments.rows import SweepRow, SweepTask

if TYPE_CHECKING:
    import pandas as pd

NOT_RUN = "not run: the sweep was interrupted"


def sweep(
    scenario: Scenario,
    points: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    *,
    jobs: int,
    executor: str,
    seeds: int,
    cache: str | os.PathLike[str] | None,
    progress: bool,
) -> pd.DataFrame:
    """Run all points, and return their rows in the order of the points."""
    if jobs < 1 or seeds < 1:
        raise ValueError(f"jobs is {jobs} and seeds is {seeds}, expected at least 1 of each")
    with notebook_extra(), warnings.catch_warnings(action="ignore"):
        import pandas  # before an hour is spent without it
        from tqdm.auto import tqdm  # warns where a notebook has no widgets, and then shows text

    tasks = tasks_of(scenario, points, seeds, cache)
    chosen = executor_of(executor, min(jobs, len(tasks)))
    with tqdm(total=len(tasks), unit="run", disable=not progress) as bar:
        rows, interrupted = run_tasks(tasks, chosen, bar.update)
    table, columns = table_of(tasks, rows)
    frame = pandas.DataFrame(table, columns=columns)
    frame.attrs["interrupted"] = interrupted
    return frame


def tasks_of(
    scenario: Scenario,
    points: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    seeds: int,
    cache: str | os.PathLike[str] | None,
) -> list[SweepTask]:
    """Return the runs of a sweep, in the order of the points."""
    folder = None if cache is None else Path(cache)
    return [SweepTask(scenario, point, nth, folder) for point in points_of(points) for nth in range(seeds)]


def run_tasks(
    tasks: Sequence[SweepTask], executor: TaskExecutor, on_row: Callable[[], object]
) -> tuple[list[SweepRow], bool]:
    """Return the rows of all tasks, in their order, and whether Ctrl-C came before the last one; calls `on_row` after
    each. Rows that were not run say so.
    """
    rows = [SweepRow(error=NOT_RUN)] * len(tasks)
    left = len(tasks)
    try:
        with executor, closing(executor.rows(tasks)) as found:
            for position, row in found:
                rows[position] = row
                left -= 1
                on_row()
    except KeyboardInterrupt:
        pass
    return rows, left > 0


def table_of(tasks: Sequence[SweepTask], rows: Sequence[SweepRow]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a table with a row for each run, and its columns as they first appear, those of the points before all
    others.
    """
    swept = dict.fromkeys(key for task in tasks for key in task.point)
    names = dict.fromkeys(name for row in rows for name in row.figures)
    table = [
        {**task.point, "seed": task.seed if row.seed is None else row.seed, "error": row.error, **row.figures}
        for task, row in zip(tasks, rows, strict=True)
    ]
    return table, [*swept, "seed", "error", *names]

"""One point of a sweep with one seed: the run, and the row that is kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from pdflow.errors import PdflowError
from pdflow.results.result import Result
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.points import Point
from pdflow_sim.experiments.row_cache import find, keep, key_of
from pdflow_sim.run import simulate


def figures_of(result: Result) -> Iterator[tuple[str, Any]]:
    """Yield `Result.summary` as columns; those that not every point has come last.

    Where nothing was completed there are no latencies: as zeros they would be the best of the table.
    """
    summary = result.summary
    served = bool(summary["completed"])
    stages, busy = summary.pop("stages_mean_ms"), summary.pop("gpu_busy_share")
    classes = summary.pop("classes", {})
    del summary["interrupted"]
    for name, value in summary.items():
        yield name, value if served or not name.endswith("_ms") else None
    for stage, mean_ms in stages.items():
        yield f"stage_{stage}_ms", mean_ms if served else None
    yield "gpus", result.totals.gpus
    for role in result.totals.roles():
        yield f"gpus_{role}", sum(engine.gpus for engine in result.totals.engines if engine.role == role)
        yield f"gpu_busy_share_{role}", busy[role]
    for name, figures in classes.items():
        for figure, value in figures.items():
            yield f"class.{name}.{figure}", value if figures["completed"] or not figure.endswith("_ms") else None


class Measure(Protocol):
    """What is kept of a run, as columns. It is pickled, and its `repr` says in a cache which figures a row has."""

    def __call__(self, result: Result, /) -> Iterable[tuple[str, Any]]: ...


@attrs.frozen
class SweepTask:
    """One run of a sweep: `scenario` edited to `point`, with the seed that is `nth` after its own."""

    scenario: Scenario
    point: Point
    nth: int
    cache: Path | None
    measure: Measure = figures_of

    @property
    def seed(self) -> int:
        """The seed of the run, if the point says nothing of seeds."""
        return self.scenario.seed + self.nth

    def run(self, scenario: ResolvedScenario) -> dict[str, Any]:
        """Run its scenario, resolved, and return the figures. Raises KeyboardInterrupt if the run was interrupted: of a
        part of a run no row is made.
        """
        result = simulate(scenario, quiet=True).result
        if result.header.interrupted:
            raise KeyboardInterrupt
        return dict(self.measure(result))


@attrs.frozen
class SweepRow:
    """The outcome of one run of a sweep: figures, or an error."""

    seed: int | None = None
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    error: str | None = None


@attrs.frozen
class PreparedTask:
    """A task that is to be run: its scenario has the edits of its point, and no row of it is in the cache."""

    task: SweepTask
    scenario: Scenario
    seed: int
    key: str | None
    """The key of its row, if the task has a cache."""

    @property
    def resolved(self) -> ResolvedScenario:
        """The scenario to simulate."""
        return attrs.evolve(self.scenario.resolved, seed=self.seed)


def row_of(task: SweepTask) -> SweepRow:
    """Run a task, or find its row in the cache. No error of one point is raised, so that no other row is lost.

    Raises KeyboardInterrupt if the run was interrupted.
    """
    prepared = prepare(task)
    if isinstance(prepared, SweepRow):
        return prepared
    return keep_row(prepared, run_task(task, prepared.resolved))


def prepare(task: SweepTask) -> PreparedTask | SweepRow:
    """Return the task with its scenario; or its row, if the cache has it or the scenario is wrong."""
    seed = None
    try:
        scenario = task.scenario.with_(task.point)
        seed = scenario.seed + task.nth
        if task.cache is None:
            return PreparedTask(task, scenario, seed, None)
        key = key_of(scenario, seed, "" if task.measure is figures_of else repr(task.measure))
        figures = find(task.cache, key)
        return PreparedTask(task, scenario, seed, key) if figures is None else SweepRow(seed, figures)
    except Exception as error:
        return _failed(seed, error)


def run_task(task: SweepTask, scenario: ResolvedScenario) -> SweepRow:
    """Run a task's scenario, without a look at the cache. Raises KeyboardInterrupt if the run was interrupted."""
    try:
        return SweepRow(scenario.seed, task.run(scenario))
    except Exception as error:
        return _failed(scenario.seed, error)


def keep_row(prepared: PreparedTask, row: SweepRow) -> SweepRow:
    """Write the row of a task into its cache, if it has one, and return it; an error is not kept."""
    cache, key = prepared.task.cache, prepared.key
    if cache is None or key is None or row.error is not None:
        return row
    try:
        keep(cache, key, row.figures)
    except Exception as error:
        return _failed(row.seed, error)
    return row


def _failed(seed: int | None, error: Exception) -> SweepRow:
    """Return the row of a run that failed. Errors of ours, and of the machine, are to be seen in the table too."""
    if isinstance(error, PdflowError):
        return SweepRow(seed, error="; ".join(str(error).splitlines()))
    return SweepRow(seed, error=f"{type(error).__name__}: {error}")

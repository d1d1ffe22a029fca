"""Tasks of a sweep or a plan as tasks of Ray, which places them, retries those that a host lost, and cancels them.

Only the driver, that is this process, reads and writes the cache. What a simulation reads from disk, such as a trace,
is read by the worker: hosts must share that file system.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import attrs
import ray

from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.paths import with_paths
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.version import version
from pdflow_sim.experiments.ray_cluster import connect
from pdflow_sim.experiments.rows import PreparedTask, SweepRow, SweepTask, keep_row, prepare, run_task

RETRIES: Final = 2
"""How often a task is run again whose worker process ended, as with its host."""
TASKS_PER_CPU: Final = 2
"""Tasks that are submitted for each CPU, so that none waits for this process."""


class RayPool:
    """Runs tasks on the Ray cluster that this process is connected to, that RAY_ADDRESS names or that this machine
    belongs to; or else on a local one with `jobs` workers, which ends with the pool.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._connected_here = False
        self._run_on_host = ray.remote(num_cpus=1, max_retries=RETRIES)(run_on_host)

    def __enter__(self) -> Self:
        """Connect to Ray, or start it. Raises ScenarioError if there is no cluster at RAY_ADDRESS."""
        if not ray.is_initialized():
            connect(max(1, self._jobs), RETRIES)
            self._connected_here = True
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect, if the pool has connected; a local cluster ends then."""
        if self._connected_here:
            ray.shutdown()

    def rows(self, tasks: Sequence[SweepTask]) -> Generator[tuple[int, SweepRow], None, None]:
        """Yield each task's position and row, in the order in which they end. When it is closed, running tasks are
        cancelled.
        """
        waiting = deque(enumerate(tasks))
        submitted: dict[Any, tuple[int, PreparedTask]] = {}
        try:
            while waiting or submitted:
                limit = max(1, TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))  # clusters grow and shrink
                while waiting and len(submitted) < limit:
                    position, task = waiting.popleft()
                    prepared = prepare(task)
                    if isinstance(prepared, SweepRow):
                        yield position, prepared
                    else:
                        submitted[self._submit(prepared)] = position, prepared
                ended, _ = ray.wait(list(submitted)) if submitted else ([], [])
                for reference in ended:
                    position, prepared = submitted.pop(reference)
                    yield position, keep_row(prepared, _row(reference, prepared.seed))
        finally:
            for reference in submitted:
                ray.cancel(reference, force=True)

    def _submit(self, prepared: PreparedTask) -> Any:
        scenario = prepared.resolved
        # Workers of another host, and those of a cluster that was started elsewhere, have another working directory.
        scenario = attrs.evolve(scenario, path=os.path.abspath(scenario.path))
        return self._run_on_host.remote(prepared.task, scenario, files_of(prepared.scenario), version())


def run_on_host(task: SweepTask, scenario: ResolvedScenario, files: Sequence[str], drivers_version: str) -> SweepRow:
    """Run a task in a worker of Ray. An error that may come from the host names it."""
    host = f"host {platform.node()}"
    if version() != drivers_version:
        return SweepRow(scenario.seed, error=f"{host} has pdflow {version()}, expected {drivers_version}")
    row = run_task(task, scenario)
    missing = [file for file in files if not Path(file).exists()]
    if row.error is None or not missing:
        return row
    shared = "the files of a scenario must be on a file system that all hosts of the cluster share"
    return attrs.evolve(row, error=f"{row.error}; {host} has no {missing[0]}: {shared}")


def files_of(scenario: Scenario) -> list[str]:
    """Return the absolute paths of the files that a scenario names."""
    found: list[str] = []

    def add(path: str) -> str:
        found.append(os.path.abspath(scenario.folder / path))
        return path

    with_paths(scenario.document(), add)
    return found


def _row(reference: Any, seed: int) -> SweepRow:
    """Return the row of a task that has ended; if its worker or its host was lost each time, a row with the reason."""
    try:
        row: SweepRow = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # not of the simulation, whose errors are rows
        cause = error.cause
        needs = "every host of the cluster needs the same pdflow as this one"
        return SweepRow(seed, error=f"a worker of Ray cannot run it: {_one_line(cause)}; {needs}")
    except ray.exceptions.RayError as error:
        return SweepRow(seed, error=f"its worker of Ray was lost, retries included: {_one_line(error)}")
    return row


def _one_line(error: BaseException) -> str:
    """Return what Ray says of an error, without a traceback and its advice to look into log files."""
    text = " ".join(str(error).partition("traceback:")[0].split())
    return text.partition(". ")[0] or type(error).__name__

"""Where the tasks of a sweep or a plan run: in processes of this machine, or on a Ray cluster.

Ray is imported only if it is chosen.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, Self

from pdflow.errors import MissingBackendError
from pdflow_sim.experiments.rows import SweepRow, SweepTask
from pdflow_sim.experiments.workers import WorkerPool


class TaskExecutor(Protocol):
    """Runs tasks from when it is entered until it is closed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """End all tasks that still run."""

    def rows(self, tasks: Sequence[SweepTask], /) -> Generator[tuple[int, SweepRow], None, None]:
        """Yield each task's position and row, in the order in which they end.

        A task whose process ends is a row with the reason. The generator must be closed if it is left before its end,
        and then the executor too.
        """


def executor_of(name: str, jobs: int) -> TaskExecutor:
    """Return the executor of that name. `jobs`: how many tasks run at once; a Ray cluster that is running already has
    its own number.

    Raises MissingBackendError, and ValueError for another name.
    """
    if name == "process":
        return WorkerPool(jobs)
    if name != "ray":
        raise ValueError(f"executor is {name!r}, expected 'process' or 'ray'")
    try:
        from pdflow_sim.experiments.ray_pool import RayPool
    except ModuleNotFoundError as missing:
        raise MissingBackendError(f"the executor ray needs {missing.name}: pip install 'pdflow[ray]'") from None
    return RayPool(jobs)

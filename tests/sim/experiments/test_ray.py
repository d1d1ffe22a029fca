"""The executor `ray`: the same rows as processes, what a lost worker costs, and how it is interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pandas as pd
import pytest
from click.testing import CliRunner

import pdflow
from pdflow.cli import cli
from pdflow.results.result import Result
from pdflow_sim.experiments.executors import executor_of
from pdflow_sim.experiments.rows import SweepRow, SweepTask, figures_of
from pdflow_sim.experiments.sweep import NOT_RUN, run_tasks

TESTS = Path(__file__).parents[2]
SMALL = TESTS / "sim" / "small.toml"
CONVERSATION = TESTS.parent / "examples" / "conversation.toml"
GRID = {"transfer.method": ["nixl-push", "nixl-pull"], "pool.d.replicas": [1, 2, 0]}
LONG = {"workload.requests": 3_000_000, "workload.arrival.rate_rps": 1}

needs_ray = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'pdflow[ray]'"),
]


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pdflow_sim.experiments.ray_pool", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(pdflow.MissingBackendError, match=r"needs ray: pip install 'pdflow\[ray\]'"):
        pdflow.sweep(SMALL, {}, executor="ray", progress=False)
    for command in ("sweep", "plan"):
        ran = CliRunner().invoke(cli, [command, str(CONVERSATION), "--executor", "ray", *_few(command)])
        assert (ran.exit_code, "pip install 'pdflow[ray]'" in ran.output) == (2, True)


def _few(command: str) -> list[str]:
    return ["--gpus", "2", "--slo", "ttft=2s@p95"] if command == "plan" else []


def test_another_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="executor is 'threads', expected 'process' or 'ray'"):
        pdflow.sweep(SMALL, {}, executor="threads", progress=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray with two workers, which all sweeps in the block use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        before = signal.getsignal(signal.SIGTERM)
        with executor_of("ray", 2):
            assert signal.getsignal(signal.SIGTERM) is before
            yield


@pytest.mark.usefixtures("cluster")
class TestOnRay:
    pytestmark = needs_ray

    def test_rows_are_those_of_processes(self) -> None:
        here, there = (swept(GRID, seeds=2, executor=name) for name in ("process", "ray"))
        pd.testing.assert_frame_equal(here, there)
        assert there["error"].isna().sum() == 8

    def test_a_plan_is_that_of_processes(self, tmp_path: Path) -> None:
        for name in ("process", "ray"):
            asked = ["--gpus", "2", "--slo", "ttft=2s@p95,itl=50ms@p99", "--search", "xpyd", "--requests", "100"]
            few = [*asked, "--kind", "disaggregated", "--seeds", "1", "--no-robust", "--jobs", "2", "--executor", name]
            ran = CliRunner().invoke(cli, ["plan", str(CONVERSATION), *few, "--out", str(tmp_path / name)])
            assert ran.exit_code == 0, ran.output
        plans = [(tmp_path / name / "plan.json").read_text() for name in ("process", "ray")]
        assert plans[0] == plans[1]
        rows = [sorted(file.name for file in (tmp_path / name / "runs").iterdir()) for name in ("process", "ray")]
        assert rows[0] == rows[1]

    def test_what_was_run_is_kept_by_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = swept(GRID, cache=tmp_path / "rows", executor="ray")
        assert len(list((tmp_path / "rows").iterdir())) == 4
        monkeypatch.setattr("pdflow_sim.experiments.ray_pool.RayPool._submit", None)
        pd.testing.assert_frame_equal(swept(GRID, cache=tmp_path / "rows", executor="ray"), first)

    def test_a_worker_that_dies_costs_one_row(self) -> None:
        scenario = pdflow.load(SMALL)
        tasks = [SweepTask(scenario, {}, nth, None, DyingMeasure(2)) for nth in range(3)]
        rows, interrupted = run_tasks(tasks, executor_of("ray", 2), lambda: None)
        assert not interrupted
        assert [row.error is None for row in rows] == [True, False, True]
        assert str(rows[1].error).startswith("its worker of Ray was lost, retries included: ")
        assert rows[1].seed == 2

    def test_a_worker_that_dies_once_costs_nothing(self, tmp_path: Path) -> None:
        task = SweepTask(pdflow.load(SMALL), {}, 0, None, DyingMeasure(1, tmp_path / "died"))
        rows, _ = run_tasks([task], executor_of("ray", 2), lambda: None)
        assert rows[0].error is None
        assert (tmp_path / "died").exists()

    def test_files_are_found_from_another_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_trace(tmp_path)
        monkeypatch.chdir(tmp_path)
        frame = pdflow.sweep("traced.toml", {}, executor="ray", progress=False)
        assert frame["completed"].tolist() == [1]

    def test_a_file_that_a_host_lacks_is_named_with_the_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, trace = with_trace(tmp_path)
        prepare = pdflow_prepare()

        def prepare_and_remove(task: SweepTask) -> Any:
            prepared = prepare(task)
            trace.unlink()
            return prepared

        monkeypatch.setattr("pdflow_sim.experiments.ray_pool.prepare", prepare_and_remove)
        error = pdflow.sweep(file, {}, executor="ray", progress=False)["error"].iloc[0]
        assert f"has no {trace}: the files of a scenario must be on a file system" in error

    def test_ctrl_c_keeps_what_is_done_and_cancels_what_runs(self) -> None:
        scenario = pdflow.load(SMALL)
        tasks = [SweepTask(scenario, point, 0, None) for point in ({}, LONG, LONG, LONG)]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))  # while it waits for the second row
        try:
            rows, interrupted = run_tasks(tasks, executor_of("ray", 2), timer.start)
        finally:
            timer.join()
            signal.signal(signal.SIGINT, before)
        assert interrupted
        assert rows[0].error is None
        assert rows[1:] == [SweepRow(error=NOT_RUN)] * 3
        assert_idle()

    def test_closing_the_generator_cancels_what_runs(self) -> None:
        scenario = pdflow.load(SMALL)
        tasks = [SweepTask(scenario, point, 0, None) for point in ({}, LONG, LONG, LONG)]
        with executor_of("ray", 2) as executor, closing(executor.rows(tasks)) as rows:
            assert next(rows)[0] == 0
        assert_idle()


@attrs.frozen
class DyingMeasure:
    """Ends its process for one seed: always, or only if `once` does not exist yet."""

    seed: int
    once: Path | None = None

    def __call__(self, result: Result) -> Iterable[tuple[str, Any]]:
        if result.header.seed == self.seed and not (self.once is not None and self.once.exists()):
            if self.once is not None:
                self.once.touch()
            os._exit(3)
        return figures_of(result)


def swept(points: Any, **options: Any) -> pd.DataFrame:
    return pdflow.sweep(SMALL, points, jobs=2, progress=False, **options)


def with_trace(folder: Path) -> tuple[Path, Path]:
    """Write a scenario with a trace of one request, and return the two files."""
    trace = folder / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 50, "output_length": 9, "hash_ids": [1]}\n')
    traced = {"workload": {"trace": {"path": str(trace), "format": "mooncake"}}}
    pdflow.load(SMALL).with_(traced).save(folder / "traced.toml")
    return folder / "traced.toml", trace


def pdflow_prepare() -> Any:
    from pdflow_sim.experiments import ray_pool

    return ray_pool.prepare


def assert_idle() -> None:
    """Assert that no task runs any more: that all CPUs are free, as soon as Ray has noticed that."""
    import ray

    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < deadline, "a cancelled task goes on"
        time.sleep(0.05)

"""`pdflow.sweep`: order, processes, what goes wrong, what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import pdflow
import pdflow_sim.experiments.rows
import pdflow_sim.experiments.workers
from pdflow_sim.experiments.points import points_of
from pdflow_sim.experiments.rows import SweepRow, SweepTask
from pdflow_sim.experiments.sweep import NOT_RUN

SMALL = Path(__file__).parents[1] / "small.toml"
GRID = {"transfer.method": ["nixl-push", "nixl-pull"], "pool.d.replicas": range(1, 3)}


def swept(points: Any, **options: Any) -> pd.DataFrame:
    return pdflow.sweep(SMALL, points, **{"progress": False, **options})


def test_points_are_every_combination_the_last_key_fastest() -> None:
    assert points_of({"a": [1, 2], "b": range(2)}) == [
        {"a": 1, "b": 0},
        {"a": 1, "b": 1},
        {"a": 2, "b": 0},
        {"a": 2, "b": 1},
    ]
    assert points_of([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]
    assert points_of({}) == [{}]
    assert points_of({"a": iter([1, 2])}) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("points", [{"transfer.method": "nixl-pull"}, {"slo.ttft_ms": 5}, ["transfer.method"]])
def test_what_is_no_list_of_values_is_refused(points: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        swept(points)


def test_a_row_has_its_point_its_seed_and_its_figures() -> None:
    frame = swept(GRID, seeds=2)
    assert list(frame.columns[:4]) == ["transfer.method", "pool.d.replicas", "seed", "error"]
    assert frame["transfer.method"].tolist() == ["nixl-push"] * 4 + ["nixl-pull"] * 4
    assert frame["pool.d.replicas"].tolist() == [1, 1, 2, 2] * 2
    assert frame["seed"].tolist() == [1, 2] * 4
    assert frame["error"].isna().all()
    assert frame["gpus"].tolist() == [3, 3, 4, 4] * 2
    assert frame.attrs == {"interrupted": False}
    edits = {"transfer.method": "nixl-pull", "pool.d.replicas": 2}
    summary = pdflow.simulate(SMALL, seed=2, overrides=edits).summary
    row = frame.iloc[-1]
    for name in ("requests", "completed", "failed", "ttft_p99_ms", "requests_per_s", "bytes_moved"):
        assert row[name] == summary[name]
    assert row["stage_prefill_ms"] == summary["stages_mean_ms"]["prefill"]
    assert row["gpu_busy_share_decode"] == summary["gpu_busy_share"]["decode"]
    assert row["gpus_decode"] == 2


def test_a_point_that_completed_nothing_is_the_fastest_of_none() -> None:
    frame = swept({"workload.client": [{}, {"timeout_s": 1e-6}]})
    assert frame["completed"].tolist() == [40, 0]
    assert frame["error"].isna().all()
    for name in ("ttft_p99_ms", "e2e_mean_ms", "stage_prefill_ms"):
        assert frame[name].isna().tolist() == [False, True]
    assert frame.nsmallest(1, "ttft_p99_ms")["completed"].tolist() == [40]


def test_no_points_are_no_rows() -> None:
    frame = swept([], jobs=2)
    assert (len(frame), list(frame.columns)) == (0, ["seed", "error"])


def test_processes_change_nothing_but_the_time(tmp_path: Path) -> None:
    points = [*points_of(GRID), {"workload.arrival.rate_rps": 500}, {"transfer.method": "x"}]
    alone, together = swept(points), swept(points, jobs=3)
    pd.testing.assert_frame_equal(alone, together)
    assert "workload.arrival.rate_rps" in alone
    assert alone["error"].isna().tolist() == [True] * 5 + [False]


def test_a_point_that_cannot_be_run_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = swept({"pool.d.replicas": [1, 0], "slo.ttft_ms": [9, -1]})
    assert frame["error"].isna().tolist() == [True, False, False, False]
    both = frame["error"].iloc[3]
    assert both.startswith("edit pool.d.replicas=0: pool.d.replicas: is 0")
    assert "; edit slo.ttft_ms=-1: slo.ttft_ms: is -1, expected a number above 0" in both
    assert frame["seed"].tolist() == [1] * 4
    assert frame["ttft_p99_ms"].isna().tolist() == frame["error"].notna().tolist()

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(pdflow_sim.experiments.rows, "simulate", broken)
    assert swept({})["error"].tolist() == ["ZeroDivisionError: of ours"]


def test_all_that_is_wrong_with_the_scenario_itself_is_raised() -> None:
    with pytest.raises(pdflow.ScenarioError, match="cannot be read"):
        pdflow.sweep("absent.toml", {})
    with pytest.raises(ValueError, match="jobs is 0"):
        swept({}, jobs=0)


def test_what_was_run_is_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = swept(GRID, cache=tmp_path / "rows", seeds=2)
    assert len(list((tmp_path / "rows").iterdir())) == 8
    monkeypatch.setattr(pdflow_sim.experiments.rows, "simulate", None)
    pd.testing.assert_frame_equal(swept(GRID, cache=tmp_path / "rows", seeds=2), first)
    # It is found by what it says: push to 2 engines is what the file has, and a name changes no figure.
    again = swept([{"scenario.seed": 2, "scenario.name": "other"}], cache=tmp_path / "rows")
    assert again["ttft_mean_ms"].iloc[0] == first["ttft_mean_ms"].iloc[3]
    # Half a file, as of a disk that was full, is none.
    for file in (tmp_path / "rows").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert swept(GRID, cache=tmp_path / "rows")["error"].notna().all()


def test_a_changed_file_is_another_scenario(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 50, "output_length": 9, "hash_ids": [1]}\n'
    trace.write_text(row % 0)
    scenario = pdflow.load(SMALL).with_({"workload": {"trace": {"path": trace, "format": "mooncake"}}})
    rows = [pdflow.sweep(scenario, {}, cache=tmp_path / "rows", progress=False)["requests"].iloc[0]]
    trace.write_text(row % 0 + row % 9)
    rows.append(pdflow.sweep(scenario, {}, cache=tmp_path / "rows", progress=False)["requests"].iloc[0])
    assert rows == [1, 2]


def test_lengths_next_to_a_clients_rates_belong_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "a-trace.csv").write_text("0,8,1,Gamma,1,1\n")
    lengths = folder / "a-dataset.json"
    workload = {"trace": {"path": folder / "a-trace.csv", "format": "servegen"}, "requests": 3}
    moved = []
    for tokens in (16, 64):
        lengths.write_text(json.dumps({"0": {"input_tokens": f"{{{tokens}: 1}}", "output_tokens": "{3: 1}"}}))
        moved += swept([{"workload": workload}], cache=tmp_path / "rows")["bytes_moved"].tolist()
    assert moved[1] == 4 * moved[0] > 0


def test_a_process_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: the row says so, and another process goes on."""
    ended = pdflow_sim.experiments.workers.Worker.ended
    killed: list[int] = []

    def dies_once(worker: pdflow_sim.experiments.workers.Worker) -> SweepRow | None:
        row = ended(worker)
        if killed:
            return row
        killed.append(worker._process.pid)
        os.kill(worker._process.pid, signal.SIGKILL)
        return None

    monkeypatch.setattr(pdflow_sim.experiments.workers.Worker, "ended", dies_once)
    frame = swept(GRID, jobs=2)
    assert frame["error"].notna().sum() == 1
    assert frame["error"].dropna().iloc[0] == "the worker process was ended by signal 9"


def test_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate = pdflow_sim.experiments.rows.simulate
    runs: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return simulate(*arguments, **options)

    monkeypatch.setattr(pdflow_sim.experiments.rows, "simulate", interrupted)
    frame = swept(GRID)
    assert frame.attrs == {"interrupted": True}
    assert frame["error"].isna().tolist() == [True, True, False, False]
    assert set(frame["error"].dropna()) == {NOT_RUN}
    assert frame["completed"].iloc[:2].tolist() == [40, 40]


INTERRUPTED = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
import pdflow
long = {"workload.requests": 3_000_000, "workload.arrival.rate_rps": 1}
short = {"workload.requests": 1}
if sys.argv[2] == "1":
    import pdflow_sim.experiments.rows
    simulate = pdflow_sim.experiments.rows.simulate
    def interrupting(resolved, **options):
        if resolved.workload.requests > 1:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return simulate(resolved, **options)
    pdflow_sim.experiments.rows.simulate = interrupting
else:
    import pdflow_sim.experiments.workers
    ended = pdflow_sim.experiments.workers.Worker.ended
    def interrupting(worker):
        os.kill(os.getpid(), signal.SIGINT)
        return ended(worker)
    pdflow_sim.experiments.workers.Worker.ended = interrupting
frame = pdflow.sweep(sys.argv[1], [short, long, long], jobs=int(sys.argv[2]), progress=False)
print(frame["error"].isna().tolist(), frame.attrs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_ends_a_sweep_of_a_script_without_a_guard(jobs: int, tmp_path: Path) -> None:
    """A process that is spawned would run the script once more; and long runs end with those who asked for them."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    ran = subprocess.run(
        [sys.executable, str(script), str(SMALL), str(jobs)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"[{jobs == 1}, False, False] {{'interrupted': True}}"]


ABANDONED = """
import sys
import pdflow
import pdflow_sim.experiments.workers
begin = pdflow_sim.experiments.workers.Worker.begin
def telling(worker, task):
    begin(worker, task)
    print(worker._process.pid, flush=True)
pdflow_sim.experiments.workers.Worker.begin = telling
long = {"workload.requests": 3_000_000, "workload.arrival.rate_rps": 1}
pdflow.sweep(sys.argv[1], [long, long], jobs=2, progress=False)
"""


@pytest.mark.slow
def test_workers_end_with_a_master_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABANDONED)
    with subprocess.Popen(
        [sys.executable, str(script), str(SMALL)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as master:
        assert master.stdout is not None
        workers = [int(master.stdout.readline()) for _ in range(2)]
        master.kill()
    deadline = time.monotonic() + 60
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker goes on without its master"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether there is such a process, and it is not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_tasks_have_the_seed_that_they_would_run_with() -> None:
    assert SweepTask(pdflow.load(SMALL), {}, 3, None).seed == 4

"""`pdflow sweep`: its points, its table, its CSV file, what is not run twice, and how it ends."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pdflow
import pdflow_sim.experiments.rows
from pdflow.cli import cli
from pdflow.errors import ScenarioError
from pdflow_sim.experiments.sweep import NOT_RUN
from pdflow_sim.experiments.sweep_command import read_sets

SMALL = Path(__file__).parents[1] / "small.toml"
GRID = ("--set", "transfer.method=nixl-push,nixl-pull", "--set", "pool.d.replicas=1,2")


def sweep(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["sweep", str(SMALL), *map(str, arguments)], prog_name="pdflow")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_values_are_read_as_set_reads_them() -> None:
    texts = ("a.b=3,4", "c.d=nixl-push, nixl-pull", 'e.f={ x = 1, y = "," }', "g.h=[1,2],[3]", "i.j=1_000", "k.l='a,b'")
    fixed, grid = read_sets(texts)
    assert fixed == {"e.f": {"x": 1, "y": ","}, "i.j": 1000, "k.l": "a,b"}
    assert grid == {"a.b": [3, 4], "c.d": ["nixl-push", "nixl-pull"], "g.h": [[1, 2], [3]]}
    with pytest.raises(ScenarioError) as caught:
        read_sets(["a.b=1", "a.b=2,3", "nothing"])
    first, second = str(caught.value).splitlines()
    assert first.startswith("--set a.b=2,3: the key is there twice")
    assert second == "--set nothing: expected key=value, as in --set pool.decode.tp=2"


def test_its_rows_are_those_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "out" / "s.csv"
    result = sweep(*GRID, "--set", "workload.requests=30", "--csv", file)
    assert result.exit_code == 0, result.output
    grid = {"transfer.method": ["nixl-push", "nixl-pull"], "pool.d.replicas": [1, 2]}
    frame = pdflow.sweep(pdflow.load(SMALL, {"workload.requests": 30}), grid, progress=False)
    found = rows(file)
    assert list(found[0]) == list(frame.columns)
    assert [float(row["ttft_p99_ms"]) for row in found] == frame["ttft_p99_ms"].tolist()
    heading, names, *table = (line.split() for line in result.stdout.splitlines())
    assert heading[:2] == ["transfer", "d"]
    assert names[:3] == ["method", "replicas", "GPUs"]
    assert [line[:3] for line in table] == [
        ["nixl-push", "1", "3"],
        ["nixl-push", "2", "4"],
        ["nixl-pull", "1", "3"],
        ["nixl-pull", "2", "4"],
    ]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_seeds_are_rows() -> None:
    result = sweep("--seeds", 2, "--set", "workload.requests=10")
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [["seed", "GPUs"], ["1", "4"], ["2", "4"]]


def test_a_point_that_cannot_be_run_costs_no_other_one(tmp_path: Path) -> None:
    result = sweep("--set", "pool.d.replicas=1,0", "--set", "workload.requests=10", "--csv", tmp_path / "s.csv")
    assert result.exit_code == 2
    text = " ".join(result.stdout.split())
    assert "1 of 2 runs: edit pool.d.replicas=0: pool.d.replicas: is 0, expected a number of at least 1" in text
    assert "not run" in text
    good, bad = rows(tmp_path / "s.csv")
    assert (good["error"], bad["ttft_p99_ms"]) == ("", "")
    assert bad["error"].startswith("edit pool.d.replicas=0")


def test_a_wrong_scenario_is_one_error() -> None:
    result = sweep("--set", "pool.d.tpp=2", "--set", "pool.d.replicas=1,2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pool.d.tpp: unknown key (did you mean tp?)" in result.stderr


def test_it_is_quiet(tmp_path: Path) -> None:
    result = sweep(*GRID, "--set", "workload.requests=5", "--quiet", "--csv", tmp_path / "s.csv")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_what_an_interrupted_sweep_finished_is_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ran = pdflow_sim.experiments.rows.simulate, []

    def run(scenario: Any, **options: Any) -> Any:
        ran.append(scenario.pools[1].replicas)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(scenario, **options)

    monkeypatch.setattr(pdflow_sim.experiments.rows, "simulate", run)
    arguments = ("--set", "pool.d.replicas=1,2,3,4", "--cache", tmp_path / "rows", "--csv", tmp_path / "s.csv")
    first = sweep(*arguments)
    assert first.exit_code == 130
    assert "interrupted: 2 of 4 runs are done, and the same command goes on from there" in " ".join(
        first.stderr.split()
    )
    assert [row["error"] for row in rows(tmp_path / "s.csv")] == ["", "", NOT_RUN, NOT_RUN]
    second = sweep(*arguments)
    assert (second.exit_code, ran) == (0, [1, 2, 3, 3, 4])
    assert [row["error"] for row in rows(tmp_path / "s.csv")] == [""] * 4


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_it_with_the_rows_so_far(tmp_path: Path, jobs: int, number: signal.Signals) -> None:
    endless = ("--set", "workload.requests=5,100000000,100000001", "--jobs", str(jobs))
    files = ("--cache", str(tmp_path / "rows"), "--csv", str(tmp_path / "s.csv"))
    with subprocess.Popen(
        [sys.executable, "-m", "pdflow", "sweep", str(SMALL), *endless, *files],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 30
            while not list(tmp_path.glob("rows/*.json")):
                assert time.monotonic() < deadline, "no row was kept"
                time.sleep(0.05)
            time.sleep(0.2)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted: 1 of 3 runs are done" in " ".join(err.split())
    assert "not run" in out
    assert [bool(row["error"]) for row in rows(tmp_path / "s.csv")] == [False, True, True]


def test_the_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[3]
    (command,) = re.findall(r"^pdflow (sweep .+)$", (root / "docs/sweep.md").read_text(encoding="utf-8"), re.MULTILINE)
    tmp_path.joinpath("examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, shlex.split(command.replace("requests=500", "requests=20")), prog_name="pdflow")
    assert result.exit_code == 0, result.output
    assert [row["pool.decode.replicas"] for row in rows(tmp_path / "decode.csv")] == ["3", "4", "5"]

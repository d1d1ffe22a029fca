"""`pdflow compare`: runs that the command wrote, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pdflow_sim.experiments.compare
from pdflow.cli import cli

ROOT = Path(__file__).resolve().parents[2]


def pdflow_command(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="pdflow")


def simulated(out: Path, *args: object) -> Path:
    sets = ("--set", "workload.requests=60", "--out", out, "--quiet")
    assert pdflow_command("simulate", ROOT / "examples/reference.toml", *sets, *args).exit_code == 0
    return out


@pytest.fixture
def push_and_pull(tmp_path: Path) -> tuple[Path, Path]:
    push = simulated(tmp_path / "push")
    return push, simulated(tmp_path / "pull", "--set", "transfer.method=nixl-pull")


def test_it_finds_in_which_stage_two_runs_differ(push_and_pull: tuple[Path, Path]) -> None:
    push, pull = push_and_pull
    result = pdflow_command("compare", push, pull / "results.json", "--json")
    assert result.exit_code == 0, result.output
    [against] = json.loads(result.stdout)["against_first"]
    assert against["paired"]
    # A pull adds a hop from the router to D; the prompts take as long.
    assert against["differences"]["handoff_ms"]["low"] > 0
    assert against["differences"]["prefill_ms"]["difference"] == 0
    assert result.stdout == pdflow_command("compare", push, pull, "--json").stdout


def test_the_table_names_both_and_shows_every_stage(push_and_pull: tuple[Path, Path]) -> None:
    result = pdflow_command("compare", *push_and_pull)
    assert result.exit_code == 0, result.output
    for text in ("B against A", "same", "TTFT p99, ms", "xfer_wire, ms", "SLO met, %", "95 % interval"):
        assert text in result.stdout


def test_scenario_files_are_simulated_and_compared_as_their_folders_are(push_and_pull: tuple[Path, Path]) -> None:
    reference, sets = ROOT / "examples/reference.toml", ("--set", "workload.requests=60")
    push, pull = push_and_pull
    simulated_now = pdflow_command("compare", reference, pull, *sets, "--json")
    assert simulated_now.exit_code == 0, simulated_now.output
    expected, found = (json.loads(it.stdout) for it in (pdflow_command("compare", push, pull, "--json"), simulated_now))
    assert found["runs"][0].pop("path") == str(reference)
    del expected["runs"][0]["path"]
    assert found == expected


def test_several_seeds_of_scenario_files_are_those_of_their_folders(tmp_path: Path) -> None:
    reference, sets = ROOT / "examples/reference.toml", ("--set", "workload.requests=60")
    folder = simulated(tmp_path / "seeds", "--seeds", "3")
    result = pdflow_command("compare", folder, reference, *sets, "--seeds", "3", "--json")
    assert result.exit_code == 0, result.output
    [against] = json.loads(result.stdout)["against_first"]
    assert against["over"] == "paired seeds"
    assert all((it["low"], it["difference"], it["high"]) == (0, 0, 0) for it in against["differences"].values())
    assert {"itl_p99_ms", "prefill_ms", "slo_attainment", "goodput_rps"} <= against["differences"].keys()


def test_nothing_is_simulated_before_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdflow_sim.experiments.compare, "prepare", None)
    reference = ROOT / "examples/reference.toml"
    for args, expected in (
        ((reference, tmp_path), "neither"),
        ((reference, tmp_path / "nowhere.toml"), "nowhere.toml"),
        ((reference, reference, "--set", "pool.prefil.tp=2"), "prefil"),
        ((tmp_path, tmp_path, "--set", "workload.requests=1"), "scenario file"),
        ((tmp_path, tmp_path, "--seeds", "2"), "scenario file"),
    ):
        result = pdflow_command("compare", *args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr


def test_an_incomplete_run_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdflow_sim.experiments.compare, "run", lambda world, oracle, drain: True)
    reference = ROOT / "examples/reference.toml"
    result = pdflow_command("compare", reference, reference)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_it_refuses_what_is_no_result(tmp_path: Path, push_and_pull: tuple[Path, Path]) -> None:
    result = pdflow_command("compare", push_and_pull[0], tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "nowhere" in result.stderr


def test_one_run_is_nothing_to_compare(push_and_pull: tuple[Path, Path]) -> None:
    assert pdflow_command("compare", push_and_pull[0]).exit_code == 2

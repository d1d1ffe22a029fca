"""The command `pdflow check`: what it says, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdflow.cli import cli
from pdflow.protocol.dialect import STRICT
from pdflow_sim.check import command
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.swarm import BLOCK, ERA, cluster_of
from pdflow_sim.check.suites import scopes as scopes_suite

ROOT = Path(__file__).resolve().parents[2]
REPLAYS = sorted((ROOT / "tests/replays").glob("*.json"))


def pdflow(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, arguments)], catch_exceptions=False)


def test_scopes_that_hold(tmp_path: Path) -> None:
    ran = pdflow("scopes", "--only", "pull in two pieces", "--jobs", "1", "--out", tmp_path / "out")
    assert ran.exit_code == 0
    assert "2 of 2 hold" in ran.stdout
    assert not (tmp_path / "out").exists()


def test_the_output_is_the_same_with_several_processes() -> None:
    alone, together = (
        pdflow("scopes", "--only", "compat pull", "--json", "--jobs", jobs).stdout for jobs in ("1", "2")
    )
    without_time = [
        [{key: value for key, value in row.items() if key != "seconds"} for row in json.loads(text)["scopes"]]
        for text in (alone, together)
    ]
    assert without_time[0] == without_time[1]
    assert len(without_time[0]) > 1
    assert all(row["states"] > 10 and row["counterexample"] is None for row in without_time[0])


def test_a_broken_invariant_writes_a_counterexample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Named("planted", Scope(dup=1), frozenset())
    monkeypatch.setattr(scopes_suite, "SCOPES", (named,))
    with MUTANTS["no-tombstone"].applied():
        ran = pdflow("scopes", "--jobs", "1", "--out", tmp_path)
        again = pdflow("--replay", tmp_path / "planted.json")
    assert ran.exit_code == 1
    assert "S1 broken" in ran.stdout
    assert str(tmp_path / "planted.json") in ran.stdout.replace("\n", "")
    assert again.exit_code == 1
    assert "S1: " in again.stdout
    # Without the mutant the same moves go elsewhere, and the replay says where.
    mended = pdflow("--replay", tmp_path / "planted.json")
    assert mended.exit_code == 1
    assert "step " in mended.stderr


def test_goals_that_are_never_reached_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes_suite, "SCOPES", (Named("idle", Scope(pulls=True), frozenset({"late REG refused"})),))
    ran = pdflow("scopes", "--jobs", "1")
    assert ran.exit_code == 1
    assert "goals not reached: late REG refused" in " ".join(ran.stdout.split())


def test_a_budget_that_runs_out_is_no_pass() -> None:
    ran = pdflow("scopes", "--only", "drop and duplicate", "--budget", "0", "--jobs", "1")
    assert ran.exit_code == 3
    assert "stopped: time" in ran.stdout


@pytest.mark.parametrize("arguments", [["mutnats"], ["scopes", "--only", "no such"], ["--replay", "missing.json"]])
def test_what_does_not_exist_is_bad_input(arguments: list[str]) -> None:
    ran = pdflow(*arguments)
    assert ran.exit_code == 2
    assert ran.stderr.strip()


@pytest.mark.parametrize("file", REPLAYS, ids=lambda file: file.stem)
def test_counterexamples_replay_and_are_drawn(file: Path) -> None:
    result = pdflow("--replay", file)
    assert result.exit_code == 0, result.output
    drawn = pdflow("--diagram", file)
    assert drawn.exit_code == 0
    assert "```mermaid\nsequenceDiagram" in drawn.stdout
    assert all(len(line) <= 100 for line in drawn.stdout.split("```mermaid")[0].splitlines())


def test_mutants_and_walks(tmp_path: Path) -> None:
    ran = pdflow("mutants", "--only", "tombstone", "--json")
    assert ran.exit_code == 0
    assert {row["as_expected"] for row in json.loads(ran.stdout)["mutants"]} == {True}
    ran = pdflow("walk", "--budget", "1", "--dialect", "strict", "--jobs", "1", "--out", tmp_path)
    assert ran.exit_code == 0
    assert "nothing broken" in ran.stdout


def test_as_many_walks_as_are_asked_for() -> None:
    ran = pdflow("walk", "--runs", "700", "--json", "--jobs", "1")
    assert ran.exit_code == 0
    assert [(row["dialect"], row["runs"]) for row in json.loads(ran.stdout)["walk"]] == [
        ("strict", 700),
        ("vllm-compat", 700),
    ]


def test_all_walks_through_each_cluster_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever machine, unless there is a budget."""
    walked, era = range(1, command.RUNS_OF_ALL + 1), range(0, ERA, BLOCK)
    assert {cluster_of(seed, STRICT) for seed in walked} == {cluster_of(seed, STRICT) for seed in era}
    monkeypatch.setattr(command, "SUITES", ("walk",))
    monkeypatch.setattr(command, "RUNS_OF_ALL", 600)
    for options, runs in (((), 600), (("--runs", "500"), 500)):
        ran = pdflow("all", "--json", "--jobs", "1", *options)
        assert ran.exit_code == 0
        assert [row["runs"] for row in json.loads(ran.stdout)["walk"]] == [runs, runs]
    assert pdflow("all", "--budget", "0.1", "--jobs", "1").exit_code == 0


def test_fewer_walks_than_were_asked_for_are_no_pass() -> None:
    ran = pdflow("walk", "--runs", "1000000", "--budget", "0.1", "--dialect", "strict", "--jobs", "1")
    assert ran.exit_code == 3


def test_a_record_is_followed_by_the_same_machine(tmp_path: Path) -> None:
    runner = CliRunner()
    scenario = str(ROOT / "examples/conversation.toml")
    few = ["--set", "workload.requests=20", "--out", str(tmp_path), "--events", "--quiet"]
    assert runner.invoke(cli, ["simulate", scenario, *few]).exit_code == 0
    record = tmp_path / "events.jsonl"
    ran = pdflow(scenario, "--trace", record)
    assert ran.exit_code == 0
    assert "events replayed, with the recorded" in " ".join(ran.stdout.split())
    lines = record.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"type":"PostWrite"' in line)
    record.write_text("\n".join([*lines[:at], *lines[at + 1 :]]) + "\n")
    ran = pdflow(scenario, "--trace", record)
    assert ran.exit_code == 1
    assert f"events.jsonl:{at + 1}: " in ran.stderr
    assert "expected: {'type': 'PostWrite'" in ran.stderr


def test_a_scenario_is_run_under_the_oracle(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    text = (ROOT / "examples/reference.toml").read_text().replace("requests = 10000", "requests = 20")
    scenario.write_text(text)
    ran = pdflow(scenario, "--budget", "0.01")
    assert ran.exit_code == 0
    assert "S1 to S9 hold on every event" in " ".join(ran.stdout.split())

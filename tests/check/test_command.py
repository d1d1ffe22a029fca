"""The command `pdflow check`: what it says, what it writes, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pdflow.cli import cli
from pdflow.methods.catalogue import METHODS
from pdflow.protocol.dialect import STRICT
from pdflow_sim.check import command, quick
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.report import scopes_table
from pdflow_sim.check.routers.catalogue import SETTINGS
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore
from pdflow_sim.check.search.swarm import BLOCK, CLUSTERS, ERA, cluster_of, is_wide
from pdflow_sim.check.search.workers import Searched
from pdflow_sim.check.suites import scopes as scopes_suite
from pdflow_sim.check.suites.suite import CheckOptions

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mutnats"], "unknown check 'mutnats'; did you mean mutants?"),
        (["R13"], "unknown check 'R13'; did you mean --diagram R13?"),
        (["R99"], "unknown check 'R99'; races are R01 to R52: --diagram R13 draws one"),
        (["no-tombstone"], "unknown check 'no-tombstone'; did you mean mutants --only no-tombstone?"),
        (["two requests"], "unknown check 'two requests'; did you mean scopes --only \"two requests\"?"),
        (["story.json"], "unknown check 'story.json'; did you mean --replay story.json or --diagram story.json?"),
        (["carrier-pigeon"], "unknown check 'carrier-pigeon'; expected quick, all, scopes, methods, routers, mutants"),
        (["--diagram", "R99"], "R99: "),
        (["--replay", "missing.json"], "missing.json: cannot be read"),
        (
            ["scopes", "--only", "no such"],
            "no scope has 'no such' in its name: `pdflow check scopes --list`",
        ),
        (["scopes", "--dialect", "vllm-stock"], "no scope of vllm-stock: "),
        (["--only", "pull"], "--only: needs WHAT, such as scopes"),
        (["--large"], "--large: needs WHAT"),
        (["--set", "drop=1"], "--set: needs WHAT scope: pdflow check scope --set drop=1"),
        (["walk", "--list"], "--list: there are no names in walk; expected scopes, races, mutants, methods, routers"),
    ],
)
def test_what_does_not_exist_is_bad_input(arguments: list[str], message: str) -> None:
    ran = pdflow(*arguments)
    assert ran.exit_code == 2
    assert ran.stderr.startswith(message)
    assert len(ran.stderr.splitlines()) == 1


def test_without_what_it_is_quick_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quick, "SUITES", ("scopes", "walk"))
    monkeypatch.setattr(quick, "MAX_STATES", 100)
    monkeypatch.setattr(quick, "RUNS", 50)
    ran = pdflow("--jobs", "1", "--out", tmp_path)
    assert ran.exit_code == 0
    small = [named for named in SCOPES if 0 < named.states <= 100 and not named.nightly]
    larger = sum(not named.nightly for named in SCOPES) - len(small)
    nightly = sum(named.nightly for named in SCOPES)
    text = " ".join(ran.stdout.split())
    assert f"{len(small)} of {len(small)} hold" in text
    assert "strict: 50 runs" in text
    assert (
        f"It left out: {larger} scopes of more than 100 states or of a pair of faults, {len(MUTANTS)} mutants" in text
    )
    assert (
        "settings of a router alone, random walks 50 to 6,400 of each dialect: `pdflow check all`, about 6 CPU minutes"
        in text
    )
    assert f"{nightly} nightly scopes: `pdflow check all --large`" in text


def test_the_quick_check_takes_half_a_minute_on_two_cores() -> None:
    """At 35,000 states per CPU second, next to 10 s of methods and walks."""
    chosen = scopes_suite.chosen(quick.narrowed(CheckOptions()))
    assert {"drop and duplicate", "pull", "compat", "router, no timer"} <= {named.name for named in chosen}
    assert 0 < sum(named.states for named in chosen) < 1_300_000
    assert set(quick.SUITES) < set(command.SUITES)


def test_nightly_scopes_are_searched_only_with_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_day = Named("pull by day", Scope(pulls=True, clocks=False), frozenset(), 1)
    nightly = [Named(f"pull by night {i}", Scope(pulls=True, clocks=False), frozenset(), nightly=True) for i in (1, 2)]
    monkeypatch.setattr(scopes_suite, "SCOPES", (by_day, *nightly))
    options = ("--only", "pull", "--jobs", "1", "--out", tmp_path)
    ran = pdflow("scopes", *options)
    assert ran.exit_code == 0
    assert "1 of 1 hold" in ran.stdout
    assert "not searched of those that match 'pull': 2 nightly scopes; --large includes them" in ran.stdout
    ran = pdflow("scopes", *options, "--large")
    assert "3 of 3 hold" in ran.stdout
    assert "nightly scope" not in ran.stdout
    ran = pdflow("scopes", "--only", "night 2")
    assert (ran.exit_code, ran.stderr) == (2, "--only: 'night 2' matches only 1 nightly scope; --large includes it\n")


def test_a_scope_of_one_s_own(tmp_path: Path) -> None:
    ran = pdflow("scope", "--set", "drop=1", "--set", "pulls=true", "--jobs", "1", "--json", "--out", tmp_path)
    assert ran.exit_code == 0
    (row,) = json.loads(ran.stdout)["scope"]
    assert row["scope"] == "pulls=true drop=1"
    found = explore(relation(Scope(drop=1, pulls=True)))
    assert (row["states"], row["transitions"]) == (found.states, found.transitions)
    assert "goals reached: " in ran.stderr
    assert "delivered" in ran.stderr


def test_a_scope_of_one_s_own_that_breaks_writes_a_counterexample(tmp_path: Path) -> None:
    with MUTANTS["no-tombstone"].applied():
        ran = pdflow("scope", "--set", "dup=1", "--jobs", "1", "--out", tmp_path)
    assert ran.exit_code == 1
    assert (tmp_path / "dup-1.json").exists()


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (["dorp=1"], ["--set dorp=1: unknown field (did you mean drop?)"]),
        (["zzz=1"], ["--set zzz=1: unknown field; `pdflow check scope --list` lists the fields"]),
        (["drop"], ["--set drop: expected FIELD=VALUE"]),
        (["drop=few"], ['--set drop=few: is "few", expected a whole number']),
        (["drop=-1"], ["--set drop=-1: is -1, expected 0 to 1000"]),
        (["pulls=1"], ['--set pulls=1: is "1", expected true or false']),
        (
            ["p_tp=9", "d_block=9"],
            ["--set p_tp=9: is 9, expected 1 to 8", "--set d_block=9: is 9, expected 8, 16"],
        ),
        (["dialect=strickt"], ['--set dialect=strickt: is "strickt", expected one of strict, vllm-compat, vllm-stock']),
        (["method=nixl-psuh"], ['--set method=nixl-psuh: is "nixl-psuh", expected']),
        (["method=nixl-pull"], ["--set: method=nixl-pull needs pulls=true"]),
        (["streams=true"], ["--set: streams=true needs attempts"]),
        (["groups=2", "d_block=32"], ["--set: groups=2 needs d_block=16 or less"]),
        (["method=cpu-staged", "dialect=vllm-compat"], ["--set: method=cpu-staged has no dialect vllm-compat"]),
        (["orphan=true", "horizon=2"], ["--set: orphan=true excludes horizon and attempts"]),
    ],
)
def test_a_scope_that_cannot_be_is_bad_input(settings: list[str], problems: list[str]) -> None:
    ran = pdflow("scope", *(argument for setting in settings for argument in ("--set", setting)))
    assert ran.exit_code == 2
    lines = ran.stderr.splitlines()
    assert len(lines) == len(problems)
    assert all(line.startswith(problem) for line, problem in zip(lines, problems, strict=True))


def test_names_are_listed_one_a_line() -> None:
    ran = pdflow("--list")
    assert ran.exit_code == 0
    rows = json.loads(pdflow("--list", "--json").stdout)
    assert {kind: len(found) for kind, found in rows.items()} == {
        "scopes": len(SCOPES),
        "races": len(RACES),
        "mutants": len(MUTANTS),
        "methods": len(METHODS),
        "routers": len(SETTINGS),
    }
    assert len(ran.stdout.splitlines()) == len(rows) + sum(map(len, rows.values()))
    for names in ([named.name for named in SCOPES], RACES, MUTANTS, METHODS):
        assert all(name in ran.stdout for name in names)
    few = pdflow("mutants", "--list", "--only", "tombstone").stdout.splitlines()
    assert any(line.startswith("  no-tombstone (S1): ") for line in few)
    assert len(few) < 10


def test_the_fields_of_a_scope_are_listed() -> None:
    lines = pdflow("scope", "--list").stdout.splitlines()
    assert [line.split("=")[0].strip() for line in lines[1:]] == [field.name for field in attrs.fields(Scope)]
    assert "  chunks=1 (1 to 7): pieces in which an operation reads its source and lands" in lines


def test_no_name_is_cut_at_80_columns() -> None:
    longest = max((named for named in SCOPES if not named.nightly), key=lambda named: len(named.name))
    table = Console(width=80, file=io.StringIO(), record=True)
    table.print(scopes_table([Searched(name=longest.name, scope=longest.scope, states=10**6, transitions=10**7)]))
    assert set(longest.name.split()) <= set(table.export_text().split())
    ran = pdflow("races", "--only", "R07")
    assert f"R07 {RACES['R07'].name}" in ran.stdout


def test_a_surviving_mutant_prints_its_reason() -> None:
    ran = pdflow("mutants", "--only", "tombstone-silent")
    assert ran.exit_code == 0
    assert f"tombstone-silent: {MUTANTS['tombstone-silent'].survives}" in ran.stdout
    assert "survivors" not in pdflow("mutants", "--only", "no-tombstone").stdout


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


def test_all_walks_through_half_of_the_plain_clusters_and_as_many_wide_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever machine, unless there is a budget."""
    walked, era = range(BLOCK, command.RUNS_OF_ALL, BLOCK), range(0, ERA, BLOCK)
    for wide in (False, True):
        blocks = [seed for seed in walked if is_wide(seed) == wide]
        clusters = {cluster_of(seed, STRICT) for seed in blocks}
        assert len(clusters) >= len(blocks) - 2  # Two numbers may draw the same.
        assert clusters <= {cluster_of(seed, STRICT) for seed in era}
        assert len(blocks) in (CLUSTERS // 2, CLUSTERS // 2 - 1)
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

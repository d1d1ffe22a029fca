"""The documents against reality: links, commands, code, scenarios."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdflow.scenario import load
from tests.docs.pages import DOCUMENTS, ROOT, blocks, commands, run_pdflow, run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_two_commands_are_those_that_ci_runs() -> None:
    first = commands(README, "python3")
    runner = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert len(first) == 2
    for command in first:
        assert f"\n  {command}\n" in runner


def links(document: str) -> Iterator[str]:
    for target in re.findall(r"(?:\]\(|<img src=\")([^)#\"]+)", document):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    missing = [target for target in links(path.read_text(encoding="utf-8")) if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths in backticks that begin with a folder of the repository."""
    pattern = r"`((?:pdflow|sim|tests|docs|examples|benchmarks)/[\w./-]+)`"
    named_here = re.findall(pattern, path.read_text(encoding="utf-8"))
    to_come = {"sim/pdflow_sim/check/", "sim/plan/"}  # issues 3 and 4
    assert not [name for name in named_here if name not in to_come and not (ROOT / name).exists()]


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs/scenario.md"], ids=named)
def test_scenarios_are_valid(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "toml"):
        file = tmp_path / "scenario.toml"
        file.write_text(block, encoding="utf-8")
        assert load(str(file)).workload.requests == 1000


def test_commands_of_the_readme_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("examples").symlink_to(ROOT / "examples")
    trace = tmp_path / "conversation_trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}\n' * 3)
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03.9799600,700,9\n" * 3
    tmp_path.joinpath("my-traffic.csv").write_text(rows)
    shutil.copy(ROOT / "examples/conversation.toml", tmp_path / "my-cluster.toml")
    shutil.copy(ROOT / "tests/sim/alone.toml", tmp_path / "served.toml")
    tmp_path.joinpath("seen.csv").write_text("request,ttft_ms,tpot_ms\n0,40,9\n1,45,9\n")
    monkeypatch.setenv("PWD", str(tmp_path))
    shown = commands(README, "pdflow")
    assert len(shown) == 14
    tmp_path.joinpath("tests").symlink_to(ROOT / "tests")
    for command in shown:
        arguments = shlex.split(os.path.expandvars(command))[1:]
        few = ["--set", "workload.requests=3"] if arguments[0] in ("simulate", "compare", "calibrate") else []
        if arguments[0] == "plan":
            few = ["--gpus", "1", "--kind", "aggregated", "--search", "tp,xpyd", "--requests", "100", "--no-robust"]
        few += {"scopes": ["--only", "compat pull", "--jobs", "1"], "walk": ["--budget", "1"]}.get(arguments[1], [])
        printed = run_pdflow([*arguments, *few])
        assert printed.exit_code == 0, (command, printed)
    assert {file.name for file in tmp_path.joinpath("out").iterdir()} == {
        "results.json",
        "requests.jsonl",
        "scenario.toml",
        "events.jsonl",
        "timeline.json.gz",
        "report.html",
    }


def test_python_of_the_readme_runs() -> None:
    first, second = blocks(README, "python")
    shown = run_python(first, ROOT)
    assert "TTFT" in shown
    assert "first_decode" in shown
    assert "nixl-pull" in run_python(second, ROOT)


def test_python_of_the_page_on_python_runs(tmp_path: Path) -> None:
    """Its examples, one after the other, as a reader would type them."""
    tmp_path.joinpath("examples").symlink_to(ROOT / "examples")
    run_python("\n".join(blocks((ROOT / "docs/python.md").read_text(encoding="utf-8"), "python")), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"pull.toml", "ttft.png", "rows"}

"""`simulate --seeds N`: the runs that N commands would make, and one report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

import pdflow_sim.experiments.seeds
from pdflow.cli import cli
from pdflow.errors import EXIT_INTERRUPTED, InvariantError
from pdflow.scenario.reading.load import load
from pdflow_sim.experiments.seeds import simulate_seeds
from pdflow_sim.run import simulate

SMALL = Path(__file__).parents[1] / "small.toml"


def pdflow_command(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="pdflow")


def test_each_run_is_that_of_its_seed(tmp_path: Path) -> None:
    scenario = load(str(SMALL), seed=4)
    command = ("simulate", "small.toml", "--seed", "4", "--seeds=2")
    several = simulate_seeds(scenario, 2, command=command, out=str(tmp_path / "several"), quiet=True)
    assert several.exit_code == 0
    for seed in (4, 5):
        arguments = ("simulate", "small.toml", "--seed", str(seed))
        alone = tmp_path / f"alone-{seed}"
        simulate(attrs.evolve(scenario, seed=seed), command=arguments, out=str(alone), quiet=True)
        for name in ("results.json", "requests.jsonl"):
            assert (tmp_path / f"several/seed-{seed}" / name).read_bytes() == (alone / name).read_bytes()
    figures = json.loads((tmp_path / "several/seeds.json").read_text())["figures"]
    ours = [json.loads((tmp_path / f"alone-{seed}/results.json").read_text())["p99_ttft_ms"] for seed in (4, 5)]
    assert figures["ttft_p99_ms"]["values"] == ours
    assert figures["ttft_p99_ms"]["low"] < figures["ttft_p99_ms"]["mean"] < figures["ttft_p99_ms"]["high"]


def test_the_command_prints_one_report() -> None:
    result = pdflow_command("simulate", SMALL, "--seed", "2", "--seeds", "3")
    assert result.exit_code == 0, result.output
    assert "3 runs with seeds 2 to 4" in result.stdout
    assert result.stdout.count("TTFT") == 1


def test_one_seed_is_not_several() -> None:
    assert pdflow_command("simulate", SMALL, "--seeds", "1").exit_code == 2


def scripted(monkeypatch: pytest.MonkeyPatch, outcomes: dict[int, Any]) -> None:
    """The world replaced by one that ends as it is told."""

    def run(scenario: Any, **options: Any) -> Any:
        outcome = outcomes[scenario.seed]
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(exit_code=outcome, result=real.result)

    real = simulate(load(str(SMALL)), quiet=True)
    monkeypatch.setattr(pdflow_sim.experiments.seeds, "simulate", run)


def test_an_interrupted_run_ends_it_and_is_in_no_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted(monkeypatch, {0: 0, 1: 0, 2: EXIT_INTERRUPTED})
    several = simulate_seeds(load(str(SMALL), seed=0), 5, out=str(tmp_path), quiet=True)
    assert (several.exit_code, several.report.seeds) == (EXIT_INTERRUPTED, [0, 1])
    written = json.loads((tmp_path / "seeds.json").read_text())
    assert (written["seeds"], written["interrupted"]) == ([0, 1], True)


def test_a_broken_invariant_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {0: 0, 1: InvariantError("blocks were lost")})
    with pytest.raises(InvariantError, match="seed 1: blocks were lost"):
        simulate_seeds(load(str(SMALL), seed=0), 2, quiet=True)

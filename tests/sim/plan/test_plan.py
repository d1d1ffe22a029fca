"""`pdflow plan`: what it finds, what it writes, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pdflow
from pdflow.cli import cli
from pdflow.results.figures.intervals import of_mean
from pdflow.results.figures.service_level import ServiceLevel
from pdflow_sim.plan.command import plan
from pdflow_sim.plan.comparison import compare, step_error_of
from pdflow_sim.plan.designs import Design, EngineShape, PoolShape
from pdflow_sim.plan.levers import Lever, LeverResult, ranked
from pdflow_sim.plan.planner import MOST_SEEDS
from pdflow_sim.plan.request import PlanOptions
from pdflow_sim.plan.search import Goal, MeasuredDesign

CONVERSATION = Path(__file__).parents[3] / "examples" / "conversation.toml"
LEVEL = "ttft=2s@p95,itl=50ms@p99"
FEW = ("--requests", "200", "--seeds", "1", "--jobs", "1")
OPTIONS = ("--gpus", "2", "--slo", LEVEL, "--search", "tp,xpyd,method", "--gpu", "h100-sxm=2.5", *FEW)


def planned(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(cli, ["plan", str(CONVERSATION), *arguments])
    assert ran.exit_code == code, ran.output
    return ran.output


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plans") / "plan"
    planned(*OPTIONS, "--out", str(out))
    return out


def test_the_files_say_what_was_found(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["slo"] == "ttft=2000ms@p95,itl=50ms@p99"
    assert plan["meets"]
    assert plan["unfinished"] is None
    assert {design["design"] for design in plan["designs"]} >= {"2x TP1", "1x TP2", "1P TP1 + 1D TP1"}
    best = plan["designs"][0]
    assert best["max_rate"] == max(design["max_rate"] for design in plan["designs"] if design["run_requests"] == 200)
    assert {row["stress"] for row in plan["survives"]} >= {"20 % more requests", "one engine lost", "one P lost"}
    rows = table(folder / "candidates.csv")
    assert [row["design"] for row in rows] == [design["design"] for design in plan["designs"]]
    assert (folder / "verdict.md").read_text().startswith("# conversation on 2 GPUs\n")


def test_a_million_tokens_cost_what_the_gpus_cost_while_they_are_made(folder: Path) -> None:
    for row in table(folder / "candidates.csv"):
        if row["tokens/s/gpu"]:
            dollars = 2 * 2.5 / 3600 / (2 * float(row["tokens/s/gpu"])) * 1e6
            assert float(row["dollars_per_million_output_tokens"]) == pytest.approx(dollars, rel=1e-4)


def test_each_run_is_a_point_of_the_pareto_file(folder: Path) -> None:
    rows = table(folder / "pareto.csv")
    assert {row["mode"] for row in rows} == {"agg", "disagg"}
    assert all((row["meets"] == "True") == (float(row["scale"] or "inf") <= 1) for row in rows)


def test_the_best_scenario_is_simulated_unchanged_and_meets_the_level(folder: Path) -> None:
    scenario = pdflow.load(folder / "best" / "scenario.toml")
    result = pdflow.simulate(scenario)
    assert result.summary["requests"] == 200
    met = max(ServiceLevel.parse(LEVEL).scales(result).values())
    assert met <= 1


def test_a_plan_is_not_overwritten_but_continued_without_a_new_run(folder: Path) -> None:
    before = (folder / "plan.json").read_text()
    runs = len(list((folder / "runs").iterdir()))
    assert "add --resume" in planned(*OPTIONS, "--out", str(folder), code=2)
    planned(*OPTIONS, "--out", str(folder), "--resume")
    assert (folder / "plan.json").read_text() == before
    assert len(list((folder / "runs").iterdir())) == runs


def test_a_plan_of_more_runs_is_kept_if_the_time_is_over_earlier(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "plan"
    shutil.copytree(folder, again)
    options = PlanOptions(slo=LEVEL, gpus=2)
    assert plan(str(CONVERSATION), options, budget_s=0.0, out=str(again), resume=True) == 3
    assert "keeps the plan that it has" in " ".join(capsys.readouterr().err.split())
    assert (again / "plan.json").read_bytes() == (folder / "plan.json").read_bytes()


def test_all_files_have_the_same_bytes_whatever_the_number_of_processes(folder: Path, tmp_path: Path) -> None:
    planned(*OPTIONS[:-1], "2", "--out", str(tmp_path / "two"))
    names = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.parent.name != "runs"}
    assert {str(name) for name in names} >= {
        "plan.json",
        "pareto.csv",
        "report.html",
        "best/scenario.toml",
        "best/vllm.sh",
    }
    for name in sorted(names):
        assert (folder / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_python_gets_the_same_plan(folder: Path) -> None:
    plan = pdflow.plan(
        CONVERSATION,
        slo=LEVEL,
        gpus=2,
        search=["tp", "xpyd", "method"],
        gpu={"h100-sxm": 2.5},
        requests=200,
        seeds=1,
        cache=folder / "runs",
    )
    written = json.loads((folder / "plan.json").read_text())
    assert plan.verdict == written["headline"]
    assert list(plan.designs["design"]) == [design["design"] for design in written["designs"]]
    assert plan.best is not None
    assert plan.best.to_scenario() == pdflow.load(folder / "best" / "scenario.toml")
    assert max(len(line) for line in str(plan).splitlines()) <= 80


def test_a_level_that_nothing_meets_says_by_how_much_and_what_is_short() -> None:
    output = planned("--gpus", "2", "--slo", "ttft=1ms@p50", "--search", "tp,xpyd", "--no-robust", *FEW, code=1)
    assert "meets the service level at any rate; the best misses it by" in " ".join(output.split())
    assert "TTFT p50 <= 1 ms" in output
    assert "bound by" in output


def test_the_end_of_the_time_leaves_the_best_so_far(tmp_path: Path) -> None:
    output = planned("--gpus", "32", "--slo", LEVEL, "--budget", "3", "--out", str(tmp_path / "p"), *FEW, code=3)
    assert "not finished" in output
    assert json.loads((tmp_path / "p" / "plan.json").read_text())["unfinished"].startswith("the time given")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slo", LEVEL), "--gpus and --rate: are both missing"),
        (("--slo", LEVEL, "--gpus", "2", "--rate", "3"), "cannot both be given"),
        (("--slo", "tfft=1s", "--gpus", "2"), "--slo tfft=1s: 'tfft=1s' has no latency that is known"),
        (("--gpus", "2", "--search", "tp,xpy"), "'xpy' cannot be searched, expected some of tp, ep, xpyd"),
        (("--gpus", "2", "--search", "xpy"), "did you mean xpyd?"),
        (("--gpus", "2", "--gpu", "h100-smx=2"), "no GPU of that name (did you mean"),
        (("--gpus", "2", "--gpu", "h100-sxm=-2"), "expected dollars per hour"),
        (("--gpus", "2", "--target", "cost"), "needs the price of h100-sxm"),
        (("--gpus", "2", "--target", "min-gpus"), "needs --rate"),
        (("--gpus", "2", "--search", "xpyd", "--values", "tp=2"), "tp is not searched; add it to --search"),
        (("--gpus", "0"), "expected 1 to 1024"),
        (("--gpus", "2", "--slo", "itl=50ms@p99"), "bounds neither ttft nor e2e"),
        (("--rate", "2", "--search", "tp"), "needs xpyd in --search"),
        (("--gpus", "2", "--values", "chunk=abc"), '--values chunk: abc: is "abc"'),
        (("--gpus", "2", "--values", "method=nixl-pish"), "did you mean nixl-push"),
        (("--gpus", "2", "--values", "policy=foo"), "--values policy: foo"),
        (("--gpus", "2", "--resume"), "--resume needs --out DIR"),
    ],
)
def test_bad_input_is_named_before_anything_runs(options: tuple[str, ...], message: str) -> None:
    assert message in planned(*options, code=2)


def _measured(design: Design, *rates: float) -> MeasuredDesign:
    return MeasuredDesign(design, rates, 100, ())


ONE = Design((PoolShape("aggregated", EngineShape("h100-sxm"), 2),))
OTHER = Design((PoolShape("prefill", EngineShape("h100-sxm"), 1), PoolShape("decode", EngineShape("h100-sxm"), 1)))
GOAL = Goal("goodput-per-gpu", {})


def test_rates_are_compared_in_pairs_of_seeds() -> None:
    """Each seed moves both by a factor of three, and one is always a tenth better."""
    compared = compare(_measured(ONE, 1, 3, 9), _measured(OTHER, 1.1, 3.3, 9.9), GOAL)
    assert compared is not None
    assert compared.better.design == OTHER
    assert compared.ratio == pytest.approx(1.1)
    assert compared.low == pytest.approx(1.1)
    assert not compared.tied


def test_a_gap_within_the_seeds_or_within_the_cost_model_is_a_tie() -> None:
    by_seeds = compare(_measured(ONE, 2.0, 1.0, 1.1), _measured(OTHER, 1.0, 1.5, 1.2), GOAL)
    assert by_seeds is not None
    assert by_seeds.tied_by_seeds
    by_costs = compare(_measured(ONE, 1.1, 1.1), _measured(OTHER, 1.0, 1.0), GOAL, step_error=0.2)
    assert by_costs is not None
    assert by_costs.tied_by_costs
    assert not by_costs.tied_by_seeds
    assert by_costs.tied


def test_a_design_that_never_meets_is_infinitely_worse_and_two_are_not_compared() -> None:
    compared = compare(_measured(ONE, 0, 0), _measured(OTHER, 1.0, 1.0), GOAL)
    assert compared is not None
    assert math.isinf(compared.ratio)
    assert compare(_measured(ONE, 0), _measured(OTHER, 0), GOAL) is None


def test_cost_is_by_dollars_and_not_by_gpus() -> None:
    cheap = Design((PoolShape("aggregated", EngineShape("a100-80g"), 2),))
    prices = {"h100-sxm": 4.0, "a100-80g": 1.0}
    compared = compare(_measured(ONE, 2.0), _measured(cheap, 1.0), Goal("cost", prices))
    assert compared is not None
    assert compared.better.design == cheap
    assert compared.ratio == pytest.approx(2.0)


def test_of_levers_that_help_alike_the_resource_that_was_used_up_binds() -> None:
    memory, bandwidth, other = (
        LeverResult(Lever(name, name, ONE), rate, 1.0)
        for name, rate in (("KV memory of D", 1.9), ("b", 2.0), ("c", 1.1))
    )
    assert ranked([bandwidth, memory, other], frozenset({"KV memory of D"}))[0] is memory
    assert ranked([bandwidth, memory, other], frozenset())[0] is bandwidth
    assert ranked([bandwidth, other], frozenset({"c"}))[0] is bandwidth


def test_intervals_are_of_the_ratio_itself() -> None:
    compared = compare(_measured(ONE, 1.2, 1.3, 1.4), _measured(OTHER, 1.0, 1.0, 1.0), GOAL)
    assert compared is not None
    assert compared.low is not None
    assert compared.high is not None
    assert compared.low < compared.ratio < compared.high


def test_the_fewest_gpus_that_serve_a_rate_are_found() -> None:
    traffic = {
        "requests": 200,
        "arrival": {"process": "poisson", "rate_rps": 4.0},
        "input_tokens": {"dist": "uniform", "low": 1000, "high": 3000},
        "output_tokens": {"dist": "uniform", "low": 50, "high": 150},
    }
    scenario = pdflow.load(CONVERSATION).with_({"workload": traffic})
    few: dict[str, Any] = {"slo": "ttft=500ms@p95", "kind": "aggregated", "search": ["xpyd"], "robust": False}
    plan = pdflow.plan(scenario, rate=20.0, seeds=2, **few)
    assert plan.meets
    assert plan.best is not None
    rates = plan.best.measured.rates
    interval = of_mean(rates)
    assert interval is not None
    assert len(rates) >= MOST_SEEDS or interval.low >= 20.0, "a rate that is hardly served is confirmed by more seeds"
    fewer = pdflow.plan(scenario, gpus=plan.outcome.gpus - 1, seeds=3, **few)
    assert fewer.best is not None
    assert fewer.best.max_rate < 20.0


@pytest.mark.parametrize(
    ("cost", "error"),
    [({"model": "aiconfigurator"}, 0.10), ({"model": "constant", "prefill_s": 0.1, "decode_step_s": 0.01}, 0.0)],
    ids=["tables", "constant"],
)
def test_step_times_of_a_table_have_the_error_bar_of_the_page_on_costs(cost: dict[str, Any], error: float) -> None:
    edits = {f"pool.{role}.cost": cost for role in ("prefill", "decode")}
    assert step_error_of(pdflow.load(CONVERSATION, edits).resolved) == (error, [])

"""The files of a plan: what was found as JSON, CSV and Markdown, and the best design as a scenario."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pdflow.results.files.write import PAGE_NAME, guarding, remove_file, write_results, write_text
from pdflow.scenario.schema.scenario import Role
from pdflow.version import version
from pdflow_sim.experiments.sweep_command import write_csv
from pdflow_sim.plan.comparison import DesignComparison
from pdflow_sim.plan.launch.script import SCRIPT_NAME, vllm_script
from pdflow_sim.plan.options import Kind
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.report.frontier import run_points
from pdflow_sim.plan.report.page import plan_page
from pdflow_sim.plan.report.plots import PLOT_NAMES, svg_files
from pdflow_sim.plan.search import MeasuredDesign
from pdflow_sim.plan.verdict import PlanVerdict

PLAN_NAME: Final = "plan.json"
VERDICT_NAME: Final = "verdict.md"
CANDIDATES_NAME: Final = "candidates.csv"
PARETO_NAME: Final = "pareto.csv"
BEST_FOLDER: Final = "best"
SCENARIO_NAME: Final = "scenario.toml"
PLOTS_FOLDER: Final = "plots"

_MODES: Final[Mapping[Kind, str]] = {"aggregated": "agg", "disaggregated": "disagg"}
_PREFIXES: Final[Mapping[Role, str]] = {"prefill": "(p)", "decode": "(d)", "aggregated": ""}
"""aiconfigurator's names of modes, and its prefixes of a role's columns."""

KEPT_FIGURES: Final = (
    *("requests_per_s", "goodput_rps", "slo_attainment", "output_tokens_per_s", "total_tokens_per_s"),
    *("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms"),
    *("e2e_mean_ms", "failed", "posting_busy_share", "busiest_link_share"),
)
"""Figures at a design's highest rate, as means over its seeds."""


def write_plan(folder: Path, outcome: PlanOutcome) -> None:
    """Write all files of a plan. Raises OutputError."""
    verdict = PlanVerdict(outcome)
    write_results(folder / PLAN_NAME, dict(plan_json(outcome, verdict)))
    write_text(folder / VERDICT_NAME, verdict.markdown())
    _write_rows(folder / CANDIDATES_NAME, list(candidates(outcome)))
    write_plots(folder, outcome)
    _write_rows(folder / PARETO_NAME, list(pareto(outcome)))
    if outcome.best is not None:
        scenario = outcome.to_scenario(outcome.best.design)
        path = folder / BEST_FOLDER / SCENARIO_NAME
        with guarding(path):
            scenario.save(path)
        write_text(folder / BEST_FOLDER / SCRIPT_NAME, vllm_script(scenario))


def plan_json(outcome: PlanOutcome, verdict: PlanVerdict) -> Iterator[tuple[str, Any]]:
    """Yield the content of plan.json."""
    yield "pdflow_version", version()
    yield "scenario", outcome.scenario.name
    yield "slo", outcome.level.text
    yield "gpus", outcome.gpus
    yield "wanted_rate", outcome.wanted_rate
    yield "own_rate", outcome.traffic.rate
    yield "rate_unit", "requests/s"
    yield "target", outcome.goal.target
    yield "prices_per_gpu_hour", dict(outcome.goal.prices)
    yield "meets", outcome.meets
    yield "unfinished", outcome.unfinished or None
    yield "headline", verdict.headline
    yield "verdict", None if outcome.verdict is None else _comparison(outcome.verdict)
    yield "ratio_with_other_step_times", dict(outcome.ratio_at)
    yield "never_compared_with_a_measurement", list(outcome.never_compared)
    yield "operating_rate", outcome.operating_rate
    yield "levers", [{"name": it.lever.name, "resource": it.lever.resource, "gain": it.gain} for it in outcome.levers]
    yield (
        "survives",
        [
            {
                "design": design.text,
                "stress": it.stress.name,
                "met": it.meets,
                "scale": None if it.outcome is None else _finite(it.outcome.scale),
                **({} if it.outcome is None else _aftermath(it.outcome.figures)),
            }
            for design, results in outcome.stresses.items()
            for it in results
        ],
    )
    yield "refused", dict(outcome.refused)
    yield "simulated_requests", outcome.simulated
    yield "runs", outcome.runs
    yield "designs", list(candidates(outcome))


def candidates(outcome: PlanOutcome) -> Iterator[dict[str, Any]]:
    """Yield a row for each design, the best first. The first columns have aiconfigurator's names."""
    for rank, row in enumerate(outcome.rows, start=1):
        tokens, tpot = row.per_second("output_tokens_per_s"), row.figure("tpot_mean_ms")
        columns: dict[str, Any] = {
            "rank": rank,
            "mode": _MODES[row.design.kind],
            "tokens/s/gpu": None if tokens is None else tokens / row.design.gpus,
            "tokens/s/user": None if not tpot else 1000 / tpot,
            "ttft": row.figure("ttft_mean_ms"),
            "tpot": tpot,
            "concurrency": _concurrency(row),
            "total_gpus": row.design.gpus,
        }
        for role, prefix in _PREFIXES.items():
            pool = row.design.of_role(role)
            columns |= {
                f"{prefix}workers": None if pool is None else pool.replicas,
                f"{prefix}gpus/worker": None if pool is None else pool.engine.gpus,
                f"{prefix}parallel": None if pool is None else str(pool.engine),
                f"{prefix}gpu": None if pool is None else pool.engine.gpu,
            }
        columns["design"] = row.design.text
        columns |= dict(row.design.options)
        columns["max_rate"] = row.rate
        columns["max_rate_by_seed"] = " ".join(f"{rate:.6g}" for rate in row.rates)
        columns["run_requests"] = row.figure("requests") or row.requests
        columns["dollars_per_million_output_tokens"] = outcome.dollars_per_million(row)
        columns["dollars_per_million_tokens"] = outcome.dollars_per_million(row, "total_tokens_per_s")
        columns |= {name: row.figure(name) for name in KEPT_FIGURES}
        yield columns


def pareto(outcome: PlanOutcome) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of the search: tokens per second of a GPU, and of a user, whether it met the SLO or
    not."""
    for it in run_points(outcome):
        probe, found, (of_user, of_gpu) = it.probe, it.found, it.at
        yield {
            "mode": _MODES[it.kind],
            "design": probe.design.text,
            "total_gpus": probe.design.gpus,
            "rate": probe.rate,
            "seed": outcome.scenario.seed + probe.nth,
            "run_requests": probe.requests,
            "tokens/s/gpu": of_gpu,
            "tokens/s/user": of_user,
            "ttft_p99_ms": found.figures.get("ttft_p99_ms"),
            "itl_p99_ms": found.figures.get("itl_p99_ms"),
            "slo_attainment": found.figures.get("slo_attainment"),
            "scale": _finite(found.scale),
            "meets": found.meets,
        }


def write_plots(folder: Path, outcome: PlanOutcome) -> None:
    """Write report.html and a file for each chart. A chart of an earlier plan that this one lacks is removed."""
    write_text(folder / PAGE_NAME, plan_page(outcome))
    files = svg_files(outcome)
    for name in PLOT_NAMES:
        path = folder / PLOTS_FOLDER / f"{name}.svg"
        if name in files:
            write_text(path, files[name])
        else:
            remove_file(path)


def _concurrency(row: MeasuredDesign) -> float | None:
    """Return the mean number of requests in the system, by Little's law."""
    rate, time_ms = row.figure("requests_per_s"), row.figure("e2e_mean_ms")
    return None if rate is None or time_ms is None else rate * time_ms / 1000


def _comparison(it: DesignComparison) -> dict[str, Any]:
    return {
        "better": it.better.design.text,
        "other": it.other.design.text,
        "disaggregate": it.better.design.kind == "disaggregated" and not it.tied,
        "ratio": _finite(it.ratio),
        "low": it.low,
        "high": it.high,
        "step_time_error": it.step_error,
        "tie": it.tied,
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _aftermath(figures: Mapping[str, Any]) -> dict[str, Any]:
    names = ("ttft_p99_after_ms", "failed_after", "recovered_s")
    return {name: figures[name] for name in names if name in figures}


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_csv(path, _plain(rows), list(dict.fromkeys(name for row in rows for name in row)))


def _plain(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        yield {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}

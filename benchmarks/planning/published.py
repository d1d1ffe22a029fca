"""`pdflow plan` on published comparisons of clusters, next to what was measured (docs/validation.md, sections 3 and 7).

    python -m benchmarks.planning.published [NAME...] [--jobs N] [--json FILE]

Sources give latencies of two or three clusters at one load. The level of a plan is such that the measured clusters
differ in whether they meet it: the bound on TPOT is the geometric mean of the best and the worst published one, and
that on TTFT one and a half times the worst. Where three ratios of P to D were compared by their throughput, both bounds
are one and a half times the worst. MORI-IO states its own level. The plan has the published numbers of GPUs, models,
lengths and sizes of engines, and nothing is fitted. Loads that were closed loops are planned as Poisson arrivals.

A plan is right if its best cluster is of the kind, or has the ratio, that was measured to be better and, for kinds, if
the best clusters of both kinds are in the measured order at the measured rate, too. A tie is neither right nor wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.validation.unfitted.rows import AS_STATED, Row, rows
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import Design, EngineShape, PoolShape
from pdflow_sim.plan.options import KINDS
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import Planner, PlanRequest
from pdflow_sim.plan.probes import DesignProbe, Prober
from pdflow_sim.plan.space import Space
from pdflow_sim.plan.traffic import Traffic

MARGIN: Final = 1.5
REQUESTS: Final = 600


@attrs.frozen(kw_only=True)
class Comparison:
    """A published comparison. `better` is the kind, or the cluster, that was measured to be better; `measured` has the
    figures that say so."""

    name: str
    scenario: Scenario
    level: str
    gpu: str
    gpus: int
    tp: tuple[int, ...]
    better: str
    measured: str
    figure: str = ""
    """The figure that was measured at the scenario's rate, of comparisons of kinds."""

    def planner(self, jobs: int) -> Planner:
        """Return the plan to carry out: of both kinds, or of P to D only, as was compared."""
        kinds = KINDS if self.figure else ("disaggregated",)
        request = PlanRequest(
            level=ServiceLevel.parse(self.level),
            gpus=self.gpus,
            gpu_types=(self.gpu,),
            space=Space((self.gpu,), tp=self.tp, ep=False, kinds=kinds),
            options=(),
            robust=False,
        )
        return Planner(self.scenario, request, WorkerPool(jobs), look=False)


def _apart_and_together(name: str, apart: Row, together: Row) -> Comparison:
    """P and D apart against engines that do both, at the rate that was measured."""
    ttfts, tpots = zip(*((row.published.ttft_ms, row.published.tpot_ms) for row in (apart, together)), strict=True)
    engines = [*apart.engines(), *together.engines()]
    return Comparison(
        name=name,
        scenario=_scenario(apart),
        level=f"ttft={MARGIN * max(ttfts):.0f}ms@mean,tpot={math.sqrt(tpots[0] * tpots[1]):.1f}ms@mean",
        gpu=apart.gpu,
        gpus=_cluster(apart).gpus,
        tp=tuple(sorted({tp for _, _, tp in engines})),
        better="disaggregated" if tpots[0] < tpots[1] else "aggregated",
        measured=f"TTFT {ttfts[0]:.0f} and TPOT {tpots[0]:.1f} ms apart, {ttfts[1]:.0f} and {tpots[1]:.1f} ms "
        f"together, at {apart.load_name}",
        figure="tpot_mean_ms",
    )


def _ratios(name: str, compared: Sequence[Row]) -> Comparison:
    """Ratios of P to D by their throughput."""
    best = max(compared, key=lambda row: row.published.output_tokens_per_s or 0.0)
    worst_ttft, worst_tpot = (
        max(getattr(row.published, figure) for row in compared) for figure in ("ttft_ms", "tpot_ms")
    )
    rate = (best.published.output_tokens_per_s or 0.0) / best.output_tokens
    arrival = {"workload.arrival": {"process": "poisson", "rate_rps": rate}}
    figures = ", ".join(f"{row.pools} {row.published.output_tokens_per_s:,.0f}" for row in compared)
    return Comparison(
        name=name,
        scenario=_scenario(best).with_(arrival),
        level=f"ttft={MARGIN * worst_ttft:.0f}ms@mean,tpot={MARGIN * worst_tpot:.1f}ms@mean",
        gpu=best.gpu,
        gpus=_cluster(best).gpus,
        tp=tuple(sorted({tp for _, _, tp in best.engines()})),
        better=_cluster(best).shape_text,
        measured=f"{figures} tokens/s with {best.load_name}",
    )


def _scenario(row: Row) -> Scenario:
    return Scenario.from_dict(tomllib.loads(row.text(AS_STATED))).with_({"workload.requests": REQUESTS})


def _cluster(row: Row) -> Design:
    return Design(
        tuple(PoolShape(role, EngineShape(row.gpu, tp), replicas) for role, replicas, tp in row.engines())  # type: ignore[arg-type]
    )


def _mori() -> Comparison:
    """vLLM's blog of 7 April 2026: of 100 requests, how many were within both bounds."""
    pools = [{"name": role, "role": role, "replicas": 1, "gpu": "mi300x", "tp": 4} for role in ("prefill", "decode")]
    table: Mapping[str, Any] = {
        "workload": {
            "requests": REQUESTS,
            "arrival": {"process": "poisson", "rate_rps": 8.0},
            "input_tokens": 2000,
            "output_tokens": 1000,
        },
        "model": {"preset": "qwen3-235b-a22b", "weight_dtype": "fp8", "activation_dtype": "fp8"},
        "transfer": {"method": "nixl-push", "connector": "moriio"},
        "network": {"preset": "rdma-400g"},
        "router": {"policy": "round-robin", "dispatch": "concurrent"},
        "pool": pools,
    }
    return Comparison(
        name="mori-io",
        scenario=Scenario.from_dict(dict(table)),
        level="ttft=1s,itl=50ms,attainment=70%",
        gpu="mi300x",
        gpus=8,
        tp=(4, 8),
        better="disaggregated",
        measured="73 of 100 requests within the bounds apart, 26 and 30 together, at 8 requests/s",
        figure="slo_attainment",
    )


def comparisons() -> list[Comparison]:
    """Return all comparisons."""
    by_id = {row.id: row for row in rows()}
    found = [
        _mori(),
        _apart_and_together("a10-8192", by_id["8192-pd"], by_id["8192-2-regular"]),
        _apart_and_together("a10-2048", by_id["2048-pd"], by_id["2048-2-regular"]),
        _apart_and_together("llm-d", by_id["pd-gke"], by_id["aggregated"]),
    ]
    for lengths in ("128-2048", "2046-128", "2046-2048"):
        found.append(_ratios(f"ratios-{lengths}", [by_id[f"{lengths}-128-{n}P{4 - n}D"] for n in (1, 2, 3)]))
    return found


def held_against(comparison: Comparison, jobs: int) -> dict[str, Any]:
    """Return the plan's answer next to the measured one."""
    outcome = comparison.planner(jobs).run()
    best, verdict = outcome.best, outcome.verdict
    assert best is not None
    answer = (best.design.kind if comparison.figure else best.design.shape_text) if outcome.meets else "none meets it"
    at_rate = dict(_at_measured_rate(comparison, outcome))
    return {
        "name": comparison.name,
        "level": comparison.level,
        "measured": comparison.measured,
        "measured_better": comparison.better,
        "planned_better": answer,
        "ratio": None if verdict is None else verdict.ratio,
        "highest_rates": {row.design.text: row.rate for row in outcome.rows[:6]},
        "at_measured_rate": at_rate,
        "score": _score(comparison, outcome, answer, at_rate),
    }


def _at_measured_rate(comparison: Comparison, outcome: PlanOutcome) -> Iterator[tuple[str, float]]:
    """Yield the measured figure of the best cluster of each kind at the rate that was measured."""
    best = [outcome.best_of(kind) for kind in KINDS] if comparison.figure else []
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(comparison.scenario), outcome.level, pool)
        for row in best:
            assert row is not None
            (found,) = prober.run([DesignProbe(row.design, prober.traffic.rate, REQUESTS)])
            yield row.design.kind, found.figures[comparison.figure]


def _score(comparison: Comparison, outcome: PlanOutcome, answer: str, at_rate: Mapping[str, float]) -> str:
    if answer != comparison.better:
        return "wrong"
    if at_rate:
        together, apart = at_rate["aggregated"], at_rate["disaggregated"]
        apart_is_better = apart > together if comparison.figure == "slo_attainment" else apart < together
        if apart_is_better != (comparison.better == "disaggregated"):
            return "wrong at the measured rate"
    return "a tie" if outcome.verdict is not None and outcome.verdict.tied else "right"


def _line(row: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{design} {rate:.2f}/s" for design, rate in list(row["highest_rates"].items())[:4])
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} times"
    figures = "".join(f", {kind} {figure:.3g}" for kind, figure in row["at_measured_rate"].items())
    return (
        f"{row['name']}, {row['level']}: measured {row['measured']}: {row['measured_better']}; plan: "
        f"{row['planned_better']}{ratio} ({rates}); at the measured rate{figures or ' not compared'}: {row['score']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all comparisons, or those that are named."""
    known = comparisons()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in known))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = []
    for each in known:
        if not options.names or each.name in options.names:
            found.append(held_against(each, options.jobs))
            print(_line(found[-1]), flush=True)
    for score, count in Counter(row["score"] for row in found).items():
        print(f"{count} of {len(found)} {score}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

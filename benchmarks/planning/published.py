"""`pdflow plan` on published comparisons of clusters, next to what was measured (docs/validation.md, sections 3 and 7).

    python -m benchmarks.planning.published [NAME...] [--jobs N] [--json FILE]

Sources give latencies of two or three clusters at one load. The level of a plan is such that the measured clusters
differ in whether they meet it: the bound on TPOT is the geometric mean of the best and the worst published one, and
that on TTFT one and a half times the worst. Where three ratios of P to D were compared by their throughput, both bounds
are one and a half times the worst. MORI-IO states its own level. The plan has the published numbers of GPUs, models,
lengths and sizes of engines, and nothing is fitted. It is right if its best cluster is of the kind, or has the ratio,
that was measured to be better.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.validation.unfitted.rows import AS_STATED, Row, rows
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import Planner, PlanRequest
from pdflow_sim.plan.space import Space

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

    def plan(self, jobs: int) -> PlanOutcome:
        """Return the plan: of both kinds, or of P to D only, as was compared."""
        kinds = ("disaggregated",) if "D" in self.better else ("aggregated", "disaggregated")
        request = PlanRequest(
            level=ServiceLevel.parse(self.level),
            gpus=self.gpus,
            gpu_types=(self.gpu,),
            space=Space((self.gpu,), tp=self.tp, ep=False, kinds=kinds),
            options=(),
            robust=False,
        )
        return Planner(self.scenario, request, WorkerPool(jobs), look=False).run()


def _apart_and_together(name: str, apart: Row, together: Row) -> Comparison:
    """P and D apart against engines that do both, at the rate that was measured."""
    ttfts, tpots = zip(*((row.published.ttft_ms, row.published.tpot_ms) for row in (apart, together)), strict=True)
    engines = [*apart.engines(), *together.engines()]
    return Comparison(
        name=name,
        scenario=_scenario(apart),
        level=f"ttft={MARGIN * max(ttfts):.0f}ms@mean,tpot={math.sqrt(tpots[0] * tpots[1]):.1f}ms@mean",
        gpu=apart.gpu,
        gpus=_gpus(apart),
        tp=tuple(sorted({tp for _, _, tp in engines})),
        better="disaggregated" if tpots[0] < tpots[1] else "aggregated",
        measured=f"TPOT {tpots[0]:.1f} ms apart, {tpots[1]:.1f} ms together, at {apart.load_name}",
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
        gpus=_gpus(best),
        tp=tuple(sorted({tp for _, _, tp in best.engines()})),
        better=_cluster(best),
        measured=f"{figures} tokens/s with {best.load_name}",
    )


def _scenario(row: Row) -> Scenario:
    return Scenario.from_dict(tomllib.loads(row.text(AS_STATED))).with_({"workload.requests": REQUESTS})


def _gpus(row: Row) -> int:
    return sum(replicas * tp for _, replicas, tp in row.engines())


def _cluster(row: Row) -> str:
    letters = {"prefill": "P", "decode": "D"}
    return " + ".join(f"{replicas}{letters[role]} TP{tp}" for role, replicas, tp in row.engines())


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
    outcome = comparison.plan(jobs)
    best = outcome.best
    assert best is not None
    kind_only = comparison.better in ("aggregated", "disaggregated")
    verdict = outcome.verdict
    answer = (best.design.kind if kind_only else best.design.shape_text) if outcome.meets else "none meets the level"
    return {
        "name": comparison.name,
        "level": comparison.level,
        "measured": comparison.measured,
        "measured_better": comparison.better,
        "planned_better": answer,
        "planned": best.design.text,
        "rates": {kind: None if row is None else row.rate for kind, row in _best_rows(outcome)},
        "rows": {row.design.text: row.rate for row in outcome.rows[:6]},
        "ratio": None if verdict is None else verdict.ratio,
        "tie": verdict is not None and verdict.tied,
        "right": answer == comparison.better,
    }


def _best_rows(outcome: PlanOutcome) -> Iterator[tuple[str, Any]]:
    for kind in ("aggregated", "disaggregated"):
        yield kind, outcome.best_of(kind)  # type: ignore[arg-type]


def _line(row: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{design} {rate:.2f}/s" for design, rate in list(row["rows"].items())[:4])
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} times{' (a tie)' if row['tie'] else ''}"
    return (
        f"{row['name']}, {row['level']}: measured {row['measured']}: {row['measured_better']}; plan: "
        f"{row['planned_better']}{ratio}: {'right' if row['right'] else 'WRONG'} ({rates})"
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
    print(f"{sum(row['right'] for row in found)} of {len(found)} right")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

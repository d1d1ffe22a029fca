"""What NVIDIA's aiconfigurator and aisimulate recommend, simulated by pdflow next to what `pdflow plan` recommends.

    python -m benchmarks.planning.peer_picks [CASE...] [--aiconfigurator PYTHON] [--aisimulate PYTHON]
                                             [--plan-tails] [--jobs N] [--json FILE]

Each peer is asked in an environment of its own: `pip install aiconfigurator==0.12.0`, and `pip install
--only-binary :all: aisimulate==0.13.0.dev202610270000000085`. Step times are from NVIDIA's kernel tables in all three
(`cost.model = "aiconfigurator"`), so that queues, batches, links and the protocol are what differs; pdflow adds the
engines' host time. A peer's bounds are on means, as its own are. Lengths vary by 20 % around the stated ones.

Of each recommended cluster it prints: what the peer says of it; that in pdflow with the peer's own number of clients
(closed loop), if it states one; and the highest rate of Poisson arrivals within the bounds on means, and within the
same bounds for 95 % of requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import attrs

import pdflow
from benchmarks.planning.peer_cases import CASES, Case
from benchmarks.planning.peer_commands import Pick, aiconfigurator_picks, aisimulate_picks
from pdflow.errors import ScenarioError
from pdflow.results.figures.service_level import ServiceLevel
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import Design, DesignEditor
from pdflow_sim.plan.max_rate import search_seeds
from pdflow_sim.plan.options import KINDS
from pdflow_sim.plan.planner import Planner, PlanRequest
from pdflow_sim.plan.probes import Prober
from pdflow_sim.plan.space import Space
from pdflow_sim.plan.traffic import Traffic

SEEDS: Final = 3
REQUESTS: Final = 600
WAVES: Final = 24
"""Requests of each client of a closed loop; those that end during the first answers are not counted."""
WARM_UP_ANSWERS: Final = 2.0
PLANNED_OPTIONS: Final = ("chunk",)


@attrs.frozen
class Row:
    """A recommended cluster, and what pdflow says of it. Rates are per second; `closed` and the rates are None where it
    was not simulated."""

    case: str
    pick: Pick
    closed: Mapping[str, float] | None
    mean_rate: float | None
    tail_rate: float | None
    refused: str = ""

    @property
    def table(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "case": self.case,
            "source": self.pick.source,
            "design": self.pick.design.text,
            "claimed": dict(self.pick.claimed),
            "clients": self.pick.clients,
            "closed": self.closed,
            "mean_rate": self.mean_rate,
            "tail_rate": self.tail_rate,
            "refused": self.refused,
        }


def highest_rates(
    case: Case, level: str, designs: Sequence[Design], pool: WorkerPool
) -> tuple[list[float], dict[Design, str]]:
    """Return the highest rate of each design, and why some cannot be simulated."""
    prober = Prober(Traffic.of(case.scenario(REQUESTS)), ServiceLevel.parse(level), pool)
    found = search_seeds(prober, designs, requests=REQUESTS, seeds=SEEDS, tolerance=0.02)
    refused = {each.design: each.error for mine in found for each in mine if each.error is not None}
    return [fmean(each.rate for each in mine) for mine in found], refused


def closed_loop(case: Case, pick: Pick) -> dict[str, float] | None:
    """Return what pdflow says of a cluster with so many clients as its peer states; None if it states none."""
    if pick.clients is None:
        return None
    scenario = case.scenario(REQUESTS)
    answer_s = (pick.claimed["ttft_ms"] + pick.claimed["tpot_ms"] * case.output_tokens) / 1000
    edits = {
        **DesignEditor(scenario).edits(pick.design),
        "workload.arrival": {"process": "closed", "concurrency": pick.clients},
        "workload.requests": WAVES * pick.clients,
        "workload.warmup_s": WARM_UP_ANSWERS * answer_s,
    }
    records = pdflow.simulate(scenario.with_(edits)).records
    # From the warm-up to the last arrival: after that, clients have no more requests, and fewer are in the system.
    begin, end = edits["workload.warmup_s"] * 1e9, max(records.arrival_ns)
    counted = [n for n, arrival in enumerate(records.arrival_ns) if arrival >= begin]
    ended = sum(begin <= last <= end for last in records.last_token_ns)
    ttfts = [records.first_token_ns[n] - records.arrival_ns[n] for n in counted]
    tpots = [(records.last_token_ns[n] - records.first_token_ns[n]) / (records.output_tokens[n] - 1) for n in counted]
    return {"rate": ended / (end - begin) * 1e9, "ttft_ms": fmean(ttfts) / 1e6, "tpot_ms": fmean(tpots) / 1e6}


def planned(case: Case, source: str, level: str, pool: WorkerPool) -> Iterator[Pick]:
    """Yield the best cluster of each kind by `pdflow plan` within a service level."""
    request = PlanRequest(
        level=ServiceLevel.parse(level),
        gpus=case.gpus,
        gpu_types=(case.gpu,),
        space=Space((case.gpu,), ep=False),
        options=PLANNED_OPTIONS,
        seeds=SEEDS,
        robust=False,
    )
    outcome = Planner(case.scenario(REQUESTS), request, pool, look=False).run()
    for kind in KINDS:
        best = outcome.best_of(kind)
        if best is not None:
            yield Pick(source, best.design, {"rate": best.rate}, None)


def rows_of(case: Case, picks: Sequence[Pick], pool: WorkerPool) -> Iterator[Row]:
    """Yield what pdflow says of each cluster."""
    designs = [pick.design for pick in picks]
    means, refused = highest_rates(case, case.mean_level, designs, pool)
    tails, _ = highest_rates(case, case.tail_level, designs, pool)
    for pick, mean, tail in zip(picks, means, tails, strict=True):
        why = refused.get(pick.design)
        if why is not None:
            yield Row(case.name, pick, None, None, None, why.splitlines()[0])
            continue
        yield Row(case.name, pick, closed_loop(case, pick), mean, tail)


def _line(row: Row) -> str:
    pick = row.pick
    texts = [f"  {pick.source:14} {pick.design.text:34}", f"says {pick.claimed['rate']:6.2f}/s"]
    if "ttft_ms" in pick.claimed:
        texts.append(f"TTFT {pick.claimed['ttft_ms']:5.0f} TPOT {pick.claimed['tpot_ms']:5.1f} ms")
    if row.refused:
        return "  ".join([*texts, row.refused])
    if row.closed is not None:
        closed = row.closed
        texts.append(f"{pick.clients} clients: {closed['rate']:.2f}/s")
        texts.append(f"TTFT {closed['ttft_ms']:.0f} TPOT {closed['tpot_ms']:.1f} ms")
    texts.append(f"Poisson: {row.mean_rate:.2f}/s on means, {row.tail_rate:.2f}/s at p95")
    return "  ".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the peers, plan, and simulate what each recommends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(case.name for case in CASES))
    parser.add_argument("--aiconfigurator", metavar="PYTHON", help="the Python of its environment")
    parser.add_argument("--aisimulate", metavar="PYTHON", help="the Python of its environment")
    parser.add_argument("--plan-tails", action="store_true", help="also plan within the bounds for 95 %% of requests")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}: choose from {', '.join(c.name for c in CASES)}")
    found = []
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        print(f"{case.name}: {case.title}", flush=True)
        picks: list[Pick] = []
        with tempfile.TemporaryDirectory() as folder:
            if options.aiconfigurator:
                picks += aiconfigurator_picks(options.aiconfigurator, case, Path(folder))
            if options.aisimulate and case.asked_of_aisimulate:
                picks += aisimulate_picks(options.aisimulate, case, Path(folder))
        picks += planned(case, "pdflow, means", case.mean_level, WorkerPool(options.jobs))
        if options.plan_tails:
            picks += planned(case, "pdflow, p95", case.tail_level, WorkerPool(options.jobs))
        with WorkerPool(options.jobs) as pool:
            for row in rows_of(case, picks, pool):
                found.append(row)
                print(_line(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([row.table for row in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ScenarioError as error:
        sys.exit(str(error))

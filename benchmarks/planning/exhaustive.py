"""`pdflow plan` against an exhaustive search of the same designs: the same best or a tie, at what share of the work.

    python -m benchmarks.planning.exhaustive [GRID...] [--jobs N] [--json FILE]

Every design of a grid is searched for its highest rate with five seeds on whole runs. Takes some 10 CPU minutes a grid.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.comparison import RESOLUTION, compare
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.max_rate import search_seeds
from pdflow_sim.plan.options import OPTIONS
from pdflow_sim.plan.planner import Planner, PlanRequest
from pdflow_sim.plan.probes import Prober
from pdflow_sim.plan.search import Goal, MeasuredDesign
from pdflow_sim.plan.space import ShapeFinder, Space
from pdflow_sim.plan.traffic import Traffic

SEEDS: Final = 5
REQUESTS: Final = 600
GOAL: Final = Goal("goodput-per-gpu", {})
CONVERSATION: Final = Path(__file__).parents[2] / "examples" / "conversation.toml"


@attrs.frozen
class Grid:
    """A traffic, a service level, and the designs: all clusters of so many GPUs with all values of one option, the
    scenario's own among them."""

    name: str
    level: str
    gpus: int
    option: str
    values: tuple[Any, ...]
    edits: Mapping[str, Any]
    tp: tuple[int, ...]

    @property
    def scenario(self) -> Scenario:
        """The scenario whose traffic it is."""
        return Scenario.load(CONVERSATION).with_({"workload.requests": REQUESTS, **self.edits})

    def designs(self, scenario: Scenario) -> list[Design]:
        """Return all designs."""
        found = ShapeFinder(scenario, self.space).designs(self.gpus)
        several = [design for design in found if design.kind in OPTIONS[self.option].kinds]
        alone = [design for design in found if design not in several]
        own = OPTIONS[self.option].own(scenario.resolved)
        return [
            *alone,
            *(
                design if value == own else design.with_option(self.option, value)
                for design in several
                for value in self.values
            ),
        ]

    @property
    def space(self) -> Space:
        """The clusters."""
        return Space(("h100-sxm",), tp=self.tp)


def _chat(rate: float, prompt: int, answer: int, **more: Any) -> dict[str, Any]:
    return {
        "workload": {
            "requests": REQUESTS,
            "arrival": {"process": "poisson", "rate_rps": rate},
            "input_tokens": {"dist": "uniform", "low": prompt // 2, "high": prompt * 3 // 2},
            "output_tokens": {"dist": "uniform", "low": answer // 2, "high": answer * 3 // 2},
        },
        **more,
    }


CHUNKS: Final = (2048, 8192, 16384)
LARGE: Final = {"model": {"preset": "llama-3.1-70b"}, "pool.prefill.tp": 4, "pool.decode.tp": 4}
GRIDS: Final = (
    Grid("conversation", "ttft=2s@p95,itl=50ms@p99", 8, "chunk", CHUNKS, {}, (1, 2, 4)),
    Grid("code", "ttft=1s@p95,itl=20ms@p99", 8, "block_size", (16, 32, 64), _chat(8.0, 4000, 100), (1, 2, 4)),
    Grid(
        "large", "ttft=4s@p90,itl=60ms@p99", 16, "chunk", (1024, 8192, 16384), _chat(4.0, 3000, 300, **LARGE), (2, 4, 8)
    ),
)


def exhaustive(grid: Grid, scenario: Scenario, pool: WorkerPool) -> tuple[list[MeasuredDesign], int]:
    """Return all designs by their highest rates, the best first, and the requests that were simulated."""
    prober = Prober(Traffic.of(scenario), ServiceLevel.parse(grid.level), pool)
    found = search_seeds(prober, grid.designs(scenario), requests=REQUESTS, seeds=SEEDS, tolerance=0.02)
    rows = [MeasuredDesign(mine[0].design, tuple(each.rate for each in mine), REQUESTS, ()) for mine in found]
    return sorted(rows, key=lambda row: -GOAL.worth(row.design, row.rate)), prober.requests


def held_against(grid: Grid, jobs: int) -> dict[str, Any]:
    """Return what an exhaustive search and a plan of a grid found."""
    scenario = grid.scenario
    began = time.process_time()
    request = PlanRequest(
        level=ServiceLevel.parse(grid.level),
        gpus=grid.gpus,
        gpu_types=grid.space.gpus,
        space=grid.space,
        options=(grid.option,),
        values={grid.option: grid.values},
        robust=False,
    )
    planner = Planner(scenario, request, WorkerPool(jobs), look=False)
    outcome = planner.run()
    assert outcome.best is not None
    with WorkerPool(jobs) as pool:
        rows, requests = exhaustive(grid, scenario, pool)
    found = next(row for row in rows if row.design == outcome.best.design)
    compared = compare(rows[0], found, GOAL)
    gap = 1.0 if compared is None else compared.ratio
    tie = found is rows[0] or compared is None or compared.tied_by_seeds or gap < 1 + RESOLUTION
    return {
        "grid": grid.name,
        "designs": len(rows),
        "best": rows[0].design.text,
        "best_rate": rows[0].rate,
        "planned": outcome.best.design.text,
        "planned_rate": found.rate,
        "gap": gap,
        "same_or_tie": tie,
        "exhaustive_requests": requests,
        "plan_requests": outcome.simulated,
        "share": outcome.simulated / requests,
        "cpu_s": time.process_time() - began,
    }


def _line(row: Mapping[str, Any]) -> str:
    found = "same or tie" if row["same_or_tie"] else "NOT THE BEST"
    return (
        f"{row['grid']}: {row['designs']} designs; best {row['best']} {row['best_rate']:.2f}/s; plan {row['planned']} "
        f"{row['planned_rate']:.2f}/s, {found}; {row['share']:.1%} of {row['exhaustive_requests']:,} requests"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grids that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", metavar="GRID", help=", ".join(grid.name for grid in GRIDS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for grid in GRIDS:
        if options.grids and grid.name not in options.grids:
            continue
        row = held_against(grid, options.jobs)
        rows.append(row)
        print(_line(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["same_or_tie"] and row["share"] <= 0.25 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long plans take: clusters at one rate, a whole plan of 8 GPUs, and one of about a thousand clusters.

    python -m benchmarks.planning.times [CASE...] [--jobs N]

Prints CPU seconds of all processes, wall time and simulated requests of each case; whether pdflow is compiled decides
most of it. `32 x 200` and `200 x 2000` simulate so many clusters with so many requests each at the rate of
examples/conversation.toml, as peers' searches do. `thousand` takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pdflow
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow.version import compiled
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.probes import DesignProbe, Prober
from pdflow_sim.plan.space import ShapeFinder, Space
from pdflow_sim.plan.traffic import Traffic

CONVERSATION: Final = Path(__file__).parents[2] / "examples" / "conversation.toml"
LEVEL: Final = "ttft=2s@p95,itl=50ms@p99"
CHUNKS: Final = (512, 1024, 2048, 4096, 16384)
BLOCK_SIZES: Final = (32, 64)
TYPES: Final = ("h100-sxm", "h200", "a100-80g")
THOUSAND_GPUS: Final = 64


def candidates(count: int) -> list[Design]:
    """Return clusters of 8 GPUs, by size, ratio, chunk and block size."""
    found = ShapeFinder(Scenario.load(CONVERSATION), Space(("h100-sxm",))).designs(8)
    chunked = [*found, *(design.with_option("chunk", chunk) for chunk in CHUNKS for design in found)]
    several = [*chunked, *(design.with_option("block_size", size) for size in BLOCK_SIZES for design in chunked)]
    if len(several) < count:
        raise ValueError(f"there are only {len(several)} clusters, and {count} are asked for")
    return several[:count]


def probed(count: int, requests: int, jobs: int) -> tuple[int, int]:
    """Simulate so many clusters; return how many those were and the simulated requests."""
    scenario = Scenario.load(CONVERSATION)
    designs = candidates(count)
    with WorkerPool(jobs) as pool:
        prober = Prober(Traffic.of(scenario), ServiceLevel.parse(LEVEL), pool)
        prober.run([DesignProbe(design, prober.traffic.rate, requests) for design in designs])
    return len(designs), prober.requests


def planned(jobs: int, *, gpus: int, types: Sequence[str] = ()) -> tuple[int, int]:
    """Plan; return the clusters that were simulated and the simulated requests."""
    outcome: PlanOutcome = pdflow.plan(CONVERSATION, slo=LEVEL, gpus=gpus, gpu=types, jobs=jobs).outcome
    return len({probe.design for probe in outcome.probes}), outcome.simulated


CASES: Final[Mapping[str, Callable[[int], tuple[int, int]]]] = {
    "32 x 200": lambda jobs: probed(32, 200, jobs),
    "200 x 2000": lambda jobs: probed(200, 2000, jobs),
    "8 GPUs": lambda jobs: planned(jobs, gpus=8),
    "thousand": lambda jobs: planned(jobs, gpus=THOUSAND_GPUS, types=TYPES),
}


def _cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    print("compiled" if compiled() else "interpreted", f"with {options.jobs} processes")
    for name, run in CASES.items():
        if options.cases and name not in options.cases:
            continue
        cpu, began = _cpu_s(), time.perf_counter()
        designs, requests = run(options.jobs)
        cpu, wall = _cpu_s() - cpu, time.perf_counter() - began
        print(f"{name}: {designs:,} clusters, {requests:,} requests: {cpu:.1f} CPU s, {wall:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast the simulator is, and how it grows: python benchmarks/sim_speed.py [--quick | --million | --methods]
[--repeat N]

Each case runs in a process of its own. CPU time is all of it but the imports: scenario, workload, world, run, figures.
Turns are those of simpy's queue; memory is the process's peak, imports included.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from pdflow.methods.catalogue import METHODS

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = str(ROOT / "examples/reference.toml")

CASES: dict[str, list[str]] = {
    "1,000 requests": ["workload.requests=1000"],
    "10,000 requests": ["workload.requests=10000"],
    "100,000 requests": ["workload.requests=100000"],
    "10,000, tp 2 to tp 2": ["workload.requests=10000", "pool.prefill.tp=2", "pool.decode.tp=2"],
    "10,000, tp 4 to tp 4": ["workload.requests=10000", "pool.prefill.tp=4", "pool.decode.tp=4"],
    "10,000, 16P16D at 32/s": [
        *("workload.requests=10000", "workload.arrival.rate_rps=32"),
        *("pool.prefill.replicas=16", "pool.decode.replicas=16"),
    ],
    "10,000, vllm-compat push": ["workload.requests=10000", "transfer.dialect=vllm-compat"],
    "10,000, strict pull": ["workload.requests=10000", "transfer.method=nixl-pull"],
    "100,000, prompts alike": ["workload={ like = 'mooncake-conversation', requests = 100000 }"],
}

MILLION = {"1,000,000 requests": ["workload.requests=1000000"]}

METHOD_CASES: dict[str, list[str]] = {
    **{f"10,000, {name}": [f"transfer.method={name}"] for name in METHODS},
    **{
        f"100,000, 64P64D, {name}": [
            *("workload.requests=100000", "workload.arrival.rate_rps=128", f"transfer.method={name}"),
            *("pool.prefill.replicas=64", "pool.decode.replicas=64"),
        ]
        for name in ("nixl-push", "kv-store", "mooncake-v1", "p2p-nccl-put-async", "cpu-staged")
    },
}

CHILD = """
import json, resource, sys, time
import pdflow.results.result, pdflow_sim.run
from pdflow.scenario import load
began = time.process_time()
scenario = load(sys.argv[1], overrides=sys.argv[2:])
world, _ = pdflow_sim.run.prepare(scenario, pdflow_sim.run.RunOptions(), [])
pdflow_sim.run.run(world, None, False)
result = pdflow_sim.run.conclude(scenario, world, (), False)
cpu_s = time.process_time() - began
assert result.metrics.completed == scenario.workload.requests
print(json.dumps({
    "requests": len(world.records),
    "cpu_s": cpu_s,
    "turns": result.totals.world_events,
    "messages": result.totals.messages,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def measured(overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own."""
    # -P: what is installed is measured, which may be compiled, not the source in this folder.
    command = [sys.executable, "-P", "-c", CHILD, REFERENCE, *overrides]
    ran = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the simulator is, and how it grows.")
    parser.add_argument("--quick", action="store_true", help="without the 100,000 requests")
    parser.add_argument("--million", action="store_true", help="1,000,000 requests, once, and nothing else")
    parser.add_argument("--methods", action="store_true", help="every transfer method, and nothing else")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many is shown")
    options = parser.parse_args()
    columns = f"{'requests/CPU s':>15}{'µs/request':>12}{'turns':>8}{'messages':>10}{'peak MB':>9}"
    print(f"{'examples/reference.toml':38}{columns}")
    best: dict[int, float] = {}
    if options.million:
        options.repeat = 1
    cases = MILLION if options.million else METHOD_CASES if options.methods else CASES
    for title, overrides in cases.items():
        if options.quick and "100,000" in title:
            continue
        runs = [measured(overrides) for _ in range(options.repeat)]
        run = min(runs, key=lambda figures: float(figures["cpu_s"]))
        requests, cpu_s = run["requests"], run["cpu_s"]
        if not options.methods:
            best.setdefault(requests, cpu_s)
        print(
            f"{title:38}{requests / cpu_s:15,.0f}{cpu_s / requests * 1e6:12.1f}{run['turns'] / requests:8.1f}"
            f"{run['messages'] / requests:10.1f}{run['peak_bytes'] / 1e6:9.0f}",
            flush=True,
        )
    if 100_000 in best:
        times = best[100_000] / best[10_000]
        print(f"100,000 take {times:.2f} times as long as 10,000: growth exponent {math.log10(times):.3f}")


if __name__ == "__main__":
    main()

"""CPU that pdflow's connector adds to a step of vLLM: python -m benchmarks.vllm.step_cost [--connector NAME] [options]

Requests go through a pair, 16 at a time. Printed for both instances, for EngineCore and the worker: microseconds of CPU
time of vLLM's thread in hooks, per step or per request.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.vllm.client import two_legs
from benchmarks.vllm.connectors import OURS, TIMING
from benchmarks.vllm.instances import Options, default_work, pair
from benchmarks.vllm.model import prompt
from benchmarks.vllm.timing import FOLDER, REQUEST


async def run(arguments: argparse.Namespace) -> int:
    folder = arguments.work / "timing"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {FOLDER: str(folder)}
    options = [
        Options(connector=arguments.connector, core=core, pdflow=TIMING, environment=environment) for core in "01"
    ]
    async with pair(*options, arguments.work) as (p, d):
        slots = trio.CapacityLimiter(arguments.concurrency)
        failed = 0

        async def one(index: int) -> None:
            nonlocal failed
            async with slots:
                legs = await two_legs(p.client, d.client, prompt(300, f"step/{index}"), arguments.output)
                failed += not legs.ok

        async with trio.open_nursery() as nursery:
            for index in range(arguments.requests):
                nursery.start_soon(partial(one, index))
        print(f"{arguments.connector}: {arguments.requests} requests, {failed} failed")
    for file in sorted(folder.glob("*.json")):
        print(table(file.stem.rpartition("-")[0], json.loads(file.read_text()), arguments.requests))
    return int(failed > 0)


def table(title: str, counted: dict[str, Any], requests: int) -> str:
    """Return a table of one process: microseconds per step of the hooks of a step, per request of the others."""
    steps = counted["steps"]
    by_step = {name: ns for name, (_, ns) in counted["hooks"].items() if name not in REQUEST}
    by_request = {name: ns for name, (_, ns) in counted["hooks"].items() if name in REQUEST}
    rows = [f"{title}: {steps:,} steps, {sum(by_step.values()) / steps / 1e3:.0f} us a step"]
    rows += [f"  {name:28} {ns / steps / 1e3:7.1f} us a step" for name, ns in sorted(by_step.items())]
    rows += [f"  {name:28} {ns / requests / 1e3:7.1f} us a request" for name, ns in sorted(by_request.items())]
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=OURS, default="pdflow-push")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output", type=int, default=64, help="tokens per answer")
    parser.add_argument("--work", type=Path, default=default_work())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))

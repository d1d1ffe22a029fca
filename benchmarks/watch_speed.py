"""What it costs to look at a run: python benchmarks/watch_speed.py [--requests N] [--large N] [--repeat N]

CPU time of the same run unwatched, with the live table on a terminal, and with links and KV blocks written down for
--timeline and --html, in turns, the best of each. Then, in a process of its own, how much memory a large run's timeline
takes to write: what the process has held at most before and after.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pdflow.results.files.timeline import TraceEvent, timeline
from pdflow.results.files.write import TIMELINE_NAME, write_timeline
from pdflow.scenario.reading.load import load
from pdflow_sim.observe.live_table import watching
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "examples/reference.toml"
MODES = ("unwatched", "live table", "recorded")


def took(requests: int, mode: str) -> tuple[float, World]:
    """CPU seconds of one run, and what is left of it."""
    scenario = load(REFERENCE, overrides=[f"workload.requests={requests}"])
    world, _ = prepare(scenario, RunOptions(timeline=mode == "recorded"), [])
    began = time.process_time()
    if mode == "live table":
        with watching(Console(file=io.StringIO(), force_terminal=True, width=80, height=24), scenario, world):
            run(world, None, drain=False)
    else:
        run(world, None, drain=False)
    return time.process_time() - began, world


def written(requests: int, folder: Path) -> dict[str, Any]:
    """Of a recorded run's timeline: events, CPU seconds, and the peaks of this process before and after, in MB."""
    import resource

    def peak_mb() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

    events = 0

    def counted() -> Iterator[TraceEvent]:
        nonlocal events
        assert world.recorder is not None
        recording = world.recorder.recording(world.fabric.paths.names)
        for events, event in enumerate(timeline(world.records, recording), start=1):  # noqa: B007
            yield event

    _, world = took(requests, "recorded")
    before, began = peak_mb(), time.process_time()
    write_timeline(folder / TIMELINE_NAME, counted())
    cpu_s = time.process_time() - began
    return {"events": events, "cpu_s": cpu_s, "before_mb": before, "after_mb": peak_mb()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to look at a run.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=100_000, help="requests of the run whose timeline is written")
    parser.add_argument("--repeat", type=int, default=5, help="the fastest of so many is shown")
    parser.add_argument("--write-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(written(options.large, Path(folder))))
        return
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(options.repeat):
        for mode in MODES:
            spent[mode].append(took(options.requests, mode)[0])
    plain = min(spent["unwatched"])
    for mode in MODES:
        best = min(spent[mode])
        print(f"{mode:12}{options.requests / best:10,.0f} requests/CPU s{100 * (best / plain - 1):+8.1f} %")
    child = [sys.executable, __file__, "--write-only", "--large", str(options.large)]
    measured = json.loads(subprocess.run(child, capture_output=True, encoding="utf-8", check=True).stdout)
    print(
        f"timeline of {options.large:,} requests: {measured['events']:,} events in {measured['cpu_s']:.1f} CPU s,"
        f" peak memory {measured['before_mb']:.0f} MB before, {measured['after_mb']:.0f} MB after"
    )


if __name__ == "__main__":
    main()

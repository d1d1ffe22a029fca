"""Where a simulated request's CPU time goes, by room: python benchmarks/profile_sim.py [SCENARIO] [--set KEY=VALUE]...

A sampler on the process's CPU clock: it asks every few milliseconds which function runs. Figures are microseconds per
request; the sum is that of the run itself, which is timed without the sampler.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from pdflow.scenario import ResolvedScenario, load
from pdflow_sim.run import RunOptions, prepare, run

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = str(ROOT / "examples/reference.toml")


def package_of(file: str) -> str:
    """The folder that a function's file lies in, as `protocol` or `sim`; other people's code is "libraries"."""
    path = Path(file)
    if not path.is_relative_to(ROOT):
        return "libraries"
    segments = path.relative_to(ROOT).parts
    return segments[1] if segments[0] == "pdflow" else segments[0]


def timed(scenario: ResolvedScenario) -> float:
    """CPU microseconds per request of one run."""
    world, oracle = prepare(scenario, RunOptions(), [])
    began = time.process_time()
    run(world, oracle, False)
    return (time.process_time() - began) / len(world.records) * 1e6


def sampled(scenario: ResolvedScenario) -> tuple[Counter[str], Counter[str]]:
    """How often each room and each function was seen running."""
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            package = package_of(frame.f_code.co_filename)
            packages[package] += 1
            functions[f"{package}: {frame.f_code.co_qualname}"] += 1

    world, oracle = prepare(scenario, RunOptions(), [])
    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        run(world, oracle, False)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return packages, functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", default=REFERENCE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    args = parser.parse_args()
    scenario = load(args.scenario, overrides=args.overrides)
    per_request = min(timed(scenario) for _ in range(3))
    packages, functions = sampled(scenario)
    seen = sum(packages.values())
    print(f"{per_request:.0f} µs per request, by room ({seen} samples)")
    for package, times in packages.most_common():
        print(f"{per_request * times / seen:7.1f}  {package}")
    print("the dearest functions, without what they call")
    for name, times in functions.most_common(12):
        print(f"{per_request * times / seen:7.1f}  {name}")


if __name__ == "__main__":
    main()

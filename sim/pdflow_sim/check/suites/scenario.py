"""`pdflow check SCENARIO.toml`: simulate it, seed after seed, under the oracle; or replay a recorded trace of it."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from pdflow.errors import InvariantError
from pdflow.results.files.merge_events import merge_events
from pdflow.scenario.reading.load import load
from pdflow_sim.check.counterexamples.trace import Followed, follow, follow_engines
from pdflow_sim.check.report import Counter
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer

DEFAULT_S = 30.0
SEEDS = 100


def scenario(file: str, options: CheckOptions, console: Console) -> SuiteResult:
    """Simulate a scenario with at least one seed, and check S1 to S9 on every event, and at the end that every request
    has ended and nothing is left."""
    from pdflow_sim.run import RunOptions, prepare, run

    until_s = time.monotonic() + (options.budget_s or DEFAULT_S)
    rows = []
    broken = 0
    with Counter(file, quiet=options.json) as counter:
        for seed in range(options.seed, options.seed + SEEDS):
            world, oracle = prepare(load(file, seed=seed), RunOptions(check_invariants=True), [])
            try:
                if run(world, oracle, drain=True):
                    raise KeyboardInterrupt
                what = ""
            except InvariantError as error:
                what = str(error)
                broken += 1
                console.print(f"seed {seed}: {what}")
            rows.append({"seed": seed, "requests": len(world.records), "broken": what or None})
            counter.show(f"{len(rows)} seeds, {broken} broken")
            if time.monotonic() > until_s:
                break
    requests = sum(int(str(row["requests"])) for row in rows)
    verdict = f"{broken} broken" if broken else "S1 to S9 hold on every event, and every request ends"
    console.print(f"{file}: {len(rows)} seeds from {options.seed}, {requests:,} requests: {verdict}", soft_wrap=True)
    return answer(rows, not_so=broken > 0, stopped=False)


def trace(file: str, record: Path, console: Console) -> SuiteResult:
    """Replay a recorded trace of a scenario. Raises TraceDiffersError where an effect differs."""
    return _followed(follow(load(file), record), record, console)


def trace_of_engines(record: Path, console: Console) -> SuiteResult:
    """Replay a recorded trace that describes its engines, or those of the processes that wrote into a folder. Raises
    TraceDiffersError where an effect differs."""
    path = merge_events(record, remove=False) if record.is_dir() else record
    return _followed(follow_engines(path), path, console)


def _followed(found: Followed, record: Path, console: Console) -> SuiteResult:
    console.print(
        f"{record}: {found.events:,} events replayed, with the recorded {found.effects:,} effects; S1 to S9 hold",
        soft_wrap=True,
    )
    return answer([{"events": found.events, "effects": found.effects}], not_so=False, stopped=False)

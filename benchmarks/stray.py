"""How many random walks it takes to meet each mutant: python benchmarks/stray.py [--only TEXT] [--ranges N]

Each is walked for in seven ranges of 10,000 seeds, whose clusters were drawn apart; a range in which it is not met
counts as more than 10,000. What is said is the median and the whole span, which holds the true median with 98 % (the
smallest and the largest of seven; of one range, it says nothing). Mutants that rest on clocks count as not met: walks
have none.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.mutants.stray import RUNS, stray
from pdflow_sim.check.search.swarm import ERA

NEVER = RUNS + 1


def taken(mutant: Mutant, ranges: int) -> list[int]:
    """Runs until it was met, in each range; no further when most have not met it."""
    found: list[int] = []
    for era in range(ranges):
        kill = stray(mutant, time.process_time, range(era * ERA, era * ERA + RUNS), budget_s=float("inf"))
        found.append(kill.states if kill.invariant else NEVER)
        if found.count(NEVER) > ranges // 2:
            break
    return found


def format_runs(runs: float) -> str:
    return f"{runs:,.0f}" if runs < NEVER else f"over {RUNS:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--ranges", type=int, default=7)
    given = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS.values() if mutant.breaks and given.only in mutant.name]
    caught = 0
    for mutant in mutants:
        if mutant.scope.horizon:
            print(f"{mutant.name:36} not walked for: it rests on clocks", flush=True)
            continue
        runs = taken(mutant, given.ranges)
        short = len(runs) < given.ranges
        middle = NEVER if short else median(runs)
        caught += middle < NEVER
        span = "" if short else f"   {format_runs(min(runs))} to {format_runs(max(runs))}"
        print(f"{mutant.name:36} {format_runs(middle):>12}{span}", flush=True)
    print(f"{caught} of {len(mutants)} within {RUNS:,} runs ({caught / len(mutants):.0%})")


if __name__ == "__main__":
    main()

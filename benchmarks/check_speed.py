"""How fast the checker is: python benchmarks/check_speed.py [--quick]

CPU time of one process. States per second are those of complete searches at two requests, without and with the proof
that everything can end; runs are random walks in scopes that are drawn; simulated requests are watched by the oracle
in runs of 100, worlds and workloads included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow.scenario import load
from pdflow.version import compiled
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import hunt
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.search.campaign import WalkTask, walks
from pdflow_sim.check.search.search import Coverage, explore
from pdflow_sim.run import RunOptions, prepare, run

REFERENCE = str(Path(__file__).resolve().parents[1] / "examples/reference.toml")
TWO_REQUESTS = ("two requests, one lost frame", "two requests, one pool, a loss and a duplicate")


def timed(work: Callable[[], object]) -> float:
    """CPU seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


def searched(named: Named, lively: bool) -> tuple[Coverage, float]:
    """A complete search, and its CPU seconds."""
    world = relation(named.scope)
    began = time.process_time()
    covered = explore(world, lively=lively)
    return covered, time.process_time() - began


def line(title: str, figure: str, note: str = "") -> None:
    print(f"{title:58}{figure:>14}  {note}", flush=True)


def searches(quick: bool) -> None:
    by_name = {named.name: named for named in SCOPES}
    for name in TWO_REQUESTS[:1] if quick else TWO_REQUESTS:
        covered, spent = searched(by_name[name], lively=False)
        line(
            name,
            f"{covered.states / spent:,.0f}/s",
            f"{covered.states:,} states, {covered.transitions / spent:,.0f} moves/s",
        )
    everyday = [named for named in SCOPES if not named.nightly]
    spent = sum(searched(named, lively=True)[1] for named in everyday)
    line(f"all {len(everyday)} scopes of CI, with liveness", f"{spent:.1f} s")


def random_runs(runs: int) -> None:
    for dialect in (STRICT, VLLM_COMPAT):
        found = walks(WalkTask(dialect=dialect), range(1, runs + 1))
        line(
            f"random runs, {dialect.name}",
            f"{found.runs / found.cpu_s:,.0f}/s",
            f"{found.moves / found.runs:.0f} moves each",
        )


def mutants() -> None:
    kills = [hunt(mutant, time.process_time) for mutant in MUTANTS.values()]
    caught = [kill for kill in kills if kill.invariant]
    slowest = max(caught, key=lambda kill: kill.seconds)
    line(f"mutants: {len(caught)} of {len(kills)} caught, each within", f"{slowest.seconds:.2f} s", slowest.mutant)
    longest = max(caught, key=lambda kill: kill.steps)
    line("mutants: the longest of the shortest counterexamples", f"{longest.steps} steps", longest.mutant)


def simulated(runs: int) -> None:
    scenario = load(REFERENCE, overrides=["workload.requests=100"])

    def one(seed: int) -> None:
        world, oracle = prepare(attrs.evolve(scenario, seed=seed), RunOptions(check_invariants=True), [])
        run(world, oracle, drain=True)

    spent = timed(lambda: [one(seed) for seed in range(1, runs + 1)])
    line("simulated requests under the oracle, in runs of 100", f"{100 * runs / spent:,.0f}/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the checker is.")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    options = parser.parse_args()
    print("compiled" if compiled() else "interpreted")
    searches(options.quick)
    random_runs(500 if options.quick else 10_000)
    if not compiled():
        mutants()
    simulated(5 if options.quick else 50)


if __name__ == "__main__":
    main()

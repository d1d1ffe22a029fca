"""`pdflow check walk`: random runs, by a portfolio of schedulers, in clusters and under faults that are drawn too."""

from __future__ import annotations

import time

from rich.console import Console

from pdflow.protocol.dialect import DIALECTS, STRICT, VLLM_COMPAT, Dialect
from pdflow_sim.check.counterexamples.counterexample import Information
from pdflow_sim.check.counterexamples.replay import record
from pdflow_sim.check.counterexamples.shrink import shrink
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.report import Counter
from pdflow_sim.check.search.campaign import Failure, Walked, WalkTask, walks
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer, keep

DEFAULT_S = 30.0
RUNS = 10_000_000


def walk(options: CheckOptions, console: Console) -> SuiteResult:
    """Walk as many seeds of each dialect in turn as were asked for, or as the time allows."""
    dialects = [DIALECTS[options.dialect]] if options.dialect else [STRICT, VLLM_COMPAT]
    each_s = (options.budget_s or (DEFAULT_S if options.runs is None else float("inf"))) / len(dialects)
    rows = []
    stopped = False
    for dialect in dialects:
        walked = _walked(dialect, options, each_s)
        counterexamples = {
            name: _shrink_and_save(failure, dialect, options) for name, failure in walked.failures.items()
        }
        seeds = f"seeds {options.seed} to {options.seed + walked.runs - 1}"
        console.print(
            f"{dialect.name}: {walked.runs:,} runs, {walked.moves:,} moves, {seeds}, "
            f"{_speed(walked)}; "
            f"{len(walked.goals)} goals reached; " + (_broken(walked) or "nothing broken"),
            soft_wrap=True,
        )
        for path in counterexamples.values():
            console.print(f"pdflow check --diagram {path}", soft_wrap=True)
        stopped |= walked.runs < (options.runs or 0)
        rows.append(
            {
                "dialect": dialect.name,
                "first_seed": options.seed,
                "runs": walked.runs,
                "moves": walked.moves,
                "cpu_s": round(walked.cpu_s, 3),
                "wide_runs": walked.wide_runs,
                "wide_cpu_s": round(walked.wide_cpu_s, 3),
                "plain_runs_per_cpu_s": round(walked.plain_per_cpu_s),
                "wide_runs_per_cpu_s": round(walked.wide_per_cpu_s),
                "goals": sorted(walked.goals),
                "broken": walked.broken,
                "counterexamples": counterexamples,
            }
        )
    return answer(rows, not_so=any(row["broken"] for row in rows), stopped=stopped)


def _walked(dialect: Dialect, options: CheckOptions, each_s: float) -> Walked:
    until_s = time.monotonic() + each_s
    with Counter(f"{dialect.name} walks", quiet=options.json) as counter:

        def tick(found: Walked) -> bool:
            counter.show(f"{found.runs:,} runs, {found.moves:,} moves, {len(found.broken)} invariants broken")
            return False

        seeds = range(options.seed, options.seed + (options.runs or RUNS))
        return walks(WalkTask(dialect=dialect), seeds, jobs=options.jobs, until_s=until_s, tick=tick)


def _speed(walked: Walked) -> str:
    """Return the runs per CPU second, in words: of plain clusters, and of wide ones, which are larger."""
    kinds = {"plain": walked.plain_per_cpu_s, "wide": walked.wide_per_cpu_s}
    runs = {"plain": walked.runs - walked.wide_runs, "wide": walked.wide_runs}
    of = [f"{speed:,.0f} in {kind} clusters" for kind, speed in kinds.items() if runs[kind]]
    return f"runs per CPU second: {', '.join(of)}"


def _shrink_and_save(failure: Failure, dialect: Dialect, options: CheckOptions) -> str:
    """Shrink and write the counterexample of a failure, and return its path."""
    short = shrink(failure.scope, failure.names, failure.invariant)
    information = Information(seed=failure.seed, scheduler=failure.scheduler)
    counterexample = record(relation(short.scope), short.names, information=information)
    return str(keep(options.out, f"{dialect.name} seed {failure.seed} {failure.invariant}", counterexample))


def _broken(walked: Walked) -> str:
    return ", ".join(f"{name} broken in {count:,}" for name, count in sorted(walked.broken.items()))

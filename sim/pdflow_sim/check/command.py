"""`pdflow check`: runs the selected suites within their limits, and returns the exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from attrs import evolve
from rich.console import Console

from pdflow.errors import EXIT_BUDGET, EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOT_SO, Problem, ScenarioError
from pdflow_sim.check import quick
from pdflow_sim.check.counterexamples import counterexample as counterexample_files
from pdflow_sim.check.counterexamples.counterexample import CounterexampleError
from pdflow_sim.check.search.host_resources import usable_cpus
from pdflow_sim.check.search.swarm import BLOCK, CLUSTERS
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult

Suite: TypeAlias = Callable[[CheckOptions, Console], SuiteResult]
SUITES = ("scopes", "methods", "routers", "mutants", "races", "walk")
"""The suites in the order in which `all` runs them; each is a module of suites/."""
CHECKS = ("quick", "all", *SUITES, "scope")
"""Every WHAT of the command line but a scenario."""
RUNS_OF_ALL = CLUSTERS * BLOCK
"""Random walks of each dialect in `all` without a budget, half of them in plain and half in wide clusters, so that the
walked seeds do not depend on the machine's speed. `walk` alone has a time instead."""


def options(*, budget: float | None, jobs: int | None, out: str, **rest: Any) -> CheckOptions:
    """Return the options of the command line as CheckOptions. Without `jobs`, one for each CPU available."""
    return CheckOptions(budget_s=budget, jobs=jobs or usable_cpus(), out=Path(out), **rest)


def check(what: str, options: CheckOptions, trace: str | None = None) -> int:
    """Run one suite, a scenario, the quick check or all suites, and return the exit code. Raises ScenarioError for an
    unknown name."""
    _known(what, options)
    if what == "quick":
        options = quick.narrowed(options)
    if what == "all" and options.budget_s is None and options.runs is None:
        options = evolve(options, runs=RUNS_OF_ALL)
    console = _console(options)
    answers: dict[str, SuiteResult] = {}
    began = time.monotonic()
    interrupted = False
    try:
        if what.endswith(".toml"):
            answers["scenario"] = _of_scenario(what, options, trace, console)
        else:
            for name in {"quick": quick.SUITES, "all": SUITES}.get(what, (what,)):
                suite: Suite = getattr(import_module(f"pdflow_sim.check.suites.{name}"), name)
                answers[name] = suite(evolve(options, budget_s=_left(options, began)), console)
        if what == "quick":
            for line in quick.left_out(options, RUNS_OF_ALL):
                console.print(line, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: the results above hold; the rest was not checked", soft_wrap=True)
        interrupted = True
    if options.json:
        found = {name: answer.rows for name, answer in answers.items()}
        for answer in answers.values():
            found |= answer.more
        _print_line(json.dumps(found))
    codes = {answer.code for answer in answers.values()}
    order = (EXIT_NOT_SO, EXIT_INTERRUPTED, EXIT_BUDGET) if interrupted else (EXIT_NOT_SO, EXIT_BUDGET)
    return EXIT_INTERRUPTED if interrupted else next((code for code in order if code in codes), EXIT_DONE)


def names(what: str, options: CheckOptions) -> int:
    """Print the names that WHAT may check, and return the exit code. Raises ScenarioError."""
    from pdflow_sim.check import listing

    _known(what, options)
    rows = listing.listed(what, options, _console(options))
    if options.json:
        _print_line(json.dumps(rows))
    return EXIT_DONE


def _known(what: str, options: CheckOptions) -> None:
    if what not in CHECKS and not what.endswith(".toml"):
        from pdflow_sim.check import listing

        raise ScenarioError([Problem("", "", f"unknown check {what!r}; {listing.hint(what, CHECKS)}")])
    if options.settings and what != "scope":
        raise ScenarioError([Problem("--set", "", "needs WHAT scope: pdflow check scope --set drop=1")])


def _console(options: CheckOptions) -> Console:
    return Console(stderr=options.json, highlight=False, markup=False, emoji=False)


def _left(options: CheckOptions, began: float) -> float | None:
    """Return the seconds of the budget that are left for the next suite; None without a budget."""
    return None if options.budget_s is None else max(0.0, began + options.budget_s - time.monotonic())


def _of_scenario(file: str, options: CheckOptions, trace: str | None, console: Console) -> SuiteResult:
    from pdflow_sim.check.suites import scenario

    if trace is not None:
        return scenario.trace(file, Path(trace), console)
    return scenario.scenario(file, options, console)


def trace(record: str, *, as_json: bool) -> int:
    """Replay a recorded trace that describes its engines, or a folder of such; return the exit code."""
    from pdflow_sim.check.suites.scenario import trace_of_engines

    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False)
    result = trace_of_engines(Path(record), console)
    if as_json:
        _print_line(json.dumps({"trace": result.rows}))
    return result.code


def replay(file: str) -> int:
    """Replay a counterexample file strictly. Returns EXIT_DONE if it was recorded without a violation, and replays as
    recorded without one; else EXIT_NOT_SO."""
    from pdflow_sim.check.counterexamples.replay import strict

    counterexample = counterexample_files.read(file)
    with _patched(counterexample.mutant, file):
        result = strict(counterexample.world(), counterexample)
    steps = f"{file}: {len(counterexample.steps)} steps"
    if result.mismatch is not None:
        _print_line(f"{file}: {result.mismatch}", error=True)
    elif result.verdict is None:
        recorded = (
            ""
            if counterexample.verdict is None
            else f"; {counterexample.verdict.invariant} was violated when it was recorded"
        )
        _print_line(f"{steps}; every invariant holds, and every request ends{recorded}")
        return EXIT_DONE if counterexample.verdict is None else EXIT_NOT_SO
    else:
        _print_line(f"{steps}; {result.verdict.invariant}: {result.verdict.what}")
    return EXIT_NOT_SO


def diagram(file: str, dialect: str | None = None) -> int:
    """Print the diagram of a counterexample's file, or of a race by its number: fixed-width text, then Mermaid."""
    from pdflow_sim.check.counterexamples.diagram import collect
    from pdflow_sim.check.counterexamples.diagram_mermaid import mermaid
    from pdflow_sim.check.counterexamples.diagram_text import text

    if re.fullmatch(r"[Rr]\d+", file):
        from pdflow_sim.check.races.verdict import counterexample as race

        counterexample = race(file, dialect or "vllm-stock")
    else:
        counterexample = counterexample_files.read(file)
    with _patched(counterexample.mutant, file):
        drawn = collect(counterexample)
    _print_line(text(drawn, min(100, max(80, _columns()))))
    _print_line("\n```mermaid")
    _print_line(mermaid(drawn).rstrip("\n"))
    _print_line("```")
    return EXIT_DONE


@contextmanager
def _patched(mutant: str | None, file: str) -> Iterator[None]:
    """Apply a mutant, if one is named. Raises CounterexampleError for one that does not exist."""
    if mutant is None:
        yield
        return
    from pdflow_sim.check.mutants.catalogue import MUTANTS

    if mutant not in MUTANTS:
        what = f"unknown mutant {mutant!r}; `pdflow check mutants --list` lists them"
        raise CounterexampleError(file, "mutant", what)
    with MUTANTS[mutant].applied():
        yield


def _print_line(text: str, error: bool = False) -> None:
    (sys.stderr if error else sys.stdout).write(text + "\n")


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 80

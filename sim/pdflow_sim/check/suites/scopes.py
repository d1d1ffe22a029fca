"""`pdflow check scopes`: search every state of every named scope."""

from __future__ import annotations

from rich.console import Console

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.report import Board, reductions, scopes_table
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.search.workers import Searched, search_all
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer, keep


def chosen(options: CheckOptions) -> list[Named]:
    """Return the scopes that the options select. Raises ScenarioError if there are none."""
    found = [
        named
        for named in SCOPES
        if (options.large or not named.nightly or options.only)
        and (options.dialect is None or named.scope.dialect.name == options.dialect)
        and options.selects(named.name)
    ]
    if not found:
        raise ScenarioError([Problem("--only", "", f"no scope of this dialect has {options.only!r} in its name")])
    return found


def scopes(options: CheckOptions, console: Console) -> SuiteResult:
    """Search every state of every selected scope, and write a counterexample for each that breaks."""
    selected = chosen(options)
    ended: list[Searched] = []
    try:
        with Board(len(selected), quiet=options.json) as board:
            for one in search_all(selected, options.jobs, options.until_s, board.searching, board.refresh):
                ended.append(one)
                board.ended(one)
    finally:
        order = {named.name: at for at, named in enumerate(selected)}
        ended.sort(key=lambda one: order[one.name])
        console.print(scopes_table(ended))
        for line in reductions(ended):
            console.print(line, soft_wrap=True)
        paths = {
            one.name: keep(options.out, one.name, one.counterexample) for one in ended if one.counterexample is not None
        }
        for path in paths.values():
            console.print(f"pdflow check --diagram {path}", soft_wrap=True)
    rows = [
        {
            "scope": one.name,
            "dialect": one.scope.dialect.name,
            "states": one.states,
            "transitions": one.transitions,
            "depth": one.depth,
            "reductions": list(one.reductions),
            "odds_of_a_collision": one.odds,
            "seconds": round(one.seconds, 3),
            "stopped_by": one.stopped_by or None,
            "goals": list(one.goals),
            "missed": list(one.missed),
            "story": str(paths[one.name]) if one.name in paths else None,
        }
        for one in ended
    ]
    return answer(
        rows,
        not_so=any(one.counterexample or one.missed for one in ended),
        stopped=any(one.stopped_by for one in ended),
    )

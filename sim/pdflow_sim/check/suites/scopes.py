"""`pdflow check scopes`: search every state of every named scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from rich.console import Console

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.report import Board, liveness, needless, reductions, scopes_table
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.pair_coverage import OPEN, covered, pair_lines, pair_rows
from pdflow_sim.check.scopes.pairs import IN_CI, NIGHTLY, TRUNCATED
from pdflow_sim.check.search.workers import FAIR_STATES, NIGHTLY_FAIR_STATES, Searched, search_all
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer, keep


def matching(options: CheckOptions) -> list[Named]:
    """Return the scopes of the dialect and the words in the options, nightly ones included."""
    return [
        named
        for named in SCOPES
        if (options.dialect is None or named.scope.dialect.name == options.dialect) and options.selects(named.name)
    ]


def chosen(options: CheckOptions) -> list[Named]:
    """Return the scopes to search. Raises ScenarioError if there are none."""
    found = matching(options)
    if not found:
        of = "" if options.dialect is None else f" of {options.dialect}"
        has = "" if options.only is None else f" has {options.only!r} in its name"
        raise ScenarioError([Problem("", "", f"no scope{of}{has}: `pdflow check scopes --list` lists them")])
    selected = [named for named in found if (options.large or not named.nightly) and _is_small(named, options)]
    if not selected and options.only is not None:
        raise ScenarioError([Problem("--only", "", f"{options.only!r} matches only {_nightly(len(found))}")])
    return selected


def _is_small(named: Named, options: CheckOptions) -> bool:
    return options.max_states is None or 0 < named.states <= options.max_states


def _nightly(count: int) -> str:
    return f"{count} nightly {'scope' if count == 1 else 'scopes'}; --large includes {'it' if count == 1 else 'them'}"


def scopes(options: CheckOptions, console: Console) -> SuiteResult:
    """Search every state of every selected scope, and write a counterexample for each that breaks."""
    selected = chosen(options)
    result = searched(selected, options, console)
    left_out = sum(named.nightly for named in matching(options)) if not options.large else 0
    if left_out and options.max_states is None:
        what = "" if options.only is None else f" of those that match {options.only!r}"
        console.print(f"not searched{what}: {_nightly(left_out)}", soft_wrap=True)
    return result if _narrowed(options) else with_pairs(result, console)


def _narrowed(options: CheckOptions) -> bool:
    return not (options.only is None and options.dialect is None and options.max_states is None)


def with_pairs(result: SuiteResult, console: Console) -> SuiteResult:
    """Print which scopes cover which pairs of faults, and add the rows of it. Scopes that were searched count as they
    ended, others as the catalogue says."""
    known = {named.name: named for named in SCOPES}
    letters = {row["scope"]: _letter(row, known[row["scope"]]) for row in result.rows}
    best = covered(SCOPES, letters)
    console.print()
    for line in pair_lines(best):
        console.print(line, soft_wrap=True)
    return evolve(result, more={"pairs": pair_rows(best)})


def _letter(row: dict[str, Any], named: Named) -> str:
    if row["stopped_by"] or row["missed"] or row["counterexample"]:
        return OPEN
    return TRUNCATED if row["truncated"] else NIGHTLY if named.nightly else IN_CI


def searched(selected: Sequence[Named], options: CheckOptions, console: Console) -> SuiteResult:
    """Search these scopes, print the table, and write counterexamples."""
    ended: list[Searched] = []
    fair_states = NIGHTLY_FAIR_STATES if options.large else FAIR_STATES
    try:
        with Board(len(selected), quiet=options.json) as board:
            for one in search_all(selected, options.jobs, options.until_s, board.searching, board.refresh, fair_states):
                ended.append(one)
                board.ended(one)
    finally:
        order = {named.name: at for at, named in enumerate(selected)}
        ended.sort(key=lambda one: order[one.name])
        console.print(scopes_table(ended))
        console.print(liveness(ended), soft_wrap=True)
        console.print(needless(ended), soft_wrap=True)
        for line in reductions(ended):
            console.print(line, soft_wrap=True)
        paths = {
            one.name: str(keep(options.out, one.name, one.counterexample))
            for one in ended
            if one.counterexample is not None
        }
        for path in paths.values():
            console.print(f"pdflow check --diagram {path}", soft_wrap=True)
    return answer(
        [_row(one, paths.get(one.name)) for one in ended],
        not_so=any(one.counterexample or one.missed for one in ended),
        stopped=any(one.stopped_by for one in ended),
    )


def _row(one: Searched, counterexample: str | None) -> dict[str, Any]:
    return {
        "scope": one.name,
        "dialect": one.scope.dialect.name,
        "states": one.states,
        "transitions": one.transitions,
        "depth": one.depth,
        "reductions": list(one.reductions),
        "collision_probability": one.odds,
        "seconds": round(one.seconds, 3),
        "stopped_by": one.stopped_by or None,
        "truncated": one.truncated,
        "liveness": one.liveness,
        "needless_states": one.needless_states,
        "needless_in": one.needless_in,
        "goals": list(one.goals),
        "missed": list(one.missed),
        "counterexample": counterexample,
    }

"""`pdflow check mutants`: one rule dropped at a time; the search must catch each by the invariant that it names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import Kill, as_expected, hunt
from pdflow_sim.check.report import Counter
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer


def mutants(options: CheckOptions, console: Console) -> SuiteResult:
    """Hunt every selected mutant, one after the other: a patch applies to the whole process."""
    selected = [mutant for mutant in MUTANTS.values() if options.selects(mutant.name)]
    if options.dialect:
        selected = [mutant for mutant in selected if mutant.scope.dialect.name == options.dialect]
    if not selected:
        raise ScenarioError([Problem("--only", "", f"no mutant has {options.only!r} in its name")])
    until_s = options.until_s
    kills: list[tuple[Kill, bool]] = []
    try:
        with Counter("mutants", quiet=options.json) as counter:
            for mutant in selected:
                if time.monotonic() > until_s:
                    break
                counter.show(f"{len(kills)} of {len(selected)}: {mutant.name}")
                kill = hunt(mutant, time.process_time, max(0.0, min(60.0, until_s - time.monotonic())))
                kills.append((kill, as_expected(mutant, kill)))
    finally:
        console.print(_table(kills))
        for line in _survivors(kills):
            console.print(line, soft_wrap=True)
    skipped = len(selected) - len(kills)
    if skipped:
        console.print(f"the budget ended before {skipped} more")
    rows = [
        {
            "mutant": kill.mutant,
            "invariant": kill.invariant or None,
            "search": kill.search,
            "states": kill.states,
            "seconds": round(kill.seconds, 3),
            "steps": kill.steps,
            "moves": list(kill.moves),
            "survives": MUTANTS[kill.mutant].survives or None,
            "as_expected": fine,
        }
        for kill, fine in kills
    ]
    stopped = bool(skipped) or any(kill.stopped for kill, _ in kills)
    return answer(rows, not_so=any(not fine and not kill.stopped for kill, fine in kills), stopped=stopped)


def _table(kills: list[tuple[Kill, bool]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("mutant", overflow="fold")
    table.add_column("caught by")
    for title in ("steps", "states", "seconds"):
        table.add_column(title, justify="right")
    table.add_column("")
    for kill, fine in kills:
        verdict = "" if fine else "stopped" if kill.stopped else "not as expected"
        table.add_row(
            kill.mutant,
            kill.invariant or "survives",
            str(kill.steps) if kill.invariant else "",
            f"{kill.states:,}",
            f"{kill.seconds:.2f}",
            Text(verdict, "bold red"),
        )
    caught = sum(bool(kill.invariant) for kill, _ in kills)
    slowest = max((kill.seconds for kill, _ in kills), default=0.0)
    table.add_section()
    table.add_row(f"{caught} of {len(kills)} caught", "", "", "", f"{slowest:.2f}", "slowest")
    return table


def _survivors(kills: list[tuple[Kill, bool]]) -> Iterator[str]:
    """Yield a line for each mutant that no search catches, as expected, with the reason."""
    found = [kill.mutant for kill, fine in kills if fine and not kill.invariant]
    if found:
        yield "\nsurvivors, all expected:"
    for name in found:
        yield f"  {name}: {MUTANTS[name].survives}"

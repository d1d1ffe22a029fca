"""`pdflow check races`: the 52 named races, and the outcome of each in every dialect."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.verdict import RaceRow
from pdflow_sim.check.races.verdict import rows as looked_at
from pdflow_sim.check.report import Counter
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer


def races(options: CheckOptions, console: Console) -> SuiteResult:
    """Search every selected race again; the exit code is 0 if every row is as its table expects."""
    selected = [number for number, race in RACES.items() if options.selects(f"{number} {race.name}")]
    if not selected:
        raise ScenarioError([Problem("--only", "", f"no race has {options.only!r} in its number or name")])
    dialects = [options.dialect] if options.dialect else []
    budget_s = float("inf") if options.budget_s is None else options.budget_s
    ended: list[RaceRow] = []
    try:
        with Counter("races", quiet=options.json) as counter:
            for row in looked_at(budget_s, selected, dialects, time.monotonic):
                ended.append(row)
                counter.show(f"{len(ended)} of {len(selected)}: {row.race.number} {row.race.name}")
    finally:
        console.print(_table(ended))
    hint = "`pdflow check --diagram R13` draws one, in vllm-stock or in --dialect; docs/spec.md lists the scopes"
    console.print(hint, soft_wrap=True)
    found = [
        {
            "race": row.race.number,
            "name": row.race.name,
            "source": row.race.source,
            "ok": row.ok,
            "seconds": round(row.seconds, 3),
            "dialects": {
                name: {
                    "result": found.summary,
                    "ok": found.ok,
                    "where": found.where,
                    "invariant": found.invariant or None,
                    "steps": found.steps,
                    "states": found.states,
                }
                for name, found in row.found.items()
            },
        }
        for row in ended
    ]
    return answer(
        found,
        not_so=any(not row.ok and not row.stopped for row in ended),
        stopped=any(row.stopped for row in ended),
    )


def _table(ended: list[RaceRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("race", no_wrap=True, overflow="fold")
    dialects = list(dict.fromkeys(name for row in ended for name in row.found))
    for name in dialects:
        table.add_column(name, overflow="fold")
    for row in ended:
        cells = [
            Text(_short(row.found[name].summary), "" if row.found[name].ok else "bold red")
            if name in row.found
            else Text("")
            for name in dialects
        ]
        table.add_row(f"{row.race.number} {row.race.name}", *cells)
    table.add_section()
    fine = sum(row.ok for row in ended)
    table.add_row(f"{fine} of {len(ended)} as expected", *[""] * len(dialects))
    return table


def _short(summary: str) -> str:
    """Return a summary without its reason, which docs/spec.md has."""
    return "by a test" if summary.endswith("shown by a test") else summary.partition(":")[0]

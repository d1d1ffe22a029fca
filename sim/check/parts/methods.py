"""`pdflow check methods`: every method's way of moving KV, in strict and as published."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from pdflow.errors import Problem, ScenarioError
from pdflow.methods.catalogue import METHODS
from sim.check.datapath.rows import Row, rows
from sim.check.parts.part import Answer, Options, answer
from sim.check.report import Counter


def methods(options: Options, console: Console) -> Answer:
    """Each explored; 0 if every row is as its table expects. With --only, what is found is told as well."""
    wanted = [name for name in METHODS if options.wants(name)]
    if not wanted:
        raise ScenarioError([Problem("--only", "", f"no method has {options.only!r} in its name")])
    ended: list[Row] = []
    stopped = False
    until_s = options.until_s
    try:
        with Counter("methods", quiet=options.json) as counter:
            for row in rows(wanted, options.dialect):
                ended.append(row)
                counter.show(f"{row.method}, {row.dialect}")
                stopped = time.monotonic() > until_s
                if stopped:
                    break
    finally:
        console.print(_table(ended))
        for row in ended:
            for finding, story in row.stories.items():
                if options.only is not None or finding not in row.expected:
                    _tell(console, f"{row.method}, {row.dialect}: {finding.value}", story)
    found = [
        {
            "method": row.method,
            "dialect": row.dialect,
            "ok": row.ok,
            "states": row.states,
            "transitions": row.transitions,
            "findings": {finding.value: list(story) for finding, story in row.stories.items()},
            "missed": list(row.missed),
            "by_deadline": row.expires,
            "seconds": round(row.seconds, 3),
        }
        for row in ended
    ]
    return answer(found, not_so=any(not row.ok for row in ended), stopped=stopped)


def _table(ended: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("dialect", no_wrap=True)
    table.add_column("states", justify="right")
    table.add_column("finding", overflow="fold")
    for row in ended:
        table.add_row(row.method, row.dialect, f"{row.states:,}", _words(row), style="" if row.ok else "bold red")
    table.add_section()
    table.add_row(f"{sum(row.ok for row in ended)} of {len(ended)} as expected", "", "", "")
    return table


def _words(row: Row) -> str:
    words = [finding.value for finding in row.stories]
    if row.missed:
        words.append(f"missed: {', '.join(row.missed)}")
    if row.expires:
        words.append("in some orders only a deadline gives room back")
    return "; ".join(words) or "nothing"


def _tell(console: Console, title: str, story: tuple[str, ...]) -> None:
    console.print(f"\n{title}", soft_wrap=True)
    for number, line in enumerate(story, 1):
        console.print(f"{number:4}  {line}", soft_wrap=True)

"""`pdflow check methods`: the data path of every transfer method, in strict and as published."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from pdflow.errors import Problem, ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow_sim.check.datapath.rows import DataPathRow, row, selected_rows
from pdflow_sim.check.report import Counter, print_counterexample
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer


def methods(options: CheckOptions, console: Console) -> SuiteResult:
    """Explore every selected method; its exit code is 0 if every row is as its table expects. With --only, the moves
    of every finding are printed, else those of unexpected findings only."""
    names = [name for name in METHODS if options.selects(name)]
    if not names:
        raise ScenarioError([Problem("--only", "", f"no method has {options.only!r} in its name")])
    ended: list[DataPathRow] = []
    seconds: list[float] = []
    stopped = False
    until_s = options.until_s
    try:
        with Counter("methods", quiet=options.json) as counter:
            for method, dialect in selected_rows(names, options.dialect):
                began = time.monotonic()
                stopped = began > until_s
                if stopped:
                    break
                counter.show(f"{method.name}, {dialect}")
                ended.append(row(method, dialect))
                seconds.append(time.monotonic() - began)
    finally:
        console.print(_table(ended))
        for one in ended:
            for finding, counterexample in one.counterexamples.items():
                if options.only is not None or finding not in one.expected:
                    print_counterexample(console, f"{one.method}, {one.dialect}: {finding.value}", counterexample)
    found = [
        {
            "method": one.method,
            "dialect": one.dialect,
            "ok": one.ok,
            "states": one.states,
            "transitions": one.transitions,
            "findings": {
                finding.value: list(counterexample) for finding, counterexample in one.counterexamples.items()
            },
            "missed": list(one.missed),
            "seconds": round(took, 3),
        }
        for one, took in zip(ended, seconds, strict=True)
    ]
    return answer(found, not_so=any(not one.ok for one in ended), stopped=stopped)


def _table(ended: list[DataPathRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True, overflow="fold")
    table.add_column("dialect", no_wrap=True, overflow="fold")
    table.add_column("states", justify="right")
    table.add_column("finding", overflow="fold")
    for one in ended:
        table.add_row(one.method, one.dialect, f"{one.states:,}", _findings(one), style="" if one.ok else "bold red")
    table.add_section()
    table.add_row(f"{sum(one.ok for one in ended)} of {len(ended)} as expected", "", "", "")
    return table


def _findings(one: DataPathRow) -> str:
    findings = [finding.value for finding in one.counterexamples]
    if one.missed:
        findings.append(f"not seen: {', '.join(one.missed)}")
    return "; ".join(findings) or "nothing"

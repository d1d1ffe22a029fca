"""`pdflow check routers`: the router alone, with every policy and rule, in all orders of its events."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.report import Counter, print_counterexample
from pdflow_sim.check.routers.catalogue import SETTINGS
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.routers.world import RouterWorld
from pdflow_sim.check.search.forward import Explored, explore
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult, answer


def routers(options: CheckOptions, console: Console) -> SuiteResult:
    """Explore every selected setting; the exit code is 0 if nothing is found in any. A router knows no dialect."""
    settings = [setting for setting in SETTINGS if options.selects(setting.name)]
    if not settings:
        raise ScenarioError([Problem("--only", "", f"no router setting has {options.only!r} in its name")])
    ended: list[tuple[RouterSetting, Explored, float]] = []
    stopped = False
    until_s = options.until_s
    try:
        with Counter("routers", quiet=options.json) as counter:
            for setting in settings:
                began = time.monotonic()
                stopped = began > until_s
                if stopped:
                    break
                counter.show(setting.name)
                found = explore(RouterWorld(setting))
                ended.append((setting, found, time.monotonic() - began))
    finally:
        console.print(_table(ended))
        for setting, found, _ in ended:
            for finding, counterexample in found.counterexamples.items():
                print_counterexample(console, f"{setting.name}: {finding.value}", counterexample)
    rows = [
        {
            "setting": setting.name,
            "ok": not found.counterexamples,
            "states": found.states,
            "transitions": found.transitions,
            "findings": {finding.value: list(lines) for finding, lines in found.counterexamples.items()},
            "seconds": round(took, 3),
        }
        for setting, found, took in ended
    ]
    return answer(rows, not_so=any(not row["ok"] for row in rows), stopped=stopped)


def _table(ended: list[tuple[RouterSetting, Explored, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("router", overflow="fold")
    table.add_column("states", justify="right")
    table.add_column("finding", overflow="fold")
    for setting, found, _ in ended:
        findings = "; ".join(finding.value for finding in found.counterexamples)
        table.add_row(setting.name, f"{found.states:,}", findings or "nothing", style="bold red" if findings else "")
    table.add_section()
    clean = sum(not found.counterexamples for _, found, _ in ended)
    table.add_row(f"{clean} of {len(ended)} as expected", f"{sum(found.states for _, found, _ in ended):,}", "")
    return table

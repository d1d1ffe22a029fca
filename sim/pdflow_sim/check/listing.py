"""`pdflow check --list`: the names of scopes, races, mutants, methods and routers, and hints for a wrong WHAT."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rich.console import Console

from pdflow.errors import Problem, ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.routers.catalogue import SETTINGS as ROUTERS
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.fields import field_rows
from pdflow_sim.check.suites.scopes import matching
from pdflow_sim.check.suites.suite import CheckOptions

Row: TypeAlias = dict[str, Any]
ALL = ("scopes", "races", "mutants", "methods", "routers")


def listed(what: str, options: CheckOptions, console: Console) -> dict[str, list[Row]]:
    """Print a line for each name that WHAT may check, and return the rows. Raises ScenarioError where there are none.
    `quick` and `all` list all kinds of names."""
    kinds = ALL if what in ("quick", "all") else (what,)
    found = {}
    for kind in kinds:
        if kind not in LISTS:
            raise ScenarioError([Problem("--list", "", f"there are no names in {what}; expected {', '.join(LISTS)}")])
        rows, line = LISTS[kind]
        found[kind] = rows(options)
        console.print(f"{kind}: {len(found[kind])}", soft_wrap=True)
        for row in found[kind]:
            console.print(f"  {line(row)}", soft_wrap=True)
    return found


def _scopes(options: CheckOptions) -> list[Row]:
    return [
        {
            "scope": named.name,
            "dialect": named.scope.dialect.name,
            "states": named.states or None,
            "nightly": named.nightly,
        }
        for named in matching(options)
    ]


def _scope_line(row: Row) -> str:
    states = "not counted" if row["states"] is None else f"{row['states']:,} states"
    return f"{row['dialect']:11}  {states:>16}  {'nightly' if row['nightly'] else '':7}  {row['scope']}"


def _races(options: CheckOptions) -> list[Row]:
    return [
        {"race": race.number, "name": race.name, "what": race.line}
        for race in RACES.values()
        if options.selects(f"{race.number} {race.name}")
    ]


def _mutants(options: CheckOptions) -> list[Row]:
    return [
        {"mutant": mutant.name, "caught_by": mutant.breaks or None, "what": mutant.drops}
        for mutant in MUTANTS.values()
        if options.selects(mutant.name) and options.dialect in (None, mutant.scope.dialect.name)
    ]


def _methods(options: CheckOptions) -> list[Row]:
    return [
        {"method": method.name, "what": method.summary} for method in METHODS.values() if options.selects(method.name)
    ]


def _routers(options: CheckOptions) -> list[Row]:
    return [{"setting": each.name, "states": each.states} for each in ROUTERS if options.selects(each.name)]


def _fields(options: CheckOptions) -> list[Row]:
    return [row for row in field_rows() if options.selects(row["field"])]


def _field_line(row: Row) -> str:
    default = row["default"] or '""'
    return f"{row['field']}={default} ({row['values']}): {row['meaning']}"


LISTS: dict[str, tuple[Callable[[CheckOptions], list[Row]], Callable[[Row], str]]] = {
    "scopes": (_scopes, _scope_line),
    "races": (_races, lambda row: f"{row['race']} {row['name']}: {row['what']}"),
    "mutants": (_mutants, lambda row: f"{row['mutant']} ({row['caught_by'] or 'survives'}): {row['what']}"),
    "methods": (_methods, lambda row: f"{row['method']}: {row['what']}"),
    "routers": (_routers, lambda row: f"{row['states']:>9,} states  {row['setting']}"),
    "scope": (_fields, _field_line),
}


def hint(what: str, checks: Sequence[str]) -> str:
    """Return what the author of an unknown WHAT probably meant, for an error message."""
    if what.upper() in RACES:
        return f"did you mean --diagram {what.upper()}?"
    if re.fullmatch(r"[Rr]\d+", what):
        return f"races are R01 to R{len(RACES)}: --diagram R13 draws one"
    if what.endswith(".json"):
        return f"did you mean --replay {what} or --diagram {what}?"
    names: dict[str, list[str]] = {
        "mutants": list(MUTANTS),
        "methods": list(METHODS),
        "races": [race.name for race in RACES.values()],
        "scopes": [named.name for named in SCOPES],
        "routers": [each.name for each in ROUTERS],
    }
    for suite, known in names.items():
        if what in known:
            quoted = f'"{what}"' if " " in what else what
            return f"did you mean {suite} --only {quoted}?"
    close = difflib.get_close_matches(what, checks, n=1)
    return f"did you mean {close[0]}?" if close else f"expected {', '.join(checks)} or a scenario's NAME.toml"

"""What becomes of a scope, a mutant or a race: searched for once, though several tests ask.

CI has `pdflow check all --json` answer first, from the same checkout, and PDFLOW_CHECKED names what it said. An answer
that is not as it must be is not believed but searched for again, so that the test says what is wrong; without a file,
the first test of a process that asks has it searched for.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from pdflow.protocol.dialect import Dialect
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import Kill, hunt
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.verdict import RaceOutcome, look
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.routers.world import RouterWorld
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.search import forward
from pdflow_sim.check.search.campaign import WalkTask, walks
from pdflow_sim.check.search.search import explore
from pdflow_sim.check.state.counting import COUNTED
from pdflow_sim.check.state.symmetry import Symmetry

UNFINISHED = ("stopped_by", "missed", "counterexample", "truncated")
"""What says of a scope's answer that not every state was seen, or that something is wrong."""


@attrs.frozen
class Explored:
    """A scope, of which every state was seen."""

    states: int
    transitions: int
    goals: frozenset[str]


WALKS = 6_400
"""Of each dialect in `pdflow check all`."""


def no_clock() -> float:
    return 0.0


def explored(named: Named) -> Explored:
    """Every state, or as many as its search is limited to; where there are too many to count, one of those that are
    alike. Raises Broken."""
    row = _saved_rows("scopes", "scope").get(named.name)
    if row is not None and not any(row[key] for key in UNFINISHED) and set(row["reductions"]) <= {COUNTED}:
        return Explored(row["states"], row["transitions"], frozenset(row["goals"]))
    world = relation(named.scope)
    symmetry = None if named.states else Symmetry(world.space)
    covered = explore(world, limit=named.max_states or 1 << 62, symmetry=symmetry)
    assert covered.complete or named.truncated
    return Explored(covered.states, covered.transitions, frozenset(world.space.checker.seen))


@cache
def hunted(name: str) -> Kill:
    row = _saved_rows("mutants", "mutant").get(name)
    if row is None or not row["as_expected"]:
        return hunt(MUTANTS[name], no_clock)
    invariant = row["invariant"] or ""
    return Kill(mutant=name, invariant=invariant, search=row["search"], states=row["states"], moves=tuple(row["moves"]))


@cache
def reached_by_walks(dialect: Dialect) -> frozenset[str]:
    """The goals that the walks of `pdflow check all` reach."""
    row = _saved_rows("walk", "dialect").get(dialect.name)
    if row is not None and row["runs"] == WALKS and not row["broken"]:
        return frozenset(row["goals"])
    return walks(WalkTask(dialect=dialect), range(1, WALKS + 1)).goals


@cache
def looked(race: str, dialect: str) -> RaceOutcome:
    row = _saved_rows("races", "race").get(race, {"dialects": {}})["dialects"].get(dialect)
    if row is None or not row["ok"]:
        return look(RACES[race], dialect)
    return RaceOutcome(
        summary=row["result"],
        ok=True,
        where=row["where"],
        invariant=row["invariant"] or "",
        steps=row["steps"],
        states=row["states"],
    )


def routers_explored(setting: RouterSetting) -> tuple[int, dict[str, list[str]]]:
    """The states of a router's setting, and what is found in it."""
    row = _saved_rows("routers", "setting").get(setting.name)
    if row is not None and row["ok"]:
        return row["states"], row["findings"]
    found = forward.explore(RouterWorld(setting))
    return found.states, {finding.value: list(lines) for finding, lines in found.counterexamples.items()}


def _saved_rows(suite: str, key: str) -> dict[str, Any]:
    file = os.environ.get("PDFLOW_CHECKED")
    return _rows(file, suite, key) if file else {}


@cache
def _rows(file: str, suite: str, key: str) -> dict[str, Any]:
    """What a command said that came to its end: one that did not says nothing."""
    report = json.loads(Path(file).read_text(encoding="utf-8") or "{}")
    return {row[key]: row for row in report.get(suite, ())}

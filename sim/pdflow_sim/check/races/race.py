"""A race by name, and what is expected of it in each dialect.

What can be searched is searched: in vLLM's dialect for the shortest story that goes through the race's dangerous point
and breaks the invariant which the race is known for; in ours for nothing at all, in a scope that is seen whole and in
which that point was reached too. The rest names a test, or says why there is nothing to show. What is said here is
held against the machine by look.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, VLLM_STOCK, Dialect
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.races.owners import VARIANTS
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.space import State, StateSpace


@attrs.frozen
class Point:
    """A move in a state: the moment at which a race is won or lost."""

    description: str
    at: Callable[[StateSpace, State, Move], bool]


@attrs.frozen
class Breaks:
    """A search finds a story through all points that breaks this invariant; the shortest has so many steps."""

    invariant: str
    steps: int


@attrs.frozen
class InvariantHolds:
    """Nothing that goes through the first point breaks this invariant; what else breaks in this dialect does not
    count."""

    invariant: str


@attrs.frozen
class Passes:
    """Nothing breaks, everything ends, and the first point was reached."""

    scope: Scope | None = None
    """Another than the race's: one without clocks, say, where any timer may fire at any moment, which is more."""


@attrs.frozen
class Residual:
    """Found as in `Breaks`, and cannot be mended on our side alone."""

    invariant: str
    steps: int
    why: str


@attrs.frozen
class CoveredBy:
    """Told by tests, "path::name": it needs something that the explored world does not have."""

    tests: tuple[str, ...]
    note: str = ""
    """What comes of it, and why it is not searched."""


@attrs.frozen
class Unmodelled:
    why: str


Shown: TypeAlias = Breaks | InvariantHolds | Passes | Residual | CoveredBy | Unmodelled
SEARCHED = (Breaks, InvariantHolds, Passes, Residual)


@attrs.frozen(kw_only=True)
class Race:
    number: str
    """R01 to R52."""
    name: str
    line: str
    source: str
    scope: Scope = attrs.field(factory=Scope)
    """Of every search; its dialect does not count."""
    own_world: str = ""
    """Which of WORLDS is searched, if not the explored world as it is."""
    points: tuple[Point, ...] = ()
    """The first must be reached in every dialect; the others, in their order, make
    vLLM's story the one that is meant."""
    stock: Shown
    compat: Shown
    strict: Shown

    @property
    def shown(self) -> dict[str, Shown]:
        """By dialect, in the order of the table."""
        return {VLLM_STOCK.name: self.stock, VLLM_COMPAT.name: self.compat, STRICT.name: self.strict}

    def world(self, scope: Scope) -> Relation:
        """What is searched, in a scope of it."""
        return VARIANTS.get(self.own_world, relation)(scope)

    def scope_in(self, dialect: Dialect) -> Scope:
        shown = self.shown[dialect.name]
        scope = shown.scope if isinstance(shown, Passes) and shown.scope is not None else self.scope
        return attrs.evolve(scope, dialect=dialect)


def covered_by(*tests: str, note: str = "") -> CoveredBy:
    """Of tests/protocol, unless they say otherwise."""
    return CoveredBy(tuple(test if test.startswith("tests/") else f"tests/protocol/{test}" for test in tests), note)

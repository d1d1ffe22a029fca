"""A named race, and its expected outcome in each dialect.

A race that can be searched is searched: in `vllm-stock` for the shortest counterexample that goes through the race's
dangerous point and breaks the invariant which the race is known for; in pdflow's dialects for no violation at all, in a
scope that is searched whole and in which that point was reached too. Any other names a test, or a reason why there is
nothing to show. look.py checks these expectations against the protocol's code.
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
    """A condition on a move in a state: the moment that decides a race."""

    description: str
    at: Callable[[StateSpace, State, Move], bool]


@attrs.frozen
class Breaks:
    """Expects a counterexample through all points that breaks this invariant; the shortest has so many steps."""

    invariant: str
    steps: int


@attrs.frozen
class InvariantHolds:
    """Expects that nothing that goes through the points breaks this invariant; other violations of this dialect do not
    count."""

    invariant: str


@attrs.frozen
class Passes:
    """Expects that nothing breaks, everything ends, and the first point is reached."""

    scope: Scope | None = None
    """The scope to search instead of the race's own: one without clocks, say, where any timer may fire at any moment,
    which covers more."""


@attrs.frozen
class Residual:
    """Expects a counterexample as `Breaks` does, on any path, which pdflow cannot prevent on its side alone."""

    invariant: str
    steps: int
    why: str


@attrs.frozen
class CoveredBy:
    """Expects the outcome that tests ("path::name") show: the race needs something that the explored world lacks."""

    tests: tuple[str, ...]
    note: str = ""
    """The outcome, and why it is not searched."""


@attrs.frozen
class Unmodelled:
    why: str


Shown: TypeAlias = Breaks | InvariantHolds | Passes | Residual | CoveredBy | Unmodelled
SEARCHED = (Breaks, InvariantHolds, Passes, Residual)


@attrs.frozen(kw_only=True)
class Race:
    number: str
    """The race's number, R01 to R52."""
    name: str
    line: str
    source: str
    scope: Scope = attrs.field(factory=Scope)
    """The scope of every search; its dialect is replaced."""
    own_world: str = ""
    """The name in VARIANTS of the world that is searched; empty: the explored world as it is."""
    points: tuple[Point, ...] = ()
    """The points of the race. The first must be reached in every dialect; the others, in their order, restrict
    vLLM's counterexample to the one that is meant."""
    stock: Shown
    compat: Shown
    strict: Shown

    @property
    def shown(self) -> dict[str, Shown]:
        """The expected outcomes by dialect, in the order of the table."""
        return {VLLM_STOCK.name: self.stock, VLLM_COMPAT.name: self.compat, STRICT.name: self.strict}

    def world(self, scope: Scope) -> Relation:
        """Return the world that is searched, in this scope."""
        return VARIANTS.get(self.own_world, relation)(scope)

    def scope_in(self, dialect: Dialect) -> Scope:
        shown = self.shown[dialect.name]
        scope = shown.scope if isinstance(shown, Passes) and shown.scope is not None else self.scope
        return attrs.evolve(scope, dialect=dialect)


def covered_by(*tests: str, note: str = "") -> CoveredBy:
    """Return a CoveredBy of tests whose paths are relative to tests/protocol, unless they begin with tests/."""
    return CoveredBy(tuple(test if test.startswith("tests/") else f"tests/protocol/{test}" for test in tests), note)

"""Breadth first search of worlds in which each move goes forward: data paths, and the router alone.

It goes on after a finding, and has each finding once, by the shortest of the counterexamples that lead to it with the
fewest faults. `sim/pdflow_sim/check/search/search.py` stops at the first violation, keeps states as numbers and asks of
each whether it can end. Here one search has to show several faults, states are few, and what cannot end has no moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, Self, TypeAlias

import attrs

from pdflow_sim.uncollected import uncollected

Move: TypeAlias = tuple[str, int, int]
"""A verb; a request, or an engine; a piece's number."""


class Violation(Exception):  # noqa: N818, named as in sim/pdflow_sim/check/state/shadow_state.py
    """Raised where an invariant does not hold. `finding`: the kind of fault, in words for a table."""

    def __init__(self, finding: Enum, what: str) -> None:
        super().__init__(what)
        self.finding = finding
        self.what = what
        self.action = ""
        """The move that led to it, in words, where that is known."""


class Explorable(Protocol):
    """A state that can be searched."""

    action: str

    @property
    def faults(self) -> int:
        """Return how many faults may still happen."""

    def moves(self) -> Iterable[Move]: ...

    def after(self, move: Move) -> Explorable:
        """Return the state that a move leads to. Raises Violation."""

    def at_rest(self) -> None:
        """Check a state without moves. Raises Violation."""

    def fingerprint(self) -> Hashable: ...


@contextmanager
def attributed(world: Explorable, crash: Enum | None = None) -> Iterator[None]:
    """Give a violation the move that led to it. An exception is a violation too, where `crash` names its finding."""
    try:
        yield
    except Violation as broken:
        broken.action = world.action
        raise
    except Exception as error:
        if crash is None:
            raise
        crashed = Violation(crash, f"{type(error).__name__}: {error}")
        crashed.action = world.action
        raise crashed from error


class CopiedByMoves(ABC):
    """An explorable that is copied by making its moves again, since a compiled core cannot be copied."""

    crash: Enum | None = None
    """The finding of an exception; None: it ends the search."""

    def __init__(self) -> None:
        self.path: tuple[Move, ...] = ()
        self.action = ""

    @abstractmethod
    def start(self) -> Self:
        """Return the first state of this world."""

    @abstractmethod
    def make(self, move: Move) -> None:
        """Make a move, and set `action`. Raises Violation."""

    def after(self, move: Move) -> Self:
        """Return the state that a move leads to. Raises Violation."""
        other = self.start()
        for made in self.path:
            other.make(made)
        other.path = (*self.path, move)
        with attributed(other, self.crash):
            other.make(move)
        return other

    @property
    @abstractmethod
    def faults(self) -> int: ...

    @abstractmethod
    def moves(self) -> Iterable[Move]: ...

    @abstractmethod
    def at_rest(self) -> None: ...

    @abstractmethod
    def fingerprint(self) -> Hashable: ...


@attrs.define
class Explored:
    """The size of an explored world, and what was found in it."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    """States without moves in which all is well."""
    done: set[str] = attrs.field(factory=set)
    """Verbs of the moves that were made."""
    counterexamples: dict[Enum, tuple[str, ...]] = attrs.field(factory=dict)
    """By finding, the moves in order and last what is wrong."""


def explore(start: Explorable) -> Explored:
    """Explore every state. A state in which something is wrong leads nowhere."""
    found = Explored()
    seen = {start.fingerprint()}
    before: list[tuple[int, str]] = [(-1, "")]
    """By a state's number: the one before it, and what happened then."""
    frontier = [(0, start)]

    spared: dict[Enum, int] = {}
    """By finding, the most unused faults of a counterexample found."""

    def record_violation(broken: Violation, number: int, faults: int) -> None:
        if faults > spared.get(broken.finding, -1):
            spared[broken.finding] = faults
            lines = [broken.what] + [broken.action] * bool(broken.action)
            while number > 0:
                number, description = before[number]
                lines.append(description)
            found.counterexamples[broken.finding] = tuple(reversed(lines))

    with uncollected():
        while frontier:
            following: list[tuple[int, Explorable]] = []
            for number, world in frontier:
                stuck = True
                for move in world.moves():
                    stuck = False
                    found.transitions += 1
                    found.done.add(move[0])
                    try:
                        after = world.after(move)
                    except Violation as broken:
                        record_violation(broken, number, world.faults)
                        continue
                    name = after.fingerprint()
                    if name not in seen:
                        seen.add(name)
                        following.append((len(before), after))
                        before.append((number, after.action))
                if stuck:
                    try:
                        world.at_rest()
                        found.ends += 1
                    except Violation as broken:
                        record_violation(broken, number, world.faults)
            frontier = following
    found.states = len(seen)
    return found

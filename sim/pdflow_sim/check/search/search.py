"""Breadth first through every state of a scope: nothing is missed, and the first story that breaks something is the
shortest.

Of a state that has been seen only its hash of 64 bits is kept, and six bytes of how it was reached; whole are only
those whose moves have still to be tried. Two states of one name would be taken for one: `odds` says how likely that is
at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs

from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import ENDLESS
from pdflow_sim.check.search.liveness import live
from pdflow_sim.check.state.counting import Counting
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import Draft, State
from pdflow_sim.check.state.symmetry import Symmetry
from pdflow_sim.uncollected import uncollected


@attrs.define
class Coverage:
    """What a search has seen so far."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    """Moves to the farthest state."""
    frontier: int = 0
    """States of that depth."""
    complete: bool = False
    growth_bytes: int = 0
    """What the table of states takes on top when it grows, if it is about to."""

    @property
    def odds(self) -> float:
        """Of any two of these states having one name, at most."""
        return self.states * self.states / 2.0**65


@attrs.frozen
class Counterexample:
    """The shortest way to something: what happened, and what it violates."""

    moves: tuple[Move, ...]
    broken: Broken
    states: int = 0
    """How many had been seen by then."""


Node = TypeVar("Node")
Tick = Callable[[Coverage], bool]
"""Shown what has been seen so far, at every level and every so many states; True stops the search, incomplete."""
TICK_STATES = 20_000
MAX_LIVE_STATES = 1_000_000
"""How many states that can end are remembered as such, before that begins anew."""


def explore(
    world: Transitions,
    limit: int = 10_000_000,
    tick: Tick | None = None,
    lively: bool = True,
    symmetry: Symmetry | None = None,
) -> Coverage:
    """Every state once, and every one's liveness. Raises Broken; `shortest` then tells the story.

    Args:
        limit: stop, incomplete, with so many states.
        symmetry: of states that differ by a renaming only, look at one.
    """
    return Search(world, symmetry).run(limit, tick, lively)


def shortest(
    world: Transitions,
    limit: int = 10_000_000,
    lively: bool = True,
    tick: Tick | None = None,
    symmetry: Symmetry | None = None,
) -> Counterexample | None:
    """The shortest way to a violated invariant; failing that, to a state from which not everything ends."""
    search = Search(world, symmetry)
    try:
        search.run(limit, tick, lively)
    except Broken as broken:
        return search.counterexample(broken)
    return None


class Search:
    """One search of one world, and the way to what it finds."""

    def __init__(self, world: Transitions, symmetry: Symmetry | None = None) -> None:
        self.world = world
        self.start = world.turns.start()
        self.symmetry = symmetry
        self.others = () if symmetry is None else symmetry.others
        scope = world.space.scope
        endless = scope.horizon == ENDLESS and scope.dialect.control_frames
        self.counting = Counting(world.space) if endless else None
        self.seen = {self._name(self.start)}
        self.level = [self.start]
        self.found = Coverage()
        # By a state's number, in the order in which they were found: the number of the one before it, and which of
        # that one's moves led to it.
        self.before = array("I", [0])
        self.which = array("H", [0])
        self.live_states: set[State] = set()
        self.lifeless: tuple[Broken, int] | None = None
        """The first state that cannot end, by its number. What breaks safety counts for more, and is looked for
        first."""
        self.last: tuple[int, Move | None] = (0, None)
        """Where a violation was met: the number of a state, and its move."""

    def run(self, limit: int, tick: Tick | None, lively: bool) -> Coverage:
        """Raises Broken."""
        found = self.found
        first = 0
        with uncollected():
            while self.level:
                found.frontier = len(self.level)
                following: list[State] = []
                for at in range(0, len(self.level), TICK_STATES):
                    found.states = len(self.seen)
                    found.growth_bytes = _growth_bytes(self.seen)
                    if found.states >= limit or (tick is not None and tick(found)):
                        self._give_up()
                        return found
                    chunk = self.level[at : at + TICK_STATES]
                    self._expand(chunk, first + at, following)
                    if lively and self.lifeless is None:
                        self._ask(chunk, first + at)
                first += len(self.level)
                self.level = following
                found.depth += bool(following)
        found.states = len(self.seen)
        self._give_up()
        found.complete = True
        return found

    def _expand(self, chunk: list[State], first: int, following: list[State]) -> None:
        """All that may happen in these states, which are numbered from here on."""
        moves, acts, seen = self.world.moves, self.world.components.acts, self.seen
        exact, alone = self.counting is None, not self.others
        transitions, number = 0, first
        move: Move | None = None
        try:
            for number, state in enumerate(chunk, first):
                for which, move in enumerate(moves(state)):
                    draft = list(state)
                    acts[move[0]](draft, move)
                    transitions += 1
                    after = tuple(draft)
                    name = hash(after) if exact else self._name(draft)
                    if name in seen or not (alone or self._is_new(draft)):
                        continue
                    seen.add(name)
                    following.append(after)
                    self.before.append(number)
                    self.which.append(which)
        except Broken:
            self.last = (number, move)
            raise
        finally:
            self.found.transitions += transitions

    def _name(self, state: Sequence[int]) -> int:
        return hash(tuple(state if self.counting is None else self.counting.canonical(state)))

    def _is_new(self, draft: Draft) -> bool:
        """Whether it was not seen under any other names either."""
        return not any(self._name(tuple(other(draft))) in self.seen for other in self.others)

    @property
    def reductions(self) -> tuple[str, ...]:
        """Why not every state was looked at; empty where each was."""
        used = (self.symmetry if self.others else None, self.counting)
        return tuple(str(reduction) for reduction in used if reduction is not None)

    def _ask(self, chunk: list[State], first: int) -> None:
        """Whether everything can end from each of these."""
        if len(self.live_states) > MAX_LIVE_STATES:
            self.live_states.clear()
        try:
            live(self.world, chunk, self.live_states)
        except Broken as broken:
            if broken.state is None:
                raise
            self.lifeless = broken, first + chunk.index(broken.state)

    def _give_up(self) -> None:
        """Nothing breaks safety in what was seen."""
        if self.lifeless is not None:
            broken, number = self.lifeless
            self.last = (number, None)
            raise broken

    def counterexample(self, broken: Broken) -> Counterexample:
        """The way to what `run` has raised."""
        number, last = self.last
        steps = []
        while number:
            steps.append(self.which[number])
            number = self.before[number]
        state, moves = self.start, []
        for which in reversed(steps):
            moves.append(self.world.moves(state)[which])
            state = self.world.apply(state, moves[-1])
        return Counterexample((*moves, last) if last else tuple(moves), broken, len(self.seen))


def _growth_bytes(seen: set[int]) -> int:
    """A set's table is doubled when three fifths of its entries, of 16 bytes, are taken, and the old one is kept until
    the new one is filled."""
    table = seen.__sizeof__()
    return 2 * table if len(seen) > 0.55 * table / 16 else 0


def path_to(parents: Mapping[Node, tuple[Node, Move] | None], node: Node) -> tuple[Move, ...]:
    """The moves from the start to what a search has found."""
    moves: list[Move] = []
    while (step := parents[node]) is not None:
        node, move = step
        moves.append(move)
    return tuple(reversed(moves))

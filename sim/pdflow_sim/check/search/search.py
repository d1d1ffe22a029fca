"""Breadth-first search through every state of a scope: no state is missed, and the first counterexample is a shortest
one.

Of a state that has been seen only its hash of 64 bits is kept, its name, and six bytes of how it was reached; only
states whose moves have still to be tried are kept whole. Two states of one name would be taken for one: `odds` says how
likely that is at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs

from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import ENDLESS
from pdflow_sim.check.search.fairness import Fairness
from pdflow_sim.check.search.liveness import live
from pdflow_sim.check.state.counting import Counting
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import Draft, State
from pdflow_sim.check.state.symmetry import Symmetry
from pdflow_sim.uncollected import uncollected


@attrs.define
class Coverage:
    """The extent of a search so far: states, transitions, depth."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    """Moves to the farthest state from the start."""
    frontier: int = 0
    """Number of states at that depth."""
    complete: bool = False
    growth_bytes: int = 0
    """Bytes that the table of states will take in addition when it grows, if it is about to; else 0."""

    @property
    def odds(self) -> float:
        """Upper bound of the probability that any two of these states have one name."""
        return self.states * self.states / 2.0**65


@attrs.frozen
class Counterexample:
    """The shortest sequence of moves to a violation, and the invariant that it violates."""

    moves: tuple[Move, ...]
    broken: Broken
    states: int = 0
    """Number of states seen by then."""


Node = TypeVar("Node")
Tick = Callable[[Coverage], bool]
"""Called with the coverage so far at every level and every TICK_STATES states; True stops the search, incomplete."""
TICK_STATES = 20_000
MAX_LIVE_STATES = 1_000_000
"""Limit of the cache of states that are known to settle; beyond it the cache is cleared."""


def explore(
    world: Transitions,
    limit: int = 10_000_000,
    tick: Tick | None = None,
    lively: bool = True,
    symmetry: Symmetry | None = None,
) -> Coverage:
    """Visit every state once, and check its liveness. Raises Broken; `shortest` returns the counterexample instead.

    Args:
        limit: stop, incomplete, with so many states.
        symmetry: of states that differ by a renaming only, visit one.
    """
    return Search(world, symmetry).run(limit, tick, lively)


def shortest(
    world: Transitions,
    limit: int = 10_000_000,
    lively: bool = True,
    tick: Tick | None = None,
    symmetry: Symmetry | None = None,
    fairness: Sequence[Fairness] = (),
) -> Counterexample | None:
    """Return the shortest way to a violated invariant; failing that, to a state from which not everything ends; None if
    there is neither."""
    search = Search(world, symmetry, fairness)
    try:
        search.run(limit, tick, lively)
    except Broken as broken:
        return search.counterexample(broken)
    return None


class Search:
    """A breadth-first search of one world, which can return the way to what it found."""

    def __init__(self, world: Transitions, symmetry: Symmetry | None = None, fairness: Sequence[Fairness] = ()) -> None:
        self.world = world
        self.fairness = fairness
        """The checks of fair runs, beside that of one schedule from each state."""
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
        """The liveness violation, and the number of the first state that cannot settle. Safety violations take
        precedence, so that the search goes on for them."""
        self.last: tuple[int, Move | None] = (0, None)
        """The number of the state in which a violation was met, and the move that violates; None: the state itself."""

    def run(self, limit: int, tick: Tick | None, lively: bool) -> Coverage:
        """Search until every state was visited, `limit` is reached or `tick` stops it. Raises Broken."""
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
        """Apply every move of these states, which are numbered from `first` on."""
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
        """True if a state was not seen under any other renaming either."""
        return not any(self._name(tuple(other(draft))) in self.seen for other in self.others)

    @property
    def reductions(self) -> tuple[str, ...]:
        """The reductions by which not every state was visited; empty where each was."""
        used = (self.symmetry if self.others else None, self.counting)
        return tuple(str(reduction) for reduction in used if reduction is not None)

    def _ask(self, chunk: list[State], first: int) -> None:
        """Check that each of these states can settle, and record the first that cannot in `lifeless`."""
        if len(self.live_states) > MAX_LIVE_STATES:
            self.live_states.clear()
        try:
            live(self.world, chunk, self.live_states)
            for fairness in self.fairness:
                fairness.check(chunk)
        except Broken as broken:
            if broken.state is None:
                raise
            self.lifeless = broken, first + chunk.index(broken.state)

    def _give_up(self) -> None:
        """End the search without a safety violation: raise the liveness violation, if there is one."""
        if self.lifeless is not None:
            broken, number = self.lifeless
            self.last = (number, None)
            raise broken

    def counterexample(self, broken: Broken) -> Counterexample:
        """Return the counterexample of the violation that `run` has raised."""
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
    """Return the bytes that a set is about to take in addition; 0 if it is not about to grow. Its table is doubled when
    three fifths of its entries, of 16 bytes, are taken, and the old one is kept until the new one is filled."""
    table = seen.__sizeof__()
    return 2 * table if len(seen) > 0.55 * table / 16 else 0


def path_to(parents: Mapping[Node, tuple[Node, Move] | None], node: Node) -> tuple[Move, ...]:
    """Return the moves from the start to a node that a search has found."""
    moves: list[Move] = []
    while (step := parents[node]) is not None:
        node, move = step
        moves.append(move)
    return tuple(reversed(moves))

"""The search for one race: the shortest counterexample through its points, or a whole scope in which its point is
reached.

The counterexample must pass every point in order. A broken invariant on any other path belongs to another race, and
that path is left there; so a dialect that lacks several fixes shows each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.races.race import Point
from pdflow_sim.check.search.liveness import live, settle
from pdflow_sim.check.search.search import Counterexample, Coverage, explore, path_to
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

Stop = Callable[[], bool]
"""Called every ASK_STATES states; True if time is up."""
ASK_STATES = 5_000
LIMIT = 2_000_000
"""Limit of states; the largest scope of a race has a quarter of a million."""

Node = tuple[int, State]
"""Number of points passed, and the state."""


class OutOfTime(Exception):  # noqa: N818 (what happened)
    """The search was stopped before it had a result."""


@attrs.frozen
class SearchOutcome:
    """The result of a search for a counterexample of a race."""

    counterexample: Counterexample | None
    """None if there is none."""
    states: int
    reached: bool
    """Whether the first point was reached."""


class Passing:
    """A world with the same moves, which notes whether a point was among them."""

    def __init__(self, world: Transitions, point: Point) -> None:
        self.world = world
        self.point = point
        self.components, self.space, self.turns = world.components, world.space, world.turns
        self.reached = False

    def moves(self, state: State) -> list[Move]:
        found = self.world.moves(state)
        self.reached = self.reached or any(self.point.at(self.space, state, move) for move in found)
        return found

    def apply(self, state: State, move: Move) -> State:
        return self.world.apply(state, move)


def through(world: Transitions, points: tuple[Point, ...], invariant: str, stop: Stop) -> SearchOutcome:
    """Search for the shortest counterexample through all points that breaks this invariant; for a liveness invariant
    (L), one to a state that cannot settle. Raises OutOfTime."""
    parents, found = _search(world, points, stop, broken=invariant)
    reached = any(passed for passed, _ in parents)
    if isinstance(found, Counterexample):
        return SearchOutcome(found, len(parents), True)
    if invariant.startswith("L"):
        last = [node for node in parents if node[0] == len(points)]
        return SearchOutcome(_lifeless(world, parents, last, invariant, stop), len(parents), reached)
    return SearchOutcome(None, len(parents), reached)


def well_ended(world: Transitions, point: Point, stop: Stop) -> tuple[Move, ...]:
    """Return the shortest sequence of moves through a point to a state in which everything has ended; empty if there is
    none."""
    parents, found = _search(world, (point,), stop, settled=True)
    return path_to(parents, found) if isinstance(found, tuple) else ()


def whole(world: Transitions, point: Point, stop: Stop) -> tuple[Coverage, bool]:
    """Search every state; return the coverage, and whether the point was reached. Raises Broken, OutOfTime."""
    passing = Passing(world, point)
    coverage = explore(passing, LIMIT, lambda _: stop())
    if not coverage.complete:
        raise OutOfTime
    return coverage, passing.reached


def _search(
    world: Transitions, points: tuple[Point, ...], stop: Stop, broken: str = "", settled: bool = False
) -> tuple[dict[Node, tuple[Node, Move] | None], Counterexample | Node | None]:
    """Search breadth first until `broken` is violated behind all points, or, if `settled`, a settled state is reached
    behind them. Returns the parents of the nodes, and the counterexample or the node. Raises OutOfTime."""
    start: Node = (0, world.turns.start())
    parents: dict[Node, tuple[Node, Move] | None] = {start: None}
    level = [start]
    while level:
        following: list[Node] = []
        for count, node in enumerate(level):
            if count % ASK_STATES == 0 and (stop() or len(parents) > LIMIT):
                raise OutOfTime
            for move in world.moves(node[1]):
                passed = _passed(world, points, node, move)
                try:
                    after = (passed, world.apply(node[1], move))
                except Broken as found:
                    if found.name == broken and passed == len(points):
                        return parents, Counterexample((*path_to(parents, node), move), found, len(parents))
                    continue
                if after not in parents:
                    parents[after] = (node, move)
                    if settled and passed == len(points) and world.space.settled(after[1]):
                        return parents, after
                    following.append(after)
        level = following
    return parents, None


def _passed(world: Transitions, points: tuple[Point, ...], node: Node, move: Move) -> int:
    passed, state = node
    return passed + (passed < len(points) and points[passed].at(world.space, state, move))


def _lifeless(
    world: Transitions, parents: dict[Node, tuple[Node, Move] | None], nodes: Iterable[Node], invariant: str, stop: Stop
) -> Counterexample | None:
    """Return the counterexample to the first of these nodes, in the order in which they were found, from which not
    everything ends. Violations of other invariants belong to other races."""
    good: set[State] = set()
    for count, node in enumerate(nodes):
        if count % ASK_STATES == 0 and stop():
            raise OutOfTime
        if node[1] in good:
            continue
        try:
            if world.space.scope.clocks:
                good.update(after for after in settle(world, node[1], good) if not any(world.space.left(after)))
            else:
                live(world, [node[1]])
        except Broken as broken:
            if broken.name == invariant:
                return Counterexample(path_to(parents, node), broken, len(parents))
    return None

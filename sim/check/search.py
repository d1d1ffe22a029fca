"""Breadth first through every state of a scope: nothing is missed, and the first story that breaks something is the
shortest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import attrs

from sim.check.ghost import Broken
from sim.check.live import live
from sim.check.relation import Move, Relation
from sim.check.world import State


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


@attrs.frozen
class Story:
    """The shortest way to something: what happened, and what it violates."""

    moves: tuple[Move, ...]
    broken: Broken
    states: int = 0
    """How many had been seen by then."""


Node = TypeVar("Node")
Tick = Callable[[Coverage], bool]
"""Shown what has been seen so far, at every level and every so many states; True stops the search, incomplete."""
TICK_STATES = 20_000


def explore(world: Relation, limit: int = 10_000_000, tick: Tick | None = None, lively: bool = True) -> Coverage:
    """Every state once; if all were seen, every one's liveness too. Raises Broken; `shortest` then tells the story.

    Args:
        limit: stop, incomplete, with so many states.
    """
    found = Coverage()
    start = world.start()
    seen = {start}
    level = [start]
    moves, do = world.moves, world.do
    with uncollected():
        while level:
            found.frontier = len(level)
            following: list[State] = []
            for count, state in enumerate(level):
                for move in moves(state):
                    draft = list(state)
                    do[move[0]](draft, *move[1:])
                    after = tuple(draft)
                    found.transitions += 1
                    if after not in seen:
                        seen.add(after)
                        following.append(after)
                if count % TICK_STATES == 0:
                    found.states = len(seen)
                    if len(seen) >= limit or (tick is not None and tick(found)):
                        return found
            level = following
            found.depth += bool(level)
        found.states = len(seen)
        found.complete = True
        if lively:
            live(world, seen)
    return found


def shortest(world: Relation, limit: int = 10_000_000, lively: bool = True, tick: Tick | None = None) -> Story | None:
    """The shortest way to a violated invariant; failing that, to a state from which not everything ends."""
    start = world.start()
    parents: dict[State, tuple[State, Move] | None] = {start: None}
    level = [start]
    with uncollected():
        while level and len(parents) < limit:
            following: list[State] = []
            for count, state in enumerate(level):
                if count % TICK_STATES == 0 and tick is not None and tick(Coverage(states=len(parents))):
                    return None
                for move in world.moves(state):
                    try:
                        after = world.apply(state, move)
                    except Broken as broken:
                        return Story((*path_to(parents, state), move), broken, len(parents))
                    if after not in parents:
                        parents[after] = (state, move)
                        following.append(after)
            level = following
        if lively:
            try:
                # In the order in which they were found: the first that cannot end is one of the nearest.
                live(world, parents)
            except Broken as broken:
                return Story(path_to(parents, broken.state or start), broken, len(parents))
    return None


def path_to(parents: Mapping[Node, tuple[Node, Move] | None], node: Node) -> tuple[Move, ...]:
    """The moves from the start to what a search has found."""
    moves: list[Move] = []
    while (step := parents[node]) is not None:
        node, move = step
        moves.append(move)
    return tuple(reversed(moves))


@contextmanager
def uncollected() -> Iterator[None]:
    """States are never in a cycle; looking for cycles among millions of them takes longer than finding them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

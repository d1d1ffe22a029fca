"""Breadth first through every state of a scope: nothing is missed, and the first story that breaks something is the
shortest."""

from __future__ import annotations

import gc
from collections.abc import Callable

import attrs

from sim.check.relation import Relation
from sim.check.world import State


@attrs.define
class Coverage:
    """What a search has seen."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    complete: bool = False


def explore(world: Relation, limit: int = 10_000_000, tick: Callable[[Coverage], bool] | None = None) -> Coverage:
    """Every state once. Raises Broken; `path_to` then finds the way there.

    Args:
        limit: stop, incomplete, with so many states.
        tick: asked at every level and every 100,000 states; True stops, incomplete.
    """
    found = Coverage()
    start = world.start()
    seen = {start}
    level = [start]
    moves, do = world.moves, world.do
    collecting = gc.isenabled()
    gc.disable()
    try:
        while level:
            following: list[State] = []
            for state in level:
                for move in moves(state):
                    after = do[move[0]](state, *move[1:])
                    found.transitions += 1
                    if after not in seen:
                        seen.add(after)
                        following.append(after)
            found.states = len(seen)
            if len(seen) >= limit or (tick is not None and tick(found)):
                return found
            level = following
            found.depth += bool(level)
    finally:
        found.states = len(seen)
        if collecting:
            gc.enable()
    found.complete = True
    return found

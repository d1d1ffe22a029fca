"""Worlds for many runs: their moves in an order of their own, remembered in parts, and shared by runs of one cluster.

A relation gives its moves in the order of interned numbers, which depend on what was explored before. Here they come in
the order of their names wherever numbers would decide, so that the n-th of them is the same in every process. What may
happen is remembered for all budgets at once, and what a state has no budget for is left out each time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sized
from typing import TypeAlias

from sim.check.names import name
from sim.check.relation import Move, Relation
from sim.check.routed import Routed
from sim.check.schedulers import ON_OPERATIONS
from sim.check.scope import BUDGETED_TIMERS, Fault, Scope
from sim.check.swarm import quiet
from sim.check.world import State

FREE = len(Fault)
"""The place, after every budget, of one that is never spent."""
PRICES = {
    "abort": Fault.ABORT,
    "abort prefill": Fault.PREFILL_ABORT,
    "cancel prefill": Fault.ABORT,
    "delay": Fault.DELAY,
    "drop": Fault.DROP,
    "duplicate": Fault.DUP,
    "error": Fault.ERR,
    "flush fails": Fault.ERR,
    "hang up": Fault.ABORT,
    "lose": Fault.LOSE,
    "lose notice": Fault.DROP,
    "outlive": Fault.P_RESTART,
    "preempt": Fault.PREEMPT,
    "unreachable": Fault.UNREACHABLE,
    "withdraw": Fault.WITHDRAW,
}
ON_TASKS = frozenset(("task", "unreachable", "flush fails"))
GHOSTS, LATE, TASKS, OPERATIONS = range(4)
PARTS: tuple[Callable[[str], bool], ...] = (
    lambda verb: verb not in ON_TASKS and verb not in ON_OPERATIONS and verb != "late",
    lambda verb: verb == "late",
    ON_TASKS.__contains__,
    ON_OPERATIONS.__contains__,
)
"""What may happen apart from frames and timers, by what it depends on: ghosts, late frames, tasks, operations. Each is
remembered by itself, since their combinations hardly repeat."""
Priced: TypeAlias = tuple[tuple[Move, int], ...]
"""Moves, each with the place of the budget that it spends."""


class Ordered(Relation):
    """The same moves as a Relation's, whatever was explored before in the same order."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.begin = self.start()
        self.twist = 0
        """Moves come in the same order, but begin elsewhere: another fair schedule for the same end."""
        self.unlimited = self.budgets.of((1,) * len(Fault))
        self.parts: list[dict[tuple[int, ...], Priced]] = [{} for _ in PARTS]
        self.alarms: dict[tuple[int, int], Priced] = {}
        self.arrivals_at = [self._of_link(link) for link in range(len(self.cluster.links))]

    def opening(self, budget: tuple[int, ...]) -> State:
        """Where a run with these budgets begins."""
        return self.put(self.begin, self.budget, self.budgets.of(budget))

    def remembered(self) -> int:
        """About how much it keeps."""
        kept: tuple[Sized, ...] = (self.turns, self.judged, self.chans.ids, self.endpoints.ids, *self.parts)
        return sum(map(len, kept))

    def moves(self, state: State) -> list[Move]:
        left = (*self.left(state), 1)
        op = state[self.op]
        keys = ((state[self.ghost],), (state[self.bag],), (op, state[self.task]), (op,))
        moves: list[Move] = []
        for part, key in enumerate(keys):
            found = self.parts[part].get(key)
            if found is None:
                found = self.parts[part][key] = self._of_part(state, part)
            moves += [move for move, price in found if left[price]]
        for link, frames in enumerate(state[self.first_link : self.bag]):
            if frames:
                moves += [move for move, price in self.arrivals_at[link] if left[price]]
        for at, end in enumerate(state[: self.first_link]):
            if self.armed[end]:
                found = self.alarms.get((at, end))
                if found is None:
                    timers = self._priced(state, self._of_timers(at, end, self.unlimited))
                    found = self.alarms[at, end] = self._by_name(state, timers)
                if self.fair is None:
                    moves += [move for move, price in found if left[price]]
                else:
                    moves += [move for move, price in found if left[price] and self.fair(state, at, move[2])]
        if self.twist and moves:
            first = self.twist % len(moves)
            return moves[first:] + moves[:first]
        return moves

    def _of_part(self, state: State, part: int) -> Priced:
        rich = list(self.put(state, self.budget, self.unlimited))
        if part != LATE:
            rich[self.bag] = self.bags.of(())
        if part not in (OPERATIONS, TASKS):
            rich[self.op] = self.ops.of(())
        if part != TASKS:
            rich[self.task] = self.tasks.of(())
        found = self._priced(state, (move for move in self._of_tail(tuple(rich)) if PARTS[part](move[0])))
        return found if part == GHOSTS else self._by_name(state, found)

    def _of_link(self, link: int) -> Priced:
        """What may happen to a frame there, which asks nothing of the frame."""
        waiting = list(self.put(self.begin, self.budget, self.unlimited))
        waiting[self.first_link + link] = self.chans.of((0,))
        moves = [move for move in self._of_chans(tuple(waiting)) if move[1] == link]
        return self._priced(self.begin, moves)

    def _priced(self, state: State, moves: Iterable[Move]) -> Priced:
        return tuple((move, self._price(state, move)) for move in moves)

    def _by_name(self, state: State, moves: Priced) -> Priced:
        if len(moves) < 2:
            return moves
        return tuple(sorted(moves, key=lambda priced: name(self, state, priced[0])))

    def _price(self, state: State, move: Move) -> int:
        if move[0] == "timer":
            return BUDGETED_TIMERS.get(self.armed[state[move[1]]][move[2]].kind, FREE)
        if move[0] == "restart":
            return self.death_of(move[1])
        return PRICES.get(move[0], FREE)


class OrderedRouted(Ordered, Routed):
    """The same with the router's endpoint."""


def kind(scope: Scope) -> type[Ordered]:
    """Which of the two, of a scope without clocks."""
    return OrderedRouted if scope.attempts else Ordered


def ordered(scope: Scope) -> Ordered:
    """The world of a scope without clocks."""
    return kind(scope)(scope)


DEAD_WORLDS = 32
"""How many forgotten ones may take up memory."""


class Worlds:
    """Worlds by their cluster, the least recently used forgotten: what a world remembers is what makes runs fast."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.most = most
        self.known: dict[Scope, Ordered] = {}
        self.last: tuple[Scope, Ordered] | None = None
        self.forgotten = 0
        """Since the last collection."""

    def of(self, cluster: Scope) -> Ordered:
        """Asked again for the same cluster, it gives the same world, until another is asked for."""
        if self.last is not None and (self.last[0] is cluster or self.last[1].scope is cluster):
            return self.last[1]
        world = self.known.pop(cluster, None)
        if world is None or world.remembered() > self.most // 4:
            world = ordered(quiet(cluster))
        self.known[cluster] = world
        self.last = (cluster, world)
        sizes = {scope: other.remembered() for scope, other in self.known.items()}
        total = sum(sizes.values())
        for scope, size in sizes.items():
            if total <= self.most or scope == cluster:
                break
            total -= size
            del self.known[scope]
        self.forgotten += len(sizes) - len(self.known)
        if self.forgotten >= DEAD_WORLDS:
            # A world is in circles, and whoever walks does not collect. Once for many, since all is looked through.
            self.forgotten = 0
            gc.collect()
        return world

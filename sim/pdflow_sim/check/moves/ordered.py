"""Worlds for many runs: their moves in an order by name, cached in parts, and shared by runs of one cluster.

A relation gives its moves in the order of interned numbers, which depend on what was explored before. Here they come in
the order of their names wherever numbers would decide, so that the n-th of them is the same in every process. What may
happen is remembered for all budgets at once, and what a state has no budget for is left out each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sized
from itertools import chain
from typing import TypeAlias

from pdflow_sim.check.counterexamples.names import name
from pdflow_sim.check.moves.acts import Move, Reads
from pdflow_sim.check.moves.alarms import Alarms
from pdflow_sim.check.moves.clocks import DueTimers
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.pieces import PieceOperations
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.scopes.scope import BUDGETED_TIMERS, FaultKind, Scope
from pdflow_sim.check.search.swarm import quiet
from pdflow_sim.check.state.endpoint_checks import dies_of_silence
from pdflow_sim.check.state.space import State

FREE = len(FaultKind)
"""Index, after those of all budgets, of one that is never spent."""
PRICES = {
    "abort": FaultKind.ABORT,
    "abort prefill": FaultKind.PREFILL_ABORT,
    "cancel prefill": FaultKind.ABORT,
    "corrupt": FaultKind.CORRUPT,
    "crash router": FaultKind.ROUTER_RESTART,
    "delay": FaultKind.DELAY,
    "drop": FaultKind.DROP,
    "duplicate": FaultKind.DUP,
    "error": FaultKind.ERR,
    "falsely refused": FaultKind.REFUSED,
    "flush fails": FaultKind.ERR,
    "disconnect": FaultKind.ABORT,
    "kill rank": FaultKind.P_RESTART,
    "lose": FaultKind.LOSE,
    "lose notice": FaultKind.DROP,
    "outlive": FaultKind.P_RESTART,
    "preempt": FaultKind.PREEMPT,
    "unreachable": FaultKind.UNREACHABLE,
    "withdraw": FaultKind.WITHDRAW,
}
PRICED_EACH = frozenset(("timer", "restart", "kill"))
"""Verbs of moves whose budget depends on the timer or the engine."""
EMPTY = frozenset((Reads.LATE, Reads.TASKS))
"""Parts of a state that decide about no move where they are empty."""
Priced: TypeAlias = tuple[tuple[Move, int], ...]
"""Moves, each with the index of the budget that it spends."""


class Ordered:
    """A relation whose moves come in the same order, whatever was explored before. Moves apart from those of frames and
    timers are cached by what they depend on (`Reads`), each by itself, since the combinations hardly repeat."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        self.components = relation.components
        self.space = space = relation.space
        self.turns = relation.turns
        timers = self.components.timers
        assert isinstance(timers, (Alarms, DueTimers)), "one of the two components that decide when timers fire"
        self.timers = timers
        self.by_clocks = isinstance(timers, Alarms) and timers.by_clocks
        operations = self.components.operations
        self.pieces = operations if isinstance(operations, PieceOperations) else None
        """The operations of a method; None: there is none."""
        self.begin = self.turns.start()
        bodies = [space.bodies[end] for end in self.begin[: space.first_link]]
        orphans = space.cluster.orphans
        self.timed = [
            at for at, node in enumerate(space.cluster.nodes) if node in orphans or getattr(bodies[at], "timed", False)
        ]
        """The nodes that may have timers. A rank that outlives its engine has no process yet."""
        self.twist = 0
        """Offset at which the moves begin, in the same order: another fair schedule for the same end."""
        self.unlimited = space.budgets.of((1,) * len(FaultKind))
        self.sources = [
            [source.possible for source in self.components.sources if source.reads == reads] for reads in Reads
        ]
        self.known: list[dict[tuple[int, ...] | int, Priced]] = [{} for _ in Reads]
        """Cached moves, by what decides them."""
        self.prices = {verb: PRICES.get(verb, FREE) for verb in self.components.acts if verb not in PRICED_EACH}
        self.alarms: dict[int, Priced] = {}
        """Cached moves of timers, by endpoint. An endpoint's number is that of one node."""
        self.choices: dict[int, Priced] = {}
        """Cached moves that engines with a method's core allow next, by the core."""
        lossy = space.put(self.begin, space.budget, self.unlimited)
        self.losses = self._priced(lossy, self.components.frames.losses(lossy))
        """The losses of connections, which are possible in every state."""
        self.arrivals_at = [self._of_link(link) for link in range(len(space.cluster.links))]

    def opening(self, budget: tuple[int, ...]) -> State:
        """Return the state in which a run with these budgets begins."""
        space = self.space
        return space.put(self.begin, space.budget, space.budgets.of(budget))

    def remembered(self) -> int:
        """Return about how many entries its caches hold."""
        turns, space = self.turns, self.space
        kept: tuple[Sized, ...] = (turns.turns, turns.checked, space.chans.ids, space.endpoints.ids, *self.known)
        if self.pieces is not None:
            kept = (*kept, *self.pieces.remembered())
        return sum(map(len, kept))

    def apply(self, state: State, move: Move) -> State:
        return self.relation.apply(state, move)

    def moves(self, state: State) -> list[Move]:
        space = self.space
        left = (*space.left(state), 1)
        op, shadow, pieces = state[space.op], state[space.shadow], self.pieces
        down = shadow if space.scope.may_be_down else 0
        lanes = op if pieces is None else (op, state[pieces.slot])
        priced: list[tuple[Move, int]] = []
        bag, task = state[space.bag], state[space.task]
        # Without late frames and without tasks, whose number is 0, the other slots need not be looked at.
        for reads, key in enumerate((shadow, bag, (op, task, down) if task else 0, lanes)):
            if key or reads not in EMPTY:
                found = self.known[reads].get(key)
                if found is None:
                    found = self.known[reads][key] = self._of_sources(state, reads)
                priced += found
        waiting = state[space.first_link : space.bag]
        if any(waiting):
            for link, frames in enumerate(waiting):
                if frames:
                    priced += self.arrivals_at[link]
        alarms = self.alarms
        for at in self.timed:
            end = state[at]
            found = alarms.get(end)
            if found is None:
                found = alarms[end] = self._of_timers(state, at, end)
            if found:
                priced += found
        if pieces is not None:
            for slot in pieces.engines.choosers:
                found = self.choices.get(state[slot])
                if found is None:
                    found = self.choices[state[slot]] = self._of_engine(state, slot)
                priced += found
        moves = [move for move, price in priced if left[price]]
        if self.by_clocks:
            moves = [move for move in moves if move[0] != "timer" or self._fair(state, move)]
        if self.components.clocks is not None:
            moves += self.components.clocks.moves(state)
        if self.twist and moves:
            first = self.twist % len(moves)
            return moves[first:] + moves[:first]
        return moves

    def _of_sources(self, state: State, reads: int) -> Priced:
        rich = self.space.put(state, self.space.budget, self.unlimited)
        priced = [
            self.losses if possible == self.components.frames.losses else self._priced(state, possible(rich))
            for possible in self.sources[reads]
        ]
        found = tuple(chain.from_iterable(priced))
        return found if reads == Reads.SHADOW else self._by_name(state, found)

    def _of_timers(self, state: State, at: int, end: int) -> Priced:
        if not self.space.armed[end]:
            return ()
        timers = self.timers
        if isinstance(timers, DueTimers):
            return self._by_name(state, tuple((move, FREE) for move in timers.due_at(at, end)))
        return self._by_name(state, self._priced(state, timers.armed_at(at, end, self.unlimited)))

    def _of_engine(self, state: State, slot: int) -> Priced:
        """Return the moves that an engine's body allows next, of an engine with a method's core."""
        assert self.pieces is not None
        rich = self.space.put(state, self.space.budget, self.unlimited)
        return self._by_name(state, self._priced(state, self.pieces.engines.of_engine(rich, slot)))

    def _fair(self, state: State, move: Move) -> bool:
        assert isinstance(self.timers, Alarms)
        return self.timers.fair(state, move)

    def _of_link(self, link: int) -> Priced:
        """Return the moves of a frame on this link, which do not depend on the frame."""
        space = self.space
        waiting = list(space.put(self.begin, space.budget, self.unlimited))
        waiting[space.first_link + link] = space.chans.of((0,))
        moves = [move for move in self.components.frames.possible(tuple(waiting)) if move[1] == link]
        return self._priced(self.begin, moves)

    def _priced(self, state: State, moves: Iterable[Move]) -> Priced:
        prices = self.prices
        return tuple([(move, prices[move[0]] if move[0] in prices else self._price(state, move)) for move in moves])

    def _by_name(self, state: State, moves: Priced) -> Priced:
        if len(moves) < 2:
            return moves
        return tuple(sorted(moves, key=lambda priced: name(self, state, priced[0])))

    def _price(self, state: State, move: Move) -> int:
        if move[0] == "timer":
            return BUDGETED_TIMERS.get(self.space.armed[state[move[1]]][move[2]].kind, FREE)
        return self.components.deaths.death_of(move[1])


def ordered(scope: Scope) -> Ordered:
    """Return the world of a scope."""
    return Ordered(relation(scope))


def _of_walks(cluster: Scope) -> Ordered:
    """Return the world of all runs in a cluster, which has no budgets. A check that holds only where no client aborts
    and no handshake is refused is none of all runs."""
    world = ordered(quiet(cluster))
    if dies_of_silence in world.turns.checks:
        world.turns.checks.remove(dies_of_silence)
    return world


MAX_UNCOLLECTED = 32
"""Evicted worlds that may take up memory before a collection."""


class RelationCache:
    """Cache of worlds by cluster, the least recently used evicted: the caches of a world are what makes runs fast."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.most = most
        self.known: dict[Scope, Ordered] = {}
        self.last: tuple[Scope, Ordered] | None = None
        self.forgotten = 0
        """Worlds evicted since the last collection."""

    def of(self, cluster: Scope) -> Ordered:
        """Return the world of a cluster: the same one again until another cluster's is requested."""
        if self.last is not None and (self.last[0] is cluster or self.last[1].space.scope is cluster):
            return self.last[1]
        world = self.known.pop(cluster, None)
        if world is None or world.remembered() > self.most // 4:
            world = _of_walks(cluster)
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
        if self.forgotten >= MAX_UNCOLLECTED:
            # A world is in circles, and whoever walks does not collect. Once for many, since all is looked through.
            self.forgotten = 0
            gc.collect()
        return world

"""The schedulers of random walks, which choose the next move.

None is best at everything (measured on planted bugs), so a campaign draws from all of them. A scheduler
sees the moves in the walk's fixed order and remembers chains, never move numbers: what belongs together (a frame, an
operation, a task, a timer, a request) keeps its priority while the numbers around it shift.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from pdflow.protocol.effects import PostWrite
from pdflow.workload.rng import Stream
from pdflow_sim.check.moves.acts import ON_TASK, Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.routed.cluster import ROUTER
from pdflow_sim.check.state.space import State

ON_OPERATIONS = frozenset({"read", "land", "error", "notice", "lose notice", "ended"})
AT_P = frozenset({"begin", "finish", "abort prefill", "cancel prefill", "withdraw"})
LENGTH = 12
"""About how many moves a request takes with one rank on each side: the range in which PCT's change points fall."""


class MoveScheduler(Protocol):
    """Chooses one of the possible moves. `pick` is never given an empty sequence."""

    def pick(self, state: State, moves: Sequence[Move]) -> Move: ...


def chain(world: Transitions, state: State, move: Move) -> Hashable:
    """Return the key of the frame, operation, task, timer or request that a move belongs to. Each frame is a chain of
    its own: priorities by sender alone would never let the later one of two overtake."""
    space, verb = world.space, move[0]
    if verb in ("deliver", "drop", "delay", "duplicate", "corrupt"):
        return ("frame", move[1], space.chans.values[state[space.first_link + move[1]]][0])
    if verb == "timer":
        return ("timer", move[1], space.armed[state[move[1]]][move[2]])
    if verb in ON_OPERATIONS:
        return ("operation", space.ops_of(state)[move[1]][0])
    if verb in ON_TASK:
        return space.tasks_of(state)[move[1]]
    if verb == "late":
        return ("late", *space.bags.values[state[space.bag]][move[1]])
    if verb in ("decode", "admit", "report", "hit", "load", "preempt", "end", "abort"):
        return ("request", move[1])
    if verb == "copied":
        return ("prompt" if move[1] else "request", move[2])
    return move


def node(world: Transitions, state: State, move: Move) -> int:
    """Return the index of the node at which a move happens: moves at one node race, others do not."""
    space, verb = world.space, move[0]
    cluster = space.cluster
    if verb == "timer":
        return int(move[1])
    if verb in ("deliver", "drop", "delay", "duplicate", "corrupt"):
        return cluster.at[cluster.links[move[1]][1]]
    if verb == "late":
        return cluster.at[cluster.links[space.bags.values[state[space.bag]][move[1]][0]][1]]
    if verb in ON_TASK:
        return space.tasks_of(state)[move[1]][1]
    if verb in ON_OPERATIONS:
        poster, _, effect = space.operations(space.ops_of(state)[move[1]][0])
        at_target = verb in ("land", "notice", "lose notice") and type(effect) is PostWrite
        return cluster.at[effect.to] if at_target else cluster.at[poster]
    if verb == "lose":
        return cluster.at[cluster.links[move[1]][0]]
    if verb in ("restart", "outlive", "kill", "kill rank", "start", "room"):
        return cluster.at[cluster.engines[move[1]]]
    if verb == "copied":
        return cluster.at[(cluster.p_of if move[1] else cluster.d_of)[move[2]].engine]
    if verb in ("request", "disconnect", "crash router"):
        return cluster.at[ROUTER]
    if verb == "tick":
        return cluster.at[cluster.engines[space.scope.p_engines if move[1] else 0]]
    return cluster.at[(cluster.p_of if verb in AT_P else cluster.d_of)[move[1]].engine]


class Uniform:
    """Picks every move with the same probability."""

    def __init__(self, rng: Stream) -> None:
        self.rng = rng

    def pick(self, state: State, moves: Sequence[Move]) -> Move:
        return moves[self.rng.below(len(moves))]


class Given:
    """Follows given choices: numbers, each taken modulo the number of moves; 0 when they run out."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = iter(choices)

    def pick(self, state: State, moves: Sequence[Move]) -> Move:
        return moves[next(self.choices, 0) % len(moves)]


class PartialOrder:
    """Like POS (Yuan et al., CAV 2018): the highest of random priorities runs, and everything that raced with it draws
    anew. Orders of what does not race are not drawn again and again, so rare orders of what does come sooner."""

    def __init__(self, world: Transitions, rng: Stream) -> None:
        self.world, self.rng = world, rng
        self.priorities: dict[Hashable, int] = {}

    def pick(self, state: State, moves: Sequence[Move]) -> Move:
        world, priorities = self.world, self.priorities
        best, chosen = -1, moves[0]
        keys = [(chain(world, state, move), move[0]) for move in moves]
        for key, move in zip(keys, moves, strict=True):
            priority = priorities.get(key)
            if priority is None:
                priority = priorities[key] = self.rng.u64()
            if priority > best:
                best, chosen = priority, move
        here = node(world, state, chosen)
        for key, move in zip(keys, moves, strict=True):
            if node(world, state, move) == here:
                priorities.pop(key, None)
        return chosen


class Pct:
    """PCT (Burckhardt et al., ASPLOS 2010): the highest chain runs, and falls to the bottom at depth - 1 random steps.

    Unfair on purpose: it finds bugs that need a chain to be starved, such as a handshake until after a lease's end.
    """

    def __init__(self, world: Transitions, rng: Stream, depth: int) -> None:
        self.world, self.rng = world, rng
        scope = world.space.scope
        span = LENGTH * scope.requests * scope.p_tp * scope.d_tp
        self.changes = {rng.below(span) for _ in range(depth - 1)}
        self.priorities: dict[Hashable, int] = {}
        self.step = self.lowest = 0

    def pick(self, state: State, moves: Sequence[Move]) -> Move:
        if len(moves) == 1:
            return moves[0]
        change = self.step in self.changes
        self.step += 1
        best = self._highest(state, moves)
        if change:
            self.lowest -= 1
            self.priorities[chain(self.world, state, best)] = self.lowest
            best = self._highest(state, moves)
        return best

    def _highest(self, state: State, moves: Sequence[Move]) -> Move:
        world, priorities = self.world, self.priorities
        best: int | None = None
        for move in moves:
            key = chain(world, state, move)
            priority = priorities.get(key)
            if priority is None:
                priority = priorities[key] = self.rng.u64()
            if best is None or priority > best:
                best, chosen = priority, move
        return chosen


class LongestWaiting:
    """Picks the chain that has waited longest, but now and then a random one: long runs that go almost well."""

    def __init__(self, world: Transitions, rng: Stream, noise: float) -> None:
        self.world, self.rng, self.noise = world, rng, noise
        self.since: dict[Hashable, int] = {}
        self.count = 0

    def pick(self, state: State, moves: Sequence[Move]) -> Move:
        keys = [(move[0], chain(self.world, state, move)) for move in moves]
        since: dict[Hashable, int] = {}
        for key in keys:
            self.count += 1
            since[key] = self.since.get(key, self.count)
        if self.rng.uniform() < self.noise:
            chosen = self.rng.below(len(moves))
        else:
            chosen = min(range(len(moves)), key=lambda i: since[keys[i]])
        since.pop(keys[chosen])
        self.since = since
        return moves[chosen]


def scheduler_of(world: Transitions, kind: str, rng: Stream) -> MoveScheduler:
    """Return a scheduler by its name in swarm.SCHEDULERS."""
    if kind == "partial order":
        return PartialOrder(world, rng)
    if kind.startswith("pct"):
        return Pct(world, rng, int(kind.split()[1]))
    if kind == "queue":
        return LongestWaiting(world, rng, 0.05 + 0.3 * rng.uniform())
    return Uniform(rng)

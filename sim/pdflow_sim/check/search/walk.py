"""A random walk through the moves of a world: a run that is a function of its seed, and ends at rest or in a violation.

When nothing may happen any more, or the run's faults are over, everything must settle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import attrs

from pdflow.protocol.dialect import Dialect
from pdflow.workload.rng import Rng, Stream
from pdflow_sim.check.counterexamples.names import name
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.ordered import PRICES, Ordered, RelationCache
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.liveness import settle
from pdflow_sim.check.search.promptness import amiss
from pdflow_sim.check.search.rest import check_rest, come_to_rest
from pdflow_sim.check.search.schedulers import MoveScheduler, node, scheduler_of
from pdflow_sim.check.search.swarm import Hold, Manner, budget_of, cluster_of, manner_of, quiet, with_budget
from pdflow_sim.check.state.digest import digest
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

LONGEST = 2_000
"""Number of moves after which a run is cut short, far beyond what any has taken."""
TWISTS = (0, 1, 2, 3, 5, 7)
"""Fault-free schedules to try before it is reported that something never ends."""
FAULTS = frozenset((*PRICES, "restart", "kill"))
ON_WIRE = frozenset(("read", "land"))


@attrs.define
class Walk:
    """The record of a run: its settings, its moves, and the invariant that it violates."""

    seed: int
    cluster: Scope
    budget: tuple[int, ...]
    manner: Manner
    moves: list[Move]
    end: State
    """The last state before settling, or before the violation."""
    broken: Broken | None = None
    settling_moves: int = 0
    """Number of moves that settling took."""

    @property
    def scope(self) -> Scope:
        return with_budget(self.cluster, self.budget)

    def names(self, world: Ordered) -> list[str]:
        return [name(world, state, move) for state, move in self.steps(world)]

    def steps(self, world: Ordered) -> Iterator[tuple[State, Move]]:
        """Yield (state, move) for every move of the run, with the state in which it was chosen."""
        state = world.opening(self.budget)
        for left, move in enumerate(self.moves, 1 - len(self.moves)):
            yield state, move
            if left:
                state = world.apply(state, move)


class WalkPolicy:
    """Chooses the moves of one run by its scheduler, its rates of faults and timers, and its held links and nodes."""

    def __init__(self, world: Ordered, manner: Manner, scheduler: MoveScheduler, rng: Stream) -> None:
        self.world, self.manner, self.scheduler, self.rng = world, manner, scheduler, rng
        self.plain = manner.fault_rate is None and manner.timer_rate is None and manner.hasty is None
        self.holds = bool(manner.links or manner.nodes or manner.wire)
        self.plain = self.plain and not self.holds
        self.step = 0

    def next(self, state: State, moves: Sequence[Move]) -> Move:
        self.step += 1
        if self.plain:
            return self.scheduler.pick(state, moves)
        manner, rng = self.manner, self.rng
        if manner.hasty is not None:
            for move in moves:
                if move[0] == "timer" and self.world.space.armed[state[move[1]]][move[2]].kind is manner.hasty:
                    return move
        ordinary, timers, faults = self._sorted(moves)
        if faults and rng.uniform() < (manner.fault_rate or 0):
            return faults[rng.below(len(faults))]
        if timers and rng.uniform() < (manner.timer_rate or 0):
            return timers[rng.below(len(timers))]
        if self.holds:
            ordinary = self._without_held(state, ordinary) or (ordinary if not timers else [])
        return self.scheduler.pick(state, ordinary or timers or faults)

    def _sorted(self, moves: Sequence[Move]) -> tuple[list[Move], list[Move], list[Move]]:
        """Return ordinary moves, timers and faults; timers or faults without a rate of their own are ordinary."""
        ordinary: list[Move] = []
        timers: list[Move] = []
        faults: list[Move] = []
        to_timers = ordinary if self.manner.timer_rate is None else timers
        to_faults = ordinary if self.manner.fault_rate is None else faults
        for move in moves:
            if move[0] == "timer":
                to_timers.append(move)
            elif move[0] in FAULTS:
                to_faults.append(move)
            else:
                ordinary.append(move)
        return ordinary, timers, faults

    def _without_held(self, state: State, moves: list[Move]) -> list[Move]:
        """Return the moves without those that wait on a held link, at a starved node or on a slow wire."""
        links, nodes = self._held(self.manner.links), self._held(self.manner.nodes)
        if links:
            moves = [move for move in moves if move[0] != "deliver" or move[1] not in links]
        if nodes:
            moves = [move for move in moves if node(self.world, state, move) not in nodes]
        if self.manner.wire is not None and self._held((self.manner.wire,)):
            moves = [move for move in moves if move[0] not in ON_WIRE]
        return moves

    def _held(self, holds: tuple[Hold, ...]) -> list[int]:
        return [hold.of for hold in holds if hold.since <= self.step < hold.until]


def walk(cache: RelationCache, seed: int, dialect: Dialect, scope: Scope | None = None) -> Walk:
    """Return the run of this seed. `scope`: the cluster and budgets to run in, instead of drawn ones."""
    cluster = cluster_of(seed, dialect) if scope is None else quiet(scope)
    world = cache.of(cluster)
    rng = Rng(seed)
    plan = rng.stream("plan")
    budget = budget_of(plan, cluster)
    manner = manner_of(plan, cluster, len(world.space.cluster.links), len(world.space.cluster.nodes))
    schedule = rng.stream("schedule")
    course = WalkPolicy(world, manner, scheduler_of(world, manner.scheduler, schedule), schedule)
    try:
        return run(world, budget if scope is None else scope.budget, course, seed)
    except Exception as error:
        error.add_note(f"in the {dialect.name} walk of seed {seed}, in a cluster of {cluster}")
        raise


def run(world: Ordered, budget: tuple[int, ...], course: WalkPolicy, seed: int = -1) -> Walk:
    """Choose moves by a policy until the run ends, and settle. A violation is recorded, not raised."""
    state = world.opening(budget)
    taken: list[Move] = []
    record = Walk(seed, world.space.scope, budget, course.manner, taken, state)
    moves_of, apply, following = world.moves, world.apply, course.next
    steps = LONGEST if course.manner.steps is None else course.manner.steps
    try:
        while len(taken) < steps:
            moves = moves_of(state)
            if not moves:
                break
            move = following(state, moves)
            taken.append(move)
            record.end = state
            state = apply(state, move)
        record.end = state
        record.settling_moves = rest(world, state, budget)
    except Broken as broken:
        record.broken = broken.with_traceback(None)
    return record


def rest(world: Ordered, state: State, budget: tuple[int, ...]) -> int:
    """Return the number of moves until everything has settled. Raises Broken.

    Liveness asks only that it can settle (liveness.py): if one fair schedule repeats itself, others are tried. Without
    clocks it must settle by itself, and well (promptness.py).
    """
    if not world.space.scope.clocks:
        return _promptly(world, state, budget)
    if world.space.settled(state):
        check_rest(world, come_to_rest(world, state))
        return 0
    for world.twist in TWISTS:
        try:
            chain = settle(world, state)
            check_rest(world, come_to_rest(world, chain[-1]))
            return len(chain) - 1
        except Broken as broken:
            if broken.name != "L" or world.twist == TWISTS[-1]:
                raise
        finally:
            world.twist = 0
    raise AssertionError("the last schedule either settles or raises")


def _promptly(world: Ordered, state: State, budget: tuple[int, ...]) -> int:
    moves, state = promptly(world, state)
    found = amiss(world, state, budget)
    if found is not None:
        raise found
    check_rest(world, state)
    return len(moves)


def promptly(world: Ordered, state: State) -> tuple[list[Move], State]:
    """Return the moves of a schedule without faults until nothing is possible any more, and the last state."""
    moves: list[Move] = []
    while move := next((move for move in world.moves(state) if move[0] not in FAULTS), None):
        state = world.apply(state, move)
        moves.append(move)
    return moves, state


def digest_of(world: Ordered, record: Walk) -> str:
    """Return a digest of everything in a run: every state, the moves that were possible in it, and the chosen one."""
    sha = blake2b(digest_size=8)
    for state, move in record.steps(world):
        sha.update(digest(world, state).encode())
        for possible in world.moves(state):
            sha.update(name(world, state, possible).encode())
        sha.update(name(world, state, move).encode())
    sha.update(digest(world, record.end).encode())
    sha.update(str(record.broken).encode())
    return sha.hexdigest()

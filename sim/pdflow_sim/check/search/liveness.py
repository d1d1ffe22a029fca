"""Liveness: once faults are over, everything ends.

From a state, faults stop and a fair schedule goes on: what is under way arrives, then timers fire, the gentle ones
first. Whatever was lost must be repaired by SYNC and CANCEL alone where a dialect has them; a request's own deadline is
the last resort. If that ends with every request resolved and nothing held, resolution is reachable from that state.
Under strong fairness (what may happen again and again does happen) this, asked of every reachable state, is the same as
saying that every run resolves: a run that never did would stay for ever among states from which it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdflow.protocol.events import TimerFired
from pdflow.protocol.timers import Timer, TimerKind
from pdflow_sim.check.moves.alarms import fires_by_clocks
from pdflow_sim.check.moves.clocks import Clocks
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.search.promptness import prompt
from pdflow_sim.check.search.rest import check_rest
from pdflow_sim.check.state.shadow_state import Broken, PromptStage, RequestStage
from pdflow_sim.check.state.space import State

REPAIRS = frozenset({TimerKind.SYNC, TimerKind.CANCEL})
ENDS = frozenset({TimerKind.LEASE, TimerKind.REGISTRATION, TimerKind.JOIN, TimerKind.EXPECT, TimerKind.RECLAIM})
STEPS = 500
"""Limit of moves, more than any scope's frames, operations and tasks together; beyond it something repeats itself."""


def live(world: Transitions, states: Iterable[State], good: set[State] | None = None) -> None:
    """Check that each of these states can settle. Raises Broken("L", ...), whose `state` is the first that cannot.

    Args:
        good: states with faults over that are known to settle; those on the way are added.
    """
    if not world.space.scope.clocks:
        prompt(world, states)
        return
    good = set() if good is None else good
    for state in states:
        check_rest(world, state)
        # Of states that differ only in what is left of the budgets, one schedule is followed.
        begin = world.space.spent(state)
        if begin not in good:
            good.update(settle(world, state, good)[1:])
            good.add(begin)


def settle(world: Transitions, state: State, good: set[State] | None = None) -> list[State]:
    """Return the states on the way to a settled one, up to a state that is known to be good. Raises Broken: "L" if a
    fair schedule does not settle, or what else breaks on the way."""
    chain = [state]
    if not world.space.scope.clocks:
        prompt(world, chain)
        return chain
    if world.space.settled(state):
        return chain
    try:
        for after in quiet_schedule(world, state):
            if good and after in good:
                return chain
            chain.append(after)
    except Broken as other:
        other.state = state
        raise
    if not world.space.settled(chain[-1]):
        broken = Broken("L", f"without further faults it never ends: {missing(world, chain[-1])}")
        broken.state = state
        raise broken
    return chain


def missing(world: Transitions, state: State) -> str:
    """Return a description of everything that has not ended in a state."""
    shadow, cluster = world.space.shadow_of(state), world.space.cluster
    descriptions = [
        f"{cluster.requests[i]} is {RequestStage(stage).name}"
        for i, stage in enumerate(shadow.stages)
        if stage not in world.space.over
    ]
    descriptions += [
        f"P's {cluster.xids[i]} is {PromptStage(product).name}"
        for i, product in enumerate(shadow.products)
        if product in (PromptStage.QUEUED, PromptStage.HELD)
    ]
    descriptions += [
        f"an operation is open ({world.space.operations(op)[2].op})" for op, _ in world.space.ops_of(state)
    ]
    descriptions += [
        f"{node} still holds {len(cells)} transfer(s)"
        for node in cluster.nodes
        if (cells := getattr(world.space.body(state, node), "cells", None))
    ]
    return ", ".join(descriptions + world.space.unanswered(state))


def _by_the_clock(world: Transitions, clocks: Clocks, state: State) -> Iterator[State]:
    """Yield the states of one fair schedule with clocks: any possible move is made, and if there is none, a clock
    ticks."""
    state = world.space.spent(state)
    for _ in range(STEPS):
        moves = world.moves(state)
        move = next((m for m in moves if m[0] != "tick"), None)
        if move is None:
            # Each clock in its turn: the one that is behind.
            move = next(iter(sorted(moves, key=lambda m: m[1] == (state[clocks.ahead] <= 0))), None)
        if move is None or world.space.settled(state):
            return
        state = world.apply(state, move)
        yield state


def quiet_schedule(world: Transitions, state: State) -> Iterator[State]:
    """Yield the states of one fair schedule, with faults over."""
    clocks = world.components.clocks
    if clocks is not None:
        yield from _by_the_clock(world, clocks, state)
        return
    ends = ENDS if world.space.scope.dialect.control_frames else ENDS | {TimerKind.DEADLINE}
    state = world.space.spent(state)
    for kinds in (REPAIRS, REPAIRS, REPAIRS, ends, REPAIRS, ends, REPAIRS, ends | REPAIRS, ends | REPAIRS):
        for _ in range(STEPS):
            move = next((move for move in world.moves(state) if move[0] != "timer"), None)
            if move is None:
                break
            state = world.apply(state, move)
            yield state
        if world.space.settled(state):
            return
        for at, node in enumerate(world.space.cluster.nodes):
            for timer in world.space.armed[state[at]]:
                if timer.kind in kinds and timer in world.space.armed[state[at]] and may_fire(world, state, timer):
                    state = world.turns.feed(state, node, TimerFired(timer))
                    yield state


def may_fire(world: Transitions, state: State, timer: Timer) -> bool:
    """True if the schedule may fire this timer. A deadline that SYNCs would postpone for ever may not fire: no liveness
    may depend on it."""
    if not world.space.scope.dialect.control_frames:
        return fires_by_clocks(world.space, state, timer)
    cells = [cell for d in world.space.cluster.ds for cell in world.space.body(state, d.engine).cells.values()]
    if timer.kind is TimerKind.REGISTRATION:
        return not any(cell.registration is not None and cell.registration.reg == timer.key for cell in cells)
    return timer.kind is not TimerKind.LEASE or not any(
        c.registration is None and c.params.xid == timer.key for c in cells
    )

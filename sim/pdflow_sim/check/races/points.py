"""The points of the races: conditions on a move in a state. Evaluated before every move of a search, so that each tests
the move's verb first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Cancel, Heartbeat, Register, Sync
from pdflow.protocol.timers import TimerKind
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.races.owners import stands_between
from pdflow_sim.check.races.race import Point
from pdflow_sim.check.state.cluster import SOURCE
from pdflow_sim.check.state.shadow_state import (
    ENDED_ERR,
    ENDED_OK,
    ERROR_REPORTED,
    IN_FLIGHT,
    PIECE,
    READING,
    PromptStage,
    RequestStage,
)
from pdflow_sim.check.state.space import State, StateSpace

Condition: TypeAlias = Callable[[StateSpace, State, Move], bool]


def point(description: str) -> Callable[[Condition], Point]:
    return lambda at: Point(description, at)


# The frame or operation of a move.


def frame(space: StateSpace, state: State, move: Move) -> Any:
    """Return the frame that a move delivers or loses."""
    if move[0] == "late":
        return space.frames.values[space.bags.values[state[space.bag]][move[1]][1]]
    return space.frames.values[space.chans.values[state[space.first_link + move[1]]][0]]


def operations(space: StateSpace, state: State, kind: type) -> Iterator[tuple[Any, int]]:
    """Yield (effect, flags) of every open operation of this kind."""
    for op, flags in space.ops_of(state):
        effect = space.operations(op)[2]
        if type(effect) is kind:
            yield effect, flags


def operation(space: StateSpace, state: State, move: Move) -> tuple[Any, int]:
    """Return (effect, flags) of the operation that a move lands, ends or reports."""
    op, flags = space.ops_of(state)[move[1]]
    return space.operations(op)[2], flags


def lease_ends(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "timer" and space.armed[state[move[1]]][move[2]].kind is TimerKind.LEASE


def of_p(space: StateSpace, state: State, move: Move) -> bool:
    """True if a move's task is a handshake of P's."""
    kind, node, _ = space.tasks_of(state)[move[1]]
    return kind == "handshake" and engine_of(space.cluster.nodes[node]) == "P"


def held(space: StateSpace, state: State, product: int = 0) -> bool:
    return space.shadow_of(state).products[product] == PromptStage.HELD


def released(space: StateSpace, state: State) -> bool:
    return space.shadow_of(state).products[0] == PromptStage.RELEASED


def stage(space: StateSpace, state: State) -> int:
    found: int = space.shadow_of(state).stages[0]
    return found


# P's blocks.


@point("the lease ends while a WRITE is in flight")
def lease_ends_under_write(space: StateSpace, state: State, move: Move) -> bool:
    if not lease_ends(space, state, move):
        return False
    return any(flags & READING for _, flags in operations(space, state, PostWrite))


@point("the connection that a WRITE waits for is made after P has released the prompt")
def connected_too_late(space: StateSpace, state: State, move: Move) -> bool:
    late = move[0] == "task" and released(space, state) and stage(space, state) == RequestStage.ADMITTED
    return late and of_p(space, state, move)


@point("a READ of released blocks lands")
def read_too_late(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "land" and released(space, state) and type(operation(space, state, move)[0]) is PostRead


@point("D admits a request whose prompt P has released")
def admitted_too_late(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "admit" and released(space, state)


@point("P receives a SYNC or heartbeat for a queued request")
def interest(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(space, state, move)) not in (Heartbeat, Sync):
        return False
    return stage(space, state) == RequestStage.ENQUEUED and held(space, state)


@point("the lease of a queued request's prompt ends")
def lease_ends_in_queue(space: StateSpace, state: State, move: Move) -> bool:
    queued = lease_ends(space, state, move) and stage(space, state) == RequestStage.ENQUEUED
    return queued and held(space, state)


@point("a registration arrives at the writer's thread before it learns that the engine's thread has ended the lease")
def registration_between_owners(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "deliver" or not released(space, state) or type(frame(space, state, move)) is not Register:
        return False
    return any(cell.source is not None for cell in space.body(state, "P.r0").cells.values())


@point("the engine's thread evicts D between the writer's check of D and its WRITE")
def evicted_between_check_and_write(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "evict" and stands_between(space, state)


@point("an unknown peer's registration without its fields is drained before another request's registration")
def poison_before_registration(space: StateSpace, state: State, move: Move) -> bool:
    """Requires that the first request is over and no longer needs its prompt: the second request's registration is
    lost."""
    if move[0] != "poison" or space.shadow_of(state).stages != (RequestStage.FREED, RequestStage.ADMITTED):
        return False
    frames = space.chans.values[state[space.first_link + space.cluster.link_of["D.r0", "P.r0"]]]
    return any(isinstance(space.frames.values[waiting], Register) for waiting in frames)


# D's blocks.


@point("the client aborts while bytes may still land")
def abort_under_write(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "abort" and any(flags & IN_FLIGHT for _, flags in space.ops_of(state))


@point("the client aborts before D has blocks for the request")
def abort_before_blocks(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "abort" and stage(space, state) < RequestStage.ADMITTED and held(space, state)


@point("a retry's prompt is finished while the registration of an ended attempt remains")
def stale_registration(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "finish" or move[1] != 1 or stage(space, state) < RequestStage.RESOLVED:
        return False
    first = space.cluster.requests[0]
    cells = space.body(state, "P.r0").cells.values()
    return any(registration.reg.request_id == first for cell in cells for registration in cell.registrations)


@point("another prompt's KV lands")
def foreign_lands(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "land":
        return False
    effect, _ = operation(space, state, move)
    asked = space.cluster.product_of[space.checker.request_of(effect)]
    return type(effect) is PostWrite and effect.source.generation - SOURCE != asked


@point("a registration arrives after its request has ended")
def registration_too_late(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] not in ("deliver", "late") or stage(space, state) < RequestStage.COMMITTED:
        return False
    what = frame(space, state, move)
    return type(what) is Register and what.reg.request_id == space.cluster.requests[0]


@point("a copy of a registration arrives at the P rank whose half has landed, before the other half lands")
def copy_after_half(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "late" or stage(space, state) != RequestStage.ADMITTED:
        return False
    cluster, what, landed = space.cluster, frame(space, state, move), space.shadow_of(state).landed[0]
    _, to = cluster.links[space.bags.values[state[space.bag]][move[1]][0]]
    if type(what) is not Register or what.reg.request_id != cluster.requests[0]:
        return False
    half = cluster.bit[cluster.p_ranks.index(to), what.d_rank]
    return bool(landed & half) and landed != cluster.everything


@point("P dies while D holds blocks of an aborted request")
def p_dies_after_abort(space: StateSpace, state: State, move: Move) -> bool:
    return move == ("restart", 0) and stage(space, state) == RequestStage.RESOLVED


@point("one handle has failed, and its sibling may still land")
def sibling_ends_badly(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "ended" or not operation(space, state, move)[1] & ENDED_ERR:
        return False
    return any(flags & IN_FLIGHT for i, (_, flags) in enumerate(space.ops_of(state)) if i != move[1])


@point("the lease ends while a WRITE whose handle has failed may still read")
def lease_ends_after_error(space: StateSpace, state: State, move: Move) -> bool:
    return lease_ends(space, state, move) and any(
        flags & ERROR_REPORTED for _, flags in operations(space, state, PostWrite)
    )


@point("a second rank's CANCEL arrives while the first rank's CANCEL waits")
def second_cancel(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(space, state, move)) is not Cancel:
        return False
    return any(cell.cancel_waiters for cell in space.body(state, "P.r0").cells.values())


@point("P is notified that a WRITE has failed, and a part of it has landed")
def error_after_landing(space: StateSpace, state: State, move: Move) -> bool:
    return (
        move[0] == "ended"
        and error_reported(space, state, move)
        and operation(space, state, move)[1] >> PIECE + 3 & 7 > 0
    )


# Missing signals.


def error_reported(space: StateSpace, state: State, move: Move) -> bool:
    return bool(operation(space, state, move)[1] & ENDED_ERR) and stage(space, state) == RequestStage.ADMITTED


@point("P is notified that a WRITE has failed, and D waits for it")
def write_fails(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "ended" and error_reported(space, state, move)


@point("P cannot reach a D that waits")
def p_cannot_reach_d(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "unreachable" and stage(space, state) == RequestStage.ADMITTED and of_p(space, state, move)


@point("a registration arrives after the lease has ended")
def registration_after_lease(space: StateSpace, state: State, move: Move) -> bool:
    late = move[0] == "deliver" and released(space, state) and stage(space, state) == RequestStage.ADMITTED
    return late and type(frame(space, state, move)) is Register


@point("one rank's registration is lost")
def registration_lost(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "drop" and type(frame(space, state, move)) is Register


@point("one rank registers before the other rank knows of the request")
def one_rank_lags(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(space, state, move)) is not Register:
        return False
    cluster = space.cluster
    return held(space, state) and any(state[space.first_link + cluster.link_of["D", rank]] for rank in cluster.d_ranks)


@point("the lagging rank receives the completion")
def completion_too_early(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "notice":
        return False
    to = operation(space, state, move)[0].to
    return bool(state[space.first_link + space.cluster.link_of["D", to]])


@point("the completion is lost")
def completion_lost(space: StateSpace, state: State, move: Move) -> bool:
    return bool(move[0] == "lose notice")


# Names, incarnations, outcomes.


@point("a registration arrives while P holds two prompts with its base id")
def two_candidates(space: StateSpace, state: State, move: Move) -> bool:
    both = move[0] == "deliver" and held(space, state) and held(space, state, 1)
    return both and type(frame(space, state, move)) is Register


@point("P finishes a prompt that a dead D has registered for")
def d_is_another(space: StateSpace, state: State, move: Move) -> bool:
    if move[0] != "finish" or not space.shadow_of(state).restarts[1] or stage(space, state) != RequestStage.FREED:
        return False
    return any(cell.registrations for cell in space.body(state, "P.r0").cells.values())


@point("P dies with a prompt that D waits for")
def p_dies(space: StateSpace, state: State, move: Move) -> bool:
    return move == ("restart", 0) and stage(space, state) == RequestStage.ADMITTED and held(space, state)


@point("the completion of an aborted request arrives")
def completion_after_abort(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "notice" and stage(space, state) == RequestStage.RESOLVED


@point("a later prompt's lease ends before an earlier prompt's")
def second_lease_ends_first(space: StateSpace, state: State, move: Move) -> bool:
    if not lease_ends(space, state, move) or not held(space, state):
        return False
    return bool(space.armed[state[move[1]]][move[2]].key == space.cluster.xids[1])


@point("P is notified that a WRITE has landed")
def write_ends_well(space: StateSpace, state: State, move: Move) -> bool:
    return move[0] == "ended" and bool(operation(space, state, move)[1] & ENDED_OK)

"""Moments: is this move, in this state, the one that matters? Asked before every move of a search: the verb first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Cancel, Heartbeat, Register, Sync
from pdflow.protocol.timers import TimerKind
from sim.check.cluster import SOURCE
from sim.check.ghost import ENDED_ERR, ENDED_OK, FLYING, PIECE, READING, TOLD, Product, Stage
from sim.check.races.owners import Evicting
from sim.check.races.race import Point
from sim.check.relation import Move, Relation
from sim.check.world import State

Judged: TypeAlias = Callable[[Relation, State, Move], bool]


def point(says: str) -> Callable[[Judged], Point]:
    return lambda at: Point(says, at)


# What a move is about.


def frame(world: Relation, state: State, move: Move) -> Any:
    """The frame that arrives or is lost."""
    if move[0] == "late":
        return world.frames.values[world.bags.values[state[world.bag]][move[1]][1]]
    return world.frames.values[world.chans.values[state[world.first_link + move[1]]][0]]


def operations(world: Relation, state: State, kind: type) -> Iterator[tuple[Any, int]]:
    """Open ones of this kind: (effect, flags)."""
    for op, flags in world.ops_of(state):
        effect = world.operations(op)[2]
        if type(effect) is kind:
            yield effect, flags


def operation(world: Relation, state: State, move: Move) -> tuple[Any, int]:
    """What lands, ends, or tells of its end."""
    op, flags = world.ops_of(state)[move[1]]
    return world.operations(op)[2], flags


def lease_ends(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "timer" and world.armed[state[move[1]]][move[2]].kind is TimerKind.LEASE


def of_p(world: Relation, state: State, move: Move) -> bool:
    """Whether a task is P's, about a connection."""
    kind, node, _ = world.tasks_of(state)[move[1]]
    return kind == "handshake" and engine_of(world.cluster.nodes[node]) == "P"


def held(world: Relation, state: State, product: int = 0) -> bool:
    return world.ghost_of(state).products[product] == Product.HELD


def released(world: Relation, state: State) -> bool:
    return world.ghost_of(state).products[0] == Product.RELEASED


def stage(world: Relation, state: State) -> int:
    found: int = world.ghost_of(state).stages[0]
    return found


# P's blocks.


@point("the lease ends while a WRITE reads")
def lease_ends_under_write(world: Relation, state: State, move: Move) -> bool:
    if not lease_ends(world, state, move):
        return False
    return any(flags & READING for _, flags in operations(world, state, PostWrite))


@point("the connection that a WRITE waits for is there, and the prompt is not")
def connected_too_late(world: Relation, state: State, move: Move) -> bool:
    late = move[0] == "task" and released(world, state) and stage(world, state) == Stage.ADMITTED
    return late and of_p(world, state, move)


@point("a READ lands of blocks that have been released")
def read_too_late(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "land" and released(world, state) and type(operation(world, state, move)[0]) is PostRead


@point("D admits what P has released meanwhile")
def admitted_too_late(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "admit" and released(world, state)


@point("P hears that a queued request is still wanted")
def interest(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(world, state, move)) not in (Heartbeat, Sync):
        return False
    return stage(world, state) == Stage.ENQUEUED and held(world, state)


@point("its lease ends all the same")
def lease_ends_in_queue(world: Relation, state: State, move: Move) -> bool:
    queued = lease_ends(world, state, move) and stage(world, state) == Stage.ENQUEUED
    return queued and held(world, state)


@point("a registration arrives at the writer's thread, which has not heard that the engine's has ended the lease")
def registration_between_owners(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "deliver" or not released(world, state) or type(frame(world, state, move)) is not Register:
        return False
    return any(cell.source is not None for cell in world.body(state, "P.r0").cells.values())


@point("the engine's thread forgets D between the writer's check of it and its WRITE")
def evicted_between_check_and_write(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "evict" and isinstance(world, Evicting) and bool(state[world.checked])


@point("a stranger's registration without its fields is drained before another request's registration")
def poison_before_registration(world: Relation, state: State, move: Move) -> bool:
    """The first request needs its prompt no more: it is the other one that is lost."""
    if move[0] != "poison" or world.ghost_of(state).stages != (Stage.FREED, Stage.ADMITTED):
        return False
    frames = world.chans.values[state[world.first_link + world.cluster.link_of["D.r0", "P.r0"]]]
    return any(isinstance(world.frames.values[waiting], Register) for waiting in frames)


# D's blocks.


@point("the client gives up while bytes may land")
def abort_under_write(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "abort" and any(flags & FLYING for _, flags in world.ops_of(state))


@point("the client gives up before D has blocks for it")
def abort_before_blocks(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "abort" and stage(world, state) < Stage.ADMITTED and held(world, state)


@point("a retry's prompt is finished beside the registration of an attempt that is over")
def stale_registration(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "finish" or move[1] != 1 or stage(world, state) < Stage.RESOLVED:
        return False
    first = world.cluster.requests[0]
    cells = world.body(state, "P.r0").cells.values()
    return any(grant.reg.request_id == first for cell in cells for grant in cell.grants)


@point("another prompt's KV lands")
def foreign_lands(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "land":
        return False
    effect, _ = operation(world, state, move)
    asked = world.cluster.product_of[world.judge.request_of(effect)]
    return type(effect) is PostWrite and effect.source.generation - SOURCE != asked


@point("a registration arrives when its request is over")
def registration_too_late(world: Relation, state: State, move: Move) -> bool:
    if move[0] not in ("deliver", "late") or stage(world, state) < Stage.COMMITTED:
        return False
    what = frame(world, state, move)
    return type(what) is Register and what.reg.request_id == world.cluster.requests[0]


@point("a copy of a registration arrives at the rank of P whose half has landed, and the other's has not")
def copy_after_half(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "late" or stage(world, state) != Stage.ADMITTED:
        return False
    cluster, what, landed = world.cluster, frame(world, state, move), world.ghost_of(state).landed[0]
    _, to = cluster.links[world.bags.values[state[world.bag]][move[1]][0]]
    if type(what) is not Register or what.reg.request_id != cluster.requests[0]:
        return False
    half = cluster.bit[cluster.p_ranks.index(to), what.d_rank]
    return bool(landed & half) and landed != cluster.everything


@point("P dies while D holds blocks of an aborted request")
def p_dies_after_abort(world: Relation, state: State, move: Move) -> bool:
    return move == ("restart", 0) and stage(world, state) == Stage.RESOLVED


@point("one handle has ended badly and its sibling may still land")
def sibling_ends_badly(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "ended" or not operation(world, state, move)[1] & ENDED_ERR:
        return False
    return any(flags & FLYING for i, (_, flags) in enumerate(world.ops_of(state)) if i != move[1])


@point("the lease ends while a WRITE whose handle has ended badly may still read")
def lease_ends_after_error(world: Relation, state: State, move: Move) -> bool:
    return lease_ends(world, state, move) and any(flags & TOLD for _, flags in operations(world, state, PostWrite))


@point("a second rank's CANCEL arrives while the first one's waits")
def second_cancel(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(world, state, move)) is not Cancel:
        return False
    return any(cell.askers for cell in world.body(state, "P.r0").cells.values())


@point("P is told that a WRITE has failed of which a part has landed")
def error_after_landing(world: Relation, state: State, move: Move) -> bool:
    return (
        move[0] == "ended" and error_heard(world, state, move) and operation(world, state, move)[1] >> PIECE + 3 & 7 > 0
    )


# Signals that are missing.


def error_heard(world: Relation, state: State, move: Move) -> bool:
    return bool(operation(world, state, move)[1] & ENDED_ERR) and stage(world, state) == Stage.ADMITTED


@point("P is told that a WRITE has failed for which D waits")
def write_fails(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "ended" and error_heard(world, state, move)


@point("P cannot reach a D that waits")
def p_cannot_reach_d(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "unreachable" and stage(world, state) == Stage.ADMITTED and of_p(world, state, move)


@point("a registration arrives after the lease")
def registration_after_lease(world: Relation, state: State, move: Move) -> bool:
    late = move[0] == "deliver" and released(world, state) and stage(world, state) == Stage.ADMITTED
    return late and type(frame(world, state, move)) is Register


@point("one rank's registration is lost")
def registration_lost(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "drop" and type(frame(world, state, move)) is Register


@point("one rank registers, and the other has not heard of the request yet")
def one_rank_lags(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "deliver" or type(frame(world, state, move)) is not Register:
        return False
    cluster = world.cluster
    return held(world, state) and any(state[world.first_link + cluster.link_of["D", rank]] for rank in cluster.d_ranks)


@point("the lagging rank is told that all has landed")
def completion_too_early(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "notice":
        return False
    to = operation(world, state, move)[0].to
    return bool(state[world.first_link + world.cluster.link_of["D", to]])


@point("the completion is lost")
def completion_lost(world: Relation, state: State, move: Move) -> bool:
    return bool(move[0] == "lose notice")


# Names, lives, outcomes.


@point("a registration arrives where two prompts have its base id")
def two_candidates(world: Relation, state: State, move: Move) -> bool:
    both = move[0] == "deliver" and held(world, state) and held(world, state, 1)
    return both and type(frame(world, state, move)) is Register


@point("a prompt is finished that a dead D has registered for")
def d_is_another(world: Relation, state: State, move: Move) -> bool:
    if move[0] != "finish" or not world.ghost_of(state).lives[1] or stage(world, state) != Stage.FREED:
        return False
    return any(cell.grants for cell in world.body(state, "P.r0").cells.values())


@point("P dies with a prompt that D waits for")
def p_dies(world: Relation, state: State, move: Move) -> bool:
    return move == ("restart", 0) and stage(world, state) == Stage.ADMITTED and held(world, state)


@point("the completion of an aborted request arrives")
def completion_after_abort(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "notice" and stage(world, state) == Stage.RESOLVED


@point("a younger prompt's lease ends before an older one's")
def second_lease_ends_first(world: Relation, state: State, move: Move) -> bool:
    if not lease_ends(world, state, move) or not held(world, state):
        return False
    return bool(world.armed[state[move[1]]][move[2]].key == world.cluster.xids[1])


@point("P is told that a WRITE has landed")
def write_ends_well(world: Relation, state: State, move: Move) -> bool:
    return move[0] == "ended" and bool(operation(world, state, move)[1] & ENDED_OK)

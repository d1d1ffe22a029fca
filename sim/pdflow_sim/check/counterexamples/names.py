"""Names of moves: words that a person can read, and that keep their meaning when states are numbered anew.

Within one state every name is the name of one move; two moves of one name would do the same, and the first is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from pdflow.protocol.events import FrameOrdered
from pdflow.protocol.ids import Op, Reg
from pdflow.protocol.messages import Heartbeat, Sync, SyncReply
from pdflow_sim.check.moves.acts import ON_TASK, Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.state.shadow_state import OPERATION_TASKS
from pdflow_sim.check.state.space import State, StateSpace


def name(world: Transitions, state: State, move: Move) -> str:
    """Return the name of a move, such as "deliver Register u0-d0000000 D.r0 -> P.r0"."""
    space, verb = world.space, move[0]
    cluster = space.cluster
    if verb == "room":
        return f"{verb} {cluster.engines[move[1]]}"
    if verb == "copied":
        return f"{verb} {(cluster.xids if move[1] else cluster.requests)[move[2]]}"
    if verb in ("begin", "finish", "abort prefill", "cancel prefill", "withdraw", "poison"):
        return f"{verb} {cluster.xids[move[1]]}"
    if verb in ("decode", "admit", "report", "hit", "load", "preempt", "end", "abort"):
        return f"{verb} {cluster.requests[move[1]]}"
    if verb in ("deliver", "drop", "delay", "duplicate", "corrupt", "check"):
        frame = space.chans.values[state[space.first_link + move[1]]][0]
        return f"{verb} {_frame(space, move[1], frame)}"
    if verb == "late":
        link, frame = space.bags.values[state[space.bag]][move[1]]
        return f"late {_frame(space, link, frame)}"
    if verb in ("lose", "evict"):
        return f"{verb} {_link(space, move[1])}"
    if verb in ("request", "disconnect"):
        return f"{verb} r{move[1]}"
    if verb == "crash router":
        return " ".join((verb, *(f"without {_link(space, link)}" for link in move[1])))
    if verb == "tick":
        return f"{verb} {'PD'[move[1]]}"
    if verb in ("restart", "kill", "start"):
        return f"{verb} {cluster.engines[move[1]]}"
    if verb == "kill rank":
        return f"{verb} {cluster.ranks[cluster.engines[move[1]]][move[2]]}"
    if verb == "outlive":
        return f"restart {cluster.engines[move[1]]}, its ranks survive"
    if verb == "timer":
        timer = space.armed[state[move[1]]][move[2]]
        return f"timer {timer.kind.name} {_key_text(timer.key)} at {cluster.nodes[move[1]]}"
    if verb in ON_TASK:
        kind, node, target = space.tasks_of(state)[move[1]]
        ends = f"{cluster.nodes[node]} -> {cluster.nodes[target]}" if kind not in OPERATION_TASKS else ""
        what = ends or _operation(space, target)
        return f"{kind if verb == 'task' else verb} {what}"
    op, flags = space.ops_of(state)[move[1]]
    pieces = world.components.operations.piece(state, flags, move) if verb in ("read", "land") else ""
    return f"{verb} {_operation(space, op)}{pieces}"


def find(world: Transitions, state: State, text: str) -> Move | None:
    """Return the move of this name; None if it is not possible now."""
    return next((move for move in world.moves(state) if name(world, state, move) == text), None)


def _link(space: StateSpace, link: int) -> str:
    sender, to = space.cluster.links[link]
    return f"{sender} -> {to}"


def _frame(space: StateSpace, link: int, frame: int) -> str:
    message = space.frames.values[frame]
    return f"{type(message).__name__} {subject(message)} {_link(space, link)}"


def _operation(space: StateSpace, op: int) -> str:
    node, restarts, effect = space.operations(op)
    again = f" of incarnation {restarts + 1}" if restarts else ""
    return f"{type(effect).__name__} {_key_text(effect.op)} by {node}{again}"


def subject(message: Any) -> str:
    """Return the subject of a frame, or of an event between endpoints, and its contents, as words."""
    if isinstance(message, Sync):
        interest = f" wanting {_list(message.interest)}" if message.interest else ""
        return f"#{message.seq} {_list(map(_key_text, message.open))}{interest}{_floor(message)}"
    if isinstance(message, SyncReply):
        return f"#{message.seq} {_list(f'{_key_text(item.reg)} {_verdicts(item)}' for item in message.items)}"
    if isinstance(message, Heartbeat):
        return _list(message.request_ids)
    if isinstance(message, FrameOrdered):
        return f"{type(message.message).__name__} {subject(message.message)}"
    for field in ("reg", "op", "request_id", "xid", "peer", "engine"):
        value = getattr(message, field, None)
        if value is not None:
            return f"{_key_text(value)} {_verdicts(message)}".rstrip() + _floor(message)
    return ""


def _floor(message: Any) -> str:
    """Return the floor of a message if it has risen: two frames may differ by nothing else."""
    floor = getattr(message, "floor", 1)
    return f" floor {floor}" if floor > 1 else ""


def _list(items: Iterable[str]) -> str:
    """Join items, sorted: the order in which D met them is no part of a state."""
    return ", ".join(sorted(items)) or "nothing"


def _verdicts(message: Any) -> str:
    """Return the verdicts in a message, as words."""
    values = (getattr(message, field) for field in type(message).__struct_fields__)
    terms = [value.name for value in values if isinstance(value, IntEnum)]
    return " ".join([*terms, "flushed"] if getattr(message, "flushed", False) else terms)


def _key_text(key: Any) -> str:
    if isinstance(key, Op):
        return f"{_key_text(key.reg)} r{key.p_rank}->r{key.d_rank}"
    if isinstance(key, Reg):
        return key.request_id
    return str(key)

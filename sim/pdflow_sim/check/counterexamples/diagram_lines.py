"""The lines of a diagram: their styles, and the line that a move, an event or an effect becomes.

A frame is two lines: from its sender into the wire when it is sent, and out of the wire when it arrives, is lost, or
arrives once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import attrs

from pdflow.protocol.consumer.cell import ConsumerCell
from pdflow.protocol.effects import (
    AnswerPrefill,
    BumpWord,
    Commit,
    Enqueue,
    Fence,
    Flush,
    FreeBlocks,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    Quarantine,
    ReadWord,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
    StopWrite,
)
from pdflow.protocol.events import DecodeAdmitted, PrefillBegun, PrefillFinished, PrefillLegEnded, PrefillQueued
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.cell import ProducerCell
from pdflow.protocol.values import Address, Allocation
from pdflow.routing.effects import (
    AbortLeg,
    AskEngine,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineLeft,
    EngineSilent,
    EngineWatched,
    Reply,
    ReportPrefill,
    RequestHangs,
    ResumeAnswer,
)
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.races.owners import WRITER
from pdflow_sim.check.state.cluster import role_of
from pdflow_sim.check.state.space import State

CLIENT, ROUTER, WIRE = "client", "router", "wire"


class Style(Enum):
    """The meaning of a line."""

    CALL = "call"
    """Within an engine, or between it and the router or a client."""
    SENT = "sent"
    """A frame, or a request to the transport, into the wire or out of it."""
    LOST = "lost"
    """A frame or an operation that does not arrive."""
    BYTES = "bytes"
    """A one-sided operation: asked for, its source read, landing."""
    NOTE = "note"
    """A timer, a fault, or an action of the engine at this lifeline."""
    PHASE = "phase"
    BLOCKS = "blocks"
    IGNORED = "ignored"
    BROKEN = "broken"


@attrs.frozen
class Line:
    style: Style
    at: str
    text: str
    to: str | None = None
    """The other end of an arrow, or the last lifeline of a note that is over several."""
    number: int | None = None
    """Number of the step that begins with this line."""

    @property
    def arrow(self) -> bool:
        return self.to is not None and self.style in (Style.CALL, Style.SENT, Style.LOST, Style.BYTES)


def last_lifeline(world: Transitions) -> str:
    return world.space.cluster.ds[-1].engine


def ends(world: Transitions, state: State, i: int) -> tuple[Address, Address, Address]:
    """Return, for an operation, the rank that posted it, the rank whose memory it reads, and the one where it lands."""
    node, _, effect = world.space.operations(world.space.ops_of(state)[i][0])
    return (node, node, effect.to) if isinstance(effect, PostWrite) else (node, effect.source, node)


Shape = tuple[Style, str, str | None]
"""The first line of a move: its style, its lifeline, and the other end of its arrow."""


def _of_link(style: Style) -> Callable[[Transitions, State, Move], Shape]:
    """Return the shape of a frame that leaves the wire. A frame that lags within an engine was on no wire."""

    def shape(world: Transitions, state: State, move: Move) -> Shape:
        link = world.space.bags.values[state[world.space.bag]][move[1]][0] if move[0] == "late" else move[1]
        to = world.space.cluster.links[link][1]
        return (style, WIRE, to) if link < world.space.cluster.between_engines else (Style.NOTE, to, None)

    return shape


def _of_task(style: Style) -> Callable[[Transitions, State, Move], Shape]:
    """Return the shape of an answer of the transport."""
    return lambda world, state, move: (style, WIRE, world.space.cluster.nodes[world.space.tasks_of(state)[move[1]][1]])


def somewhere(world: Transitions, state: State, move: Move) -> Shape:
    return Style.NOTE, CLIENT, last_lifeline(world)


def _restart(world: Transitions, state: State, move: Move) -> Shape:
    name = world.space.cluster.engines[move[1]]
    ranks = world.space.cluster.ranks[name]
    return (Style.NOTE, name, ranks[-1]) if role_of(name) == "P" else (Style.NOTE, ranks[0], name)


def _at_rank(world: Transitions, state: State, move: Move) -> Shape:
    cluster = world.space.cluster
    return Style.NOTE, cluster.ranks[cluster.engines[move[1]]][move[2]], None


def _at_p(world: Transitions, state: State, move: Move) -> Shape:
    return Style.NOTE, world.space.cluster.p_of[move[1]].engine, None


def _at_d(world: Transitions, state: State, move: Move) -> Shape:
    return Style.NOTE, world.space.cluster.d_of[move[1]].engine, None


def _to_d(sender: str) -> Callable[[Transitions, State, Move], Shape]:
    return lambda world, state, move: (Style.CALL, sender, world.space.cluster.d_of[move[1]].engine)


def _land(world: Transitions, state: State, move: Move) -> Shape:
    """Return the shape of a landing. A whole operation is read and lands in one move; in pieces, reading is another."""
    _, source, target = ends(world, state, move[1])
    return Style.BYTES, WIRE if world.components.operations.split else source, target


def _notification(style: Style) -> Callable[[Transitions, State, Move], Shape]:
    """Return the shape of a notification: behind a WRITE's bytes to where they land; of a READ, to the rank that was
    read from."""

    def shape(world: Transitions, state: State, move: Move) -> Shape:
        node, source, target = ends(world, state, move[1])
        return style, WIRE, target if node == source else source

    return shape


MOVES: dict[str, Callable[[Transitions, State, Move], Shape]] = {
    "request": lambda world, state, move: (Style.CALL, CLIENT, ROUTER),
    "disconnect": lambda world, state, move: (Style.CALL, CLIENT, ROUTER),
    "crash router": lambda world, state, move: (Style.NOTE, ROUTER, None),
    "room": lambda world, state, move: (Style.NOTE, world.space.cluster.engines[move[1]], None),
    "copied": lambda world, state, move: (_at_p if move[1] else _at_d)(world, state, move[1:]),
    "begin": _at_p,
    "finish": _at_p,
    "withdraw": _at_p,
    "load": _at_d,
    "abort prefill": _at_p,
    "cancel prefill": _at_p,
    "decode": _to_d(ROUTER),
    "admit": _at_d,
    "hit": _at_d,
    "report": _at_d,
    "preempt": _at_d,
    "end": _at_d,
    "abort": _to_d(CLIENT),
    "poison": lambda world, state, move: (Style.SENT, WIRE, WRITER),
    "check": lambda world, state, move: (Style.NOTE, WRITER, None),
    "evict": lambda world, state, move: (Style.NOTE, WRITER, None),
    "deliver": _of_link(Style.SENT),
    "drop": _of_link(Style.LOST),
    "delay": lambda world, state, move: (Style.NOTE, WIRE, None),
    "duplicate": lambda world, state, move: (Style.NOTE, WIRE, None),
    "corrupt": _of_link(Style.LOST),
    "late": _of_link(Style.SENT),
    "task": _of_task(Style.SENT),
    "unreachable": _of_task(Style.LOST),
    "refused": _of_task(Style.LOST),
    "falsely refused": _of_task(Style.LOST),
    "second": _of_task(Style.SENT),
    "flush fails": _of_task(Style.LOST),
    "flush refused": _of_task(Style.LOST),
    "lose": lambda world, state, move: (Style.NOTE, world.space.cluster.links[move[1]][0], None),
    "restart": _restart,
    "outlive": _restart,
    "kill": _restart,
    "kill rank": _at_rank,
    "start": _restart,
    "read": lambda world, state, move: (Style.BYTES, ends(world, state, move[1])[1], WIRE),
    "land": _land,
    "error": lambda world, state, move: (Style.NOTE, WIRE, None),
    "notice": _notification(Style.SENT),
    "lose notice": _notification(Style.LOST),
    "ended": lambda world, state, move: (Style.SENT, WIRE, ends(world, state, move[1])[0]),
    "timer": lambda world, state, move: (Style.NOTE, world.space.cluster.nodes[move[1]], None),
}


# What an endpoint does.


def named(message: Any) -> str:
    return f"{type(message).__name__} {names.subject(message)}".rstrip()


def _held(owner: str, allocation: Allocation) -> str:
    return f"{owner}: generation {allocation.generation} in blocks {', '.join(map(str, allocation.blocks))}"


def _generation(allocation: Allocation) -> str:
    return f"generation {allocation.generation}"


def _why(code: Code) -> str:
    return "" if code is Code.NONE else f", {code.name}"


DiagramLine = tuple[Any, ...]
"""Style, lifeline, text, and the other end if it is an arrow."""


def something(node: Address, effect: Any) -> DiagramLine:
    return Style.NOTE, node, named(effect)


EVENTS: dict[type, Callable[[Address, Any], DiagramLine]] = {
    PrefillQueued: lambda node, event: (Style.CALL, ROUTER, f"prefill {event.xid}", node),
    PrefillLegEnded: lambda node, event: (
        Style.CALL,
        ROUTER,
        f"prefill leg of {event.request_id} {'completed' if event.ok else 'failed'}",
        node,
    ),
    PrefillBegun: lambda node, event: (Style.BLOCKS, node, _held(event.xid, event.allocation)),
    PrefillFinished: lambda node, event: (Style.BLOCKS, node, _held(event.xid, event.allocation)),
    DecodeAdmitted: lambda node, event: (Style.BLOCKS, node, _held(event.request_id, event.allocation)),
}
"""Lines of events that show more than the move that led to them."""
OF_ROUTER = frozenset({PrefillQueued, PrefillLegEnded})
"""Events that need no line where the router's endpoint is in the world: its effects have one."""


def _posted(verb: str, source: str, effect: PostWrite | PostRead) -> str:
    op = effect.op
    where = f"{source} -> {_generation(effect.registration.target)}"
    return f"{verb} {op.reg.request_id} r{op.p_rank}->r{op.d_rank}, {where}"


EFFECTS: dict[type, Callable[[Address, Any], DiagramLine]] = {
    SendLocal: lambda node, effect: (Style.CALL, node, named(effect.event), effect.to),
    Send: lambda node, effect: (Style.SENT, node, f"{named(effect.message)} to {effect.to}", WIRE),
    Handshake: lambda node, effect: (Style.SENT, node, f"handshake with {effect.peer}", WIRE),
    Flush: lambda node, effect: (Style.SENT, node, f"flush to {effect.peer}", WIRE),
    Fence: lambda node, effect: (Style.SENT, node, f"fence {effect.peer}", WIRE),
    PostWrite: lambda node, effect: (
        Style.BYTES,
        node,
        _posted("WRITE", _generation(effect.source), effect),
        WIRE,
    ),
    StopWrite: lambda node, effect: (Style.SENT, node, f"stop WRITE {effect.op.reg.request_id}", WIRE),
    PostRead: lambda node, effect: (Style.BYTES, node, _posted("READ", effect.source, effect), WIRE),
    ReadWord: lambda node, effect: (Style.BYTES, node, f"READ lease word of {effect.source}", WIRE),
    BumpWord: lambda node, effect: (Style.BLOCKS, node, "lease word changed"),
    AnswerPrefill: lambda node, effect: (Style.CALL, node, f"prefill {effect.params.xid} answered", ROUTER),
    ReleaseBlocks: lambda node, effect: (
        Style.BLOCKS,
        node,
        f"{_generation(effect.allocation)} of {effect.xid} released{_why(effect.code)}",
    ),
    Enqueue: lambda node, effect: (Style.NOTE, node, f"{effect.request_id} enters the engine's queue"),
    Commit: lambda node, effect: (Style.BLOCKS, node, f"{effect.request_id} committed: its KV is visible"),
    Resolve: lambda node, effect: (
        Style.CALL,
        node,
        f"{effect.request_id} resolved: {effect.outcome.name}{_why(effect.code)}",
        ROUTER,
    ),
    Quarantine: lambda node, effect: (Style.BLOCKS, node, f"{_generation(effect.allocation)} in quarantine"),
    FreeBlocks: lambda node, effect: (Style.BLOCKS, node, f"{_generation(effect.allocation)} freed"),
    Note: lambda node, effect: (Style.IGNORED, node, effect.name),
    DispatchPrefill: lambda node, effect: (Style.CALL, node, f"dispatch prefill {effect.xid}", "P"),
    DispatchDecode: lambda node, effect: (Style.CALL, node, f"dispatch decode {effect.request_id}", "D"),
    DispatchAlone: lambda node, effect: (Style.CALL, node, f"decode {effect.request_id} without a prefill leg", "D"),
    ResumeAnswer: lambda node, effect: (Style.NOTE, node, f"{effect.request_id} continues the answer"),
    EngineLeft: lambda node, effect: (Style.NOTE, node, f"{effect.engine} has no requests left"),
    EngineSilent: lambda node, effect: (Style.NOTE, node, f"{effect.engine} is silent"),
    EngineWatched: lambda node, effect: (Style.NOTE, node, f"{effect.engine}: {effect.state}"),
    RequestHangs: lambda node, effect: (Style.NOTE, node, f"{effect.request_id} hangs at {effect.engine}"),
    AskEngine: lambda node, effect: (Style.NOTE, node, f"asks whether {effect.engine} responds"),
    AbortLeg: lambda node, effect: (
        Style.CALL,
        node,
        f"abort {effect.role} {effect.request_id}",
        "P" if effect.role == "prefill" else "D",
    ),
    ReportPrefill: lambda node, effect: (
        Style.CALL,
        node,
        f"prefill leg of {effect.request_id} {'completed' if effect.ok else 'failed'}",
        "D",
    ),
    Reply: lambda node, effect: (Style.CALL, node, f"r{effect.request} {effect.outcome}{_why(effect.code)}", CLIENT),
}


def phases(before: Any, after: Any) -> Iterator[str]:
    """Yield the changes of phase of cells, as text. A cell of P may change its key, from its xid to its
    registration."""
    old, new = (dict(getattr(body, "cells", {})) for body in (before, after))
    gone = {key: old[key] for key in old if key not in new}
    for key, cell in new.items():
        was = old.get(key)
        if was is None:
            moved = next((k for k, c in gone.items() if _product(c) == _product(cell)), None)
            was = None if moved is None else gone.pop(moved)
        if was is None or was.phase is not cell.phase:
            yield f"{_cell(cell)}: {f'{was.phase.name} -> ' if was else ''}{cell.phase.name}"
    for cell in gone.values():
        yield f"{_cell(cell)}: {cell.phase.name} -> GONE"


def _product(cell: Any) -> str:
    """Return the xid of a cell of P, which stays the same while its key changes; "" for other cells."""
    return cell.xid if isinstance(cell, ProducerCell) else ""


def _cell(cell: ProducerCell | ConsumerCell) -> str:
    if isinstance(cell, ConsumerCell):
        return cell.request_id
    return cell.xid if cell.reg is None else f"{cell.xid} for {cell.reg.request_id}".removeprefix(" for ")

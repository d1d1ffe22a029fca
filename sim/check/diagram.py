"""What a story's diagram shows: lifelines, and line by line what passed between them or changed at one.

Collected while the story is told again, from the turns of the world: the move itself, then what every endpoint did in
it. How it is drawn is diagram_text.py's and diagram_mermaid.py's. A frame is two lines: from its sender into the wire
when it is sent, and out of the wire when it arrives, is lost, or arrives once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import attrs

from pdflow.protocol.consumer import ConsumerCell
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
    StopWrite,
    Tell,
)
from pdflow.protocol.events import DecodeAdmitted, PrefillBegun, PrefillFinished, PrefillLegEnded, PrefillQueued
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Code
from pdflow.protocol.producer import ProducerCell
from pdflow.protocol.values import Address, Allocation
from pdflow.routing.effects import (
    AbortLeg,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineLeft,
    EngineSilent,
    Reply,
    ReportPrefill,
)
from sim.check import names
from sim.check.cluster import role_of
from sim.check.ghost import Broken
from sim.check.judge import Judge
from sim.check.live import settle
from sim.check.races.owners import WORLDS, WRITER, Raising
from sim.check.relation import Move, Relation
from sim.check.replay import walk
from sim.check.scope import Scope
from sim.check.story import StoryFile
from sim.check.timed import kind
from sim.check.world import HEARD, State

CLIENT, ROUTER, WIRE = "client", "router", "wire"


class Style(Enum):
    """What a line means."""

    TOLD = "told"
    """Within an engine, or between it and the router or a client."""
    SENT = "sent"
    """A frame, or what is asked of the transport, into the wire or out of it."""
    LOST = "lost"
    """It does not arrive."""
    BYTES = "bytes"
    """A one-sided operation: asked for, its source read, landing."""
    NOTE = "note"
    """Something happens here: a timer, a fault, an order of the engine."""
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
    """Of the step that begins with this line."""

    @property
    def arrow(self) -> bool:
        return self.to is not None and self.style in (Style.TOLD, Style.SENT, Style.LOST, Style.BYTES)


@attrs.frozen
class Diagram:
    title: str
    prefill: tuple[str, ...]
    """Lifelines of the prefill engines, and of the decode engines."""
    decode: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def lifelines(self) -> tuple[str, ...]:
        return (CLIENT, ROUTER, *self.prefill, WIRE, *self.decode)


def collect(story: StoryFile) -> Diagram:
    """Tell it again, leniently. The story's mutant must be in place."""
    recorder = recorder_of(story)
    state = recorder.start()
    for stride in walk(recorder, story.moves, state):
        if stride.move is None:
            recorder.skip(stride.name)
        elif stride.broken is not None:
            recorder.say(Style.BROKEN, recorder.judge.node, str(stride.broken))
        elif stride.after is not None:
            state = stride.after
    lines = tuple(recorder.lines)
    if not lines or lines[-1].style is not Style.BROKEN:
        try:
            settle(recorder, state)
        except Broken as broken:
            lines += (Line(Style.BROKEN, CLIENT, str(broken), recorder.last),)
    cluster = recorder.cluster
    prefill = [node for p in cluster.ps for node in (p.engine, *cluster.ranks[p.engine])]
    decode = tuple(node for d in cluster.ds for node in (*cluster.ranks[d.engine], d.engine))
    return Diagram(_title(story), (*prefill, *cluster.orphans), decode, lines)


def _title(story: StoryFile) -> str:
    scope = story.scope
    parts = [f"{scope.dialect.name} {'pull' if scope.pulls else 'push'}, TP {scope.p_tp} to {scope.d_tp}"]
    parts += [scope.method] if scope.method else []
    parts += [f"mutant {story.mutant}"] if story.mutant else []
    parts += [story.information.note] if story.information.note else []
    return "; ".join(parts)


class Witness(Judge):
    """A judge who remembers at whom it looked last."""

    node: Address = CLIENT

    def judge(self, draft: Any, node: Address, effect: Any, event: Any) -> None:
        self.node = node
        super().judge(draft, node, effect, event)


class Recorder(Relation):
    """A relation that writes down what each move does. It remembers no turn: one that is not run cannot be seen."""

    judge: Witness

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.judge = type("Witness", (Witness, self.judge_type), {})(self.cluster)
        self.lines: list[Line] = []
        self.number = 0
        self.last = self.cluster.ds[-1].engine
        """The last lifeline."""

    def say(self, style: Style, at: str, text: str, to: str | None = None, number: int | None = None) -> None:
        self.lines.append(Line(style, at, text, to, number))

    def skip(self, name: str) -> None:
        self.number += 1
        self.say(Style.IGNORED, CLIENT, f"skipped, it is not possible: {name}", self.last, self.number)

    def start(self) -> State:
        for request_id in () if self.scope.attempts else self.cluster.requests:
            self.say(Style.TOLD, CLIENT, f"request {request_id}", ROUTER)
        return super().start()

    def apply(self, state: State, move: Move) -> State:
        self.number += 1
        style, at, to = _MOVES.get(move[0], _somewhere)(self, state, move)
        self.say(style, at, names.name(self, state, move), to, self.number)
        for link in self._cut(state, move):
            for frame in self.chans.values[state[self.first_link + link]]:
                self.say(Style.LOST, WIRE, _named(self.frames.values[frame]), self.cluster.links[link][1])
        return super().apply(state, move)

    def _cut(self, state: State, move: Move) -> list[int]:
        """Links between the engines on which everything is lost."""
        if move[0] == "lose":
            return [move[1]]
        if move[0] in ("restart", "outlive"):
            name = self.cluster.engines[move[1]]
            between = self.cluster.links[: self.cluster.between_engines]
            return [link for link, ends in enumerate(between) if name in map(engine_of, ends)]
        return self.lost_by(state, move) if isinstance(self, Raising) else []

    def turn(self, draft: list[int], node: int, event: int) -> int:
        self.turns.clear()
        self.judged.clear()
        return super().turn(draft, node, event)

    def _step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        at, what = self.events.values[event]
        node = self.cluster.nodes[at]
        after, effects = super()._step(end, event)
        if type(what) in _EVENTS and not (self.scope.attempts and type(what) in _OF_ROUTER):
            self.say(*_EVENTS[type(what)](node, what))
        for text in _phases(self.bodies[end], self.bodies[after]):
            self.say(Style.PHASE, node, text)
        for effect in effects:
            style, at, words, *to = _EFFECTS.get(type(effect), _something)(node, effect)
            if node in self.cluster.orphans and type(effect) in HEARD:
                style, to = Style.LOST, [WIRE]
            self.say(style, at, words, *to)
        return after, effects

    def ends(self, state: State, i: int) -> tuple[Address, Address, Address]:
        """Of an operation: who posted it, whose memory it reads, where it lands."""
        node, _, effect = self.operations(self.ops_of(state)[i][0])
        return (node, node, effect.to) if isinstance(effect, PostWrite) else (node, effect.source, node)


def recorder_of(story: StoryFile) -> Recorder:
    """One that records the story's own world."""
    own = WORLDS[story.own_world] if story.own_world else kind(story.scope)
    recorder: Recorder = type("Recorder", (Recorder, own), {})(story.scope)
    return recorder


Shape = tuple[Style, str, str | None]
"""How a move's first line is drawn: at whom, and to whom."""


def _of_link(style: Style) -> Callable[[Recorder, State, Move], Shape]:
    """A frame that leaves the wire. What lags within an engine was on no wire."""

    def shape(world: Recorder, state: State, move: Move) -> Shape:
        link = world.bags.values[state[world.bag]][move[1]][0] if move[0] == "late" else move[1]
        to = world.cluster.links[link][1]
        return (style, WIRE, to) if link < world.cluster.between_engines else (Style.NOTE, to, None)

    return shape


def _of_task(style: Style) -> Callable[[Recorder, State, Move], Shape]:
    """The transport's answer."""
    return lambda world, state, move: (style, WIRE, world.cluster.nodes[world.tasks_of(state)[move[1]][1]])


def _somewhere(world: Recorder, state: State, move: Move) -> Shape:
    return Style.NOTE, CLIENT, world.last


def _restart(world: Recorder, state: State, move: Move) -> Shape:
    name = world.cluster.engines[move[1]]
    ranks = world.cluster.ranks[name]
    return (Style.NOTE, name, ranks[-1]) if role_of(name) == "P" else (Style.NOTE, ranks[0], name)


def _at_p(world: Recorder, state: State, move: Move) -> Shape:
    return Style.NOTE, world.cluster.p_of[move[1]].engine, None


def _at_d(world: Recorder, state: State, move: Move) -> Shape:
    return Style.NOTE, world.cluster.d_of[move[1]].engine, None


def _to_d(sender: str) -> Callable[[Recorder, State, Move], Shape]:
    return lambda world, state, move: (Style.TOLD, sender, world.cluster.d_of[move[1]].engine)


def _land(world: Recorder, state: State, move: Move) -> Shape:
    """All at once, its source is read and it lands; in pieces, reading is a move of its own."""
    _, source, target = world.ends(state, move[1])
    return Style.BYTES, WIRE if world.split else source, target


def _notice(style: Style) -> Callable[[Recorder, State, Move], Shape]:
    """Behind a WRITE's bytes to where they land; of a READ, to whose memory was read."""

    def shape(world: Recorder, state: State, move: Move) -> Shape:
        node, source, target = world.ends(state, move[1])
        return style, WIRE, target if node == source else source

    return shape


_MOVES: dict[str, Callable[[Recorder, State, Move], Shape]] = {
    "request": lambda world, state, move: (Style.TOLD, CLIENT, ROUTER),
    "hang up": lambda world, state, move: (Style.TOLD, CLIENT, ROUTER),
    "room": lambda world, state, move: (Style.NOTE, world.cluster.engines[move[1]], None),
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
    "late": _of_link(Style.SENT),
    "task": _of_task(Style.SENT),
    "unreachable": _of_task(Style.LOST),
    "flush fails": _of_task(Style.LOST),
    "lose": lambda world, state, move: (Style.NOTE, world.cluster.links[move[1]][0], None),
    "restart": _restart,
    "outlive": _restart,
    "read": lambda world, state, move: (Style.BYTES, world.ends(state, move[1])[1], WIRE),
    "land": _land,
    "error": lambda world, state, move: (Style.NOTE, WIRE, None),
    "notice": _notice(Style.SENT),
    "lose notice": _notice(Style.LOST),
    "ended": lambda world, state, move: (Style.SENT, WIRE, world.ends(state, move[1])[0]),
    "timer": lambda world, state, move: (Style.NOTE, world.cluster.nodes[move[1]], None),
}


# What an endpoint does.


def _named(message: Any) -> str:
    return f"{type(message).__name__} {names.subject(message)}".rstrip()


def _held(owner: str, allocation: Allocation) -> str:
    return f"{owner}: generation {allocation.generation} in blocks {', '.join(map(str, allocation.blocks))}"


def _generation(allocation: Allocation) -> str:
    return f"generation {allocation.generation}"


def _why(code: Code) -> str:
    return "" if code is Code.NONE else f", {code.name}"


Said = tuple[Any, ...]
"""What Recorder.say takes."""


def _something(node: Address, effect: Any) -> Said:
    return Style.NOTE, node, _named(effect)


_EVENTS: dict[type, Callable[[Address, Any], Said]] = {
    PrefillQueued: lambda node, event: (Style.TOLD, ROUTER, f"prefill {event.xid}", node),
    PrefillLegEnded: lambda node, event: (
        Style.TOLD,
        ROUTER,
        f"prefill leg of {event.request_id} ended {'well' if event.ok else 'badly'}",
        node,
    ),
    PrefillBegun: lambda node, event: (Style.BLOCKS, node, _held(event.xid, event.allocation)),
    PrefillFinished: lambda node, event: (Style.BLOCKS, node, _held(event.xid, event.allocation)),
    DecodeAdmitted: lambda node, event: (Style.BLOCKS, node, _held(event.request_id, event.allocation)),
}
"""Events that say more than the move that led to them."""
_OF_ROUTER = frozenset({PrefillQueued, PrefillLegEnded})
"""Where the router's endpoint is in the world, its own effects have said so."""


def _posted(word: str, source: str, effect: PostWrite | PostRead) -> str:
    op = effect.op
    where = f"{source} -> {_generation(effect.grant.target)}"
    return f"{word} {op.reg.request_id} r{op.p_rank}->r{op.d_rank}, {where}"


_EFFECTS: dict[type, Callable[[Address, Any], Said]] = {
    Tell: lambda node, effect: (Style.TOLD, node, _named(effect.event), effect.to),
    Send: lambda node, effect: (Style.SENT, node, f"{_named(effect.message)} to {effect.to}", WIRE),
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
    BumpWord: lambda node, effect: (Style.BLOCKS, node, "lease word bumped"),
    AnswerPrefill: lambda node, effect: (Style.TOLD, node, f"prefill {effect.params.xid} answered", ROUTER),
    ReleaseBlocks: lambda node, effect: (
        Style.BLOCKS,
        node,
        f"{_generation(effect.allocation)} of {effect.xid} released{_why(effect.code)}",
    ),
    Enqueue: lambda node, effect: (Style.NOTE, node, f"{effect.request_id} is let into the engine's queue"),
    Commit: lambda node, effect: (Style.BLOCKS, node, f"{effect.request_id} committed: its KV is visible"),
    Resolve: lambda node, effect: (
        Style.TOLD,
        node,
        f"{effect.request_id} resolved: {effect.outcome.name}{_why(effect.code)}",
        ROUTER,
    ),
    Quarantine: lambda node, effect: (Style.BLOCKS, node, f"{_generation(effect.allocation)} in quarantine"),
    FreeBlocks: lambda node, effect: (Style.BLOCKS, node, f"{_generation(effect.allocation)} freed"),
    Note: lambda node, effect: (Style.IGNORED, node, effect.name),
    DispatchPrefill: lambda node, effect: (Style.TOLD, node, f"dispatch prefill {effect.xid}", "P"),
    DispatchDecode: lambda node, effect: (Style.TOLD, node, f"dispatch decode {effect.request_id}", "D"),
    DispatchAlone: lambda node, effect: (Style.TOLD, node, f"decode {effect.request_id} without a prefill leg", "D"),
    EngineLeft: lambda node, effect: (Style.NOTE, node, f"nothing is left at {effect.engine}"),
    EngineSilent: lambda node, effect: (Style.NOTE, node, f"{effect.engine} has fallen silent"),
    AbortLeg: lambda node, effect: (
        Style.TOLD,
        node,
        f"abort {effect.role} {effect.request_id}",
        "P" if effect.role == "prefill" else "D",
    ),
    ReportPrefill: lambda node, effect: (
        Style.TOLD,
        node,
        f"prefill leg of {effect.request_id} ended {'well' if effect.ok else 'badly'}",
        "D",
    ),
    Reply: lambda node, effect: (Style.TOLD, node, f"r{effect.request} {effect.outcome}{_why(effect.code)}", CLIENT),
}


def _phases(before: Any, after: Any) -> Iterator[str]:
    """Which cells changed their phase. A cell of P may change its key, from its xid to its registration."""
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
    """What stays the same in a cell of P while it changes its key."""
    return cell.xid if isinstance(cell, ProducerCell) else ""


def _cell(cell: ProducerCell | ConsumerCell) -> str:
    if isinstance(cell, ConsumerCell):
        return cell.request_id
    return cell.xid if cell.reg is None else f"{cell.xid} for {cell.reg.request_id}".removeprefix(" for ")

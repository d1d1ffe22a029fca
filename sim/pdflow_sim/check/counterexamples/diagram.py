"""Diagrams of counterexamples: lifelines, and line by line what passed between them or changed at one.

A diagram is collected while the counterexample is replayed, from the turns of the world: the move itself, then what
every endpoint did in it. diagram_lines.py decides what a line is, diagram_text.py and diagram_mermaid.py draw it.
"""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.protocol.values import Address
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile
from pdflow_sim.check.counterexamples.diagram_lines import (
    CLIENT,
    EFFECTS,
    EVENTS,
    MOVES,
    OF_ROUTER,
    ROUTER,
    WIRE,
    Line,
    Style,
    last_lifeline,
    named,
    phases,
    something,
    somewhere,
)
from pdflow_sim.check.counterexamples.replay import walk
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.search.liveness import settle
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State
from pdflow_sim.check.state.turns import SENDING_EFFECTS


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


def collect(counterexample: CounterexampleFile) -> Diagram:
    """Replay a counterexample leniently and return its diagram. Its mutant must be in place."""
    recorder = DiagramRecorder(counterexample.world())
    state = recorder.start()
    for stride in walk(recorder, counterexample.moves, state):
        if stride.move is None:
            recorder.skip(stride.name)
        elif stride.broken is not None:
            recorder.add_line(Style.BROKEN, recorder.checked_node, str(stride.broken))
        elif stride.after is not None:
            state = stride.after
    lines = tuple(recorder.lines)
    if not lines or lines[-1].style is not Style.BROKEN:
        try:
            settle(recorder, state)
        except Broken as broken:
            lines += (Line(Style.BROKEN, CLIENT, str(broken), recorder.last),)
    cluster = recorder.space.cluster
    prefill = [node for p in cluster.ps for node in (p.engine, *cluster.ranks[p.engine])]
    decode = tuple(node for d in cluster.ds for node in (*cluster.ranks[d.engine], d.engine))
    return Diagram(_title(counterexample), (*prefill, *cluster.orphans, *cluster.seconds), decode, lines)


def _title(counterexample: CounterexampleFile) -> str:
    scope = counterexample.scope
    labels = [f"{scope.dialect.name} {'pull' if scope.pulls else 'push'}, TP {scope.p_tp} to {scope.d_tp}"]
    labels += [scope.method] if scope.method else []
    labels += [f"mutant {counterexample.mutant}"] if counterexample.mutant else []
    labels += [counterexample.information.note] if counterexample.information.note else []
    return "; ".join(labels)


class DiagramRecorder:
    """A relation that records what each move does. It caches no turn: one that is not run cannot be observed."""

    def __init__(self, world: Relation) -> None:
        self.world = world
        self.components, self.space, self.turns = world.components, world.space, world.turns
        self.turns.observer = self
        self.lines: list[Line] = []
        self.number = 0
        self.last = last_lifeline(world)
        self.checked_node: Address = CLIENT
        """The endpoint that the invariant checker has looked at last."""

    def add_line(self, style: Style, at: str, text: str, to: str | None = None, number: int | None = None) -> None:
        self.lines.append(Line(style, at, text, to, number))

    def skip(self, name: str) -> None:
        self.number += 1
        self.add_line(Style.IGNORED, CLIENT, f"skipped, not possible: {name}", self.last, self.number)

    def start(self) -> State:
        for request_id in () if self.space.scope.attempts else self.space.cluster.requests:
            self.add_line(Style.CALL, CLIENT, f"request {request_id}", ROUTER)
        return self.turns.start()

    def moves(self, state: State) -> list[Move]:
        return self.world.moves(state)

    def apply(self, state: State, move: Move) -> State:
        self.number += 1
        style, at, to = MOVES.get(move[0], somewhere)(self.world, state, move)
        self.add_line(style, at, names.name(self.world, state, move), to, self.number)
        space, lost_by = self.space, self.components.lost_by.get(move[0])
        for link in () if lost_by is None else lost_by(state, move):
            for frame in space.chans.values[state[space.first_link + link]]:
                self.add_line(Style.LOST, WIRE, named(space.frames.values[frame]), space.cluster.links[link][1])
        return self.world.apply(state, move)

    def checking(self, node: Address) -> None:
        self.checked_node = node

    def stepped(self, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
        if type(event) in EVENTS and not (self.space.scope.attempts and type(event) in OF_ROUTER):
            self.add_line(*EVENTS[type(event)](node, event))
        for text in phases(before, after):
            self.add_line(Style.PHASE, node, text)
        for effect in effects:
            style, at, text, *to = EFFECTS.get(type(effect), something)(node, effect)
            if node in self.space.cluster.orphans and type(effect) in SENDING_EFFECTS:
                style, to = Style.LOST, [WIRE]
            self.add_line(style, at, text, *to)

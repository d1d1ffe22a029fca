"""The same world with clocks: timers fire when they are due, and no sooner.

Untimed, any armed timer may fire at any moment, which is more than any clock does; whatever holds there needs no clock.
Some rules rest on clocks all the same: that D frees a quarantine when a correctly running P can no longer write
(vllm-compat, PROTOCOL 7.2), and that everything ends within a bounded time (L1 to L3). Here each engine has a clock of
its own, in ticks; one may be ahead of the other by `skew`, and both stop at `horizon`. Between two ticks anything may
happen in any order; a tick waits for frames on their way, for timers that are due, and for an operation that would
otherwise outlast the transport's bound. What is later than that, a fault has to delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pdflow.protocol.events import TimerFired
from pdflow.protocol.ids import engine_of
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Address, Instant
from sim.check.cluster import TRANSPORT_TICKS
from sim.check.ghost import ENDED_ERR, FLYING, POSTED, TOLD, Product, Stage
from sim.check.relation import Move, Relation
from sim.check.scope import Scope
from sim.check.world import Draft, State


class Stamped(NamedTuple):
    """An event, and the clock of the engine that it comes to."""

    event: Any
    now: Instant


class Timed(Relation):
    """A Relation whose engines have clocks: two more slots of every state."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.clocks = self.budget + 1
        self.do["tick"] = self.tick

    def beginning(self) -> State:
        return (*super().beginning(), 0, 0)

    # Events know their instant.

    def turn(self, draft: Draft, node: int, event: int) -> None:
        at, what = self.events.values[event]
        stamped = Stamped(what, self.now(draft, self.cluster.nodes[at]))
        super().turn(draft, node, self.events.of((at, stamped)))

    def now(self, state: State | Draft, node: Address) -> Instant:
        return state[self.clocks + (engine_of(node) != "P")]

    def handled(self, body: Any, what: Any) -> tuple[Any, ...]:
        effects: tuple[Any, ...] = body.handle(what.event, what.now)
        return effects

    def told(self, what: Any, event: Any) -> Any:
        return Stamped(event, what.now)

    def bare(self, what: Any) -> tuple[Any, Instant]:
        return what.event, what.now

    # What may happen.

    def moves(self, state: State) -> list[Move]:
        found = super().moves(state)
        for node, name in enumerate(self.cluster.nodes):
            body = self.bodies[state[node]]
            for i, timer in enumerate(self.armed[state[node]]):
                if self._due(body, timer, self.now(state, name)):
                    found.append(("timer", node, i))
        found += self._ticks(state)
        return found

    def _of_timers(self, node: int, end: int, budget: int) -> Iterator[Move]:
        """None by itself: all have their time."""
        return iter(())

    def _due(self, body: Any, timer: Timer, now: Instant) -> bool:
        at = body.deadline(timer)
        return at is not None and at <= now

    def _ticks(self, state: State) -> Iterator[Move]:
        if any(state[self.first_link : self.bag]):
            return
        for engine in (0, 1):
            now = state[self.clocks + engine]
            ahead = now + 1 - state[self.clocks + 1 - engine]
            if now < self.scope.horizon and ahead <= self.scope.skew and not self._waited_for(state, engine, now):
                yield ("tick", engine)

    def _waited_for(self, state: State, engine: int, now: Instant) -> bool:
        """Whether something has to happen before this engine's clock goes on."""
        for node, name in enumerate(self.cluster.nodes):
            if engine_of(name) == "PD"[engine]:
                body = self.bodies[state[node]]
                if any(self._due(body, timer, now) for timer in self.armed[state[node]]):
                    return True
        if self.scope.pulls and self._undispatched(state):
            return True
        return any(
            flags & FLYING and not flags & (ENDED_ERR | TOLD) and self._of(engine, op) and now >= self._last(flags)
            for op, flags in self.ops_of(state)
        )

    def _undispatched(self, state: State) -> bool:
        """A pull's decode leg follows its prefill leg at once: what a lease has lost by then D cannot know (C10)."""
        ghost = self.ghost_of(state)
        return any(
            stage == Stage.UNBORN and ghost.products[product] == Product.HELD
            for stage, product in zip(ghost.stages, self.cluster.product_of, strict=True)
        )

    def _of(self, engine: int, op: int) -> bool:
        return engine_of(self.operations(op)[0]) == "PD"[engine]

    def _last(self, flags: int) -> Instant:
        """When the transport has given up an operation, at the latest."""
        return (flags >> POSTED) + TRANSPORT_TICKS

    def tick(self, draft: Draft, engine: int) -> None:
        draft[self.clocks + engine] += 1
        # What has ended badly and has not landed by now never will.
        now, ended = draft[self.clocks + engine], ENDED_ERR | TOLD
        late = [
            (op, flags & ~FLYING if self._of(engine, op) and flags & ended and now > self._last(flags) else flags)
            for op, flags in self.ops_of(draft)
        ]
        self.put_ops(draft, late)

    def timer(self, draft: Draft, node: int, i: int) -> None:
        """Without a budget: a timer fires when it is due."""
        self.event(draft, self.cluster.nodes[node], TimerFired(self.armed[draft[node]][i]))


def relation(scope: Scope) -> Relation:
    """The world of a scope, with clocks if it has a horizon."""
    return Timed(scope) if scope.horizon else Relation(scope)

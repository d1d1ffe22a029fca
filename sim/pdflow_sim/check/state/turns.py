"""Turns: one event into one endpoint, all that follows from it within its engine, and the effects it has.

A turn is cached by what it read (the event and the engine's endpoints; then the effects, operations, tasks and shadow
state), so that almost none runs the core: an explorer's time goes into tuples and dictionaries. `now` stays 0: every
deadline is a constant then, and an armed timer may fire at any moment, which over-approximates every clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from pdflow.protocol.effects import Note, PostWrite, Send, SendLocal
from pdflow.protocol.events import FrameOrdered, Received, TimerFired
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import CancelAck, Progress, Register, RegisterAck, Sync, SyncReply
from pdflow.protocol.values import Address
from pdflow_sim.check.state.cluster import FIRST_INCARNATION, SECOND
from pdflow_sim.check.state.endpoint_checks import (
    admits_right,
    counts_right,
    doubts_with_cause,
    gives_room_in_order,
    ignores_former_incarnation,
    is_woken,
    is_woken_again,
    refuses_the_expired,
    renews_what_is_wanted,
    spares_later_requests,
)
from pdflow_sim.check.state.shadow_state import CRASH, Broken, Interned, PartialState
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.wire_checks import passes_the_codec

SENDING_EFFECTS = (Send, SendLocal)
"""Effects of an orphan that reach no endpoint: its connections and its scheduler are gone."""
Batch: TypeAlias = list[tuple[Address, Any, Any]]
"""(address, effect, event) of the effects that the invariant checker must judge."""
Turn: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...], int]
"""The engine's endpoints afterwards; frames by the slot of their link; a number for the effects that must be judged, or
-1."""
StepResult: TypeAlias = tuple[int, tuple[Any, ...]]
"""The number of the endpoint after a step, and the step's effects."""
StepCheck: TypeAlias = Callable[[Address, Any, Any, Any, tuple[Any, ...]], None]
"""(address, endpoint before, endpoint after, event, effects); raises Broken."""


class Http(Protocol):
    """Messages over HTTP, besides the frames between endpoints."""

    def sent(self, node: Address, effect: Any) -> Iterable[tuple[int, Any]]:
        """Yield (link, message) for everything that an effect sends, in this order."""


class Posting(Protocol):
    """The component that splits the operations of endpoints into pieces."""

    def post(self, draft: Draft, batch: int) -> None:
        """Post the effects of the batch of this number, in their order."""


class TurnObserver(Protocol):
    """Observes every step of every endpoint."""

    def checking(self, node: Address) -> None:
        """Called before an effect of this node is judged."""

    def stepped(self, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
        """Called when an endpoint has handled an event."""


class TurnRunner:
    """Runs the turns of one world, and caches them."""

    def __init__(self, space: StateSpace) -> None:
        cluster = space.cluster
        self.space = space
        self.cluster = cluster
        self.strict = space.scope.dialect.control_frames
        """Frames are those of strict, and not notifications of vLLM."""
        self.events = Interned()
        """(node, event)"""
        self.batches = Interned()
        self.steps: dict[tuple[int, int], StepResult] = {}
        self.role_steps: dict[tuple[int, int], StepResult] = {}
        self.turns: dict[tuple[int, ...], Turn] = {}
        self.checked: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
        self.appended: dict[tuple[int, tuple[int, ...]], int] = {}
        self.arrivals: dict[tuple[int, int, tuple[int, int]], int] = {}
        self.checks: list[StepCheck] = [
            ignores_former_incarnation,
            spares_later_requests,
            renews_what_is_wanted,
            doubts_with_cause,
            partial(refuses_the_expired, cluster.d_of[0].shards),
        ]
        """Checks of every step of an endpoint."""
        self.http: Http | None = None
        self.posting: Posting | None = None
        self.observer: TurnObserver | None = None
        """With an observer no turn is cached, since a cached turn runs no endpoint. Set it before the first turn."""

        count = len(cluster.nodes)
        engines = [engine_of(node) for node in cluster.nodes]
        self.span = [(engines.index(engine), count - engines[::-1].index(engine)) for engine in engines]
        """By node, the range of slots of its engine."""
        bodies = {engine: cluster.role(engine) for engine in cluster.roles}
        self.role_at = [cluster.at.get(cluster.roles.get(engine, ""), -1) for engine in engines]
        """By node, the slot of its engine's core; -1: it has none."""
        roles = [bodies.get(engine) for engine in engines]
        self.core_takes = [frozenset() if role is None else role.takes for role in roles]
        """By node, the types of its effects that its engine's core handles."""

    def start(self) -> State:
        """Return the state before the first move."""
        state = self.space.beginning()
        for node, event in self.cluster.first_events():
            state = self.feed(state, node, event)
        return state

    def feed(self, state: State, node: Address, event: Any) -> State:
        """Return the state after one event and all that follows from it. Raises Broken."""
        draft = list(state)
        self.event(draft, node, event)
        return tuple(draft)

    def event(self, draft: Draft, node: Address, event: Any) -> int:
        """Apply one event, and all that follows from it, to a draft. Returns the number of the batch of effects that
        were judged, or -1 if none were. Raises Broken."""
        at = self.cluster.at[node]
        return self.turn(draft, at, self.events.of((at, event)))

    def arrive(self, draft: Draft, link: int, frame: int) -> None:
        """Deliver a frame at the other end of its link. A frame between endpoints of one engine is an event itself."""
        space = self.space
        shadow = space.shadows.values[draft[space.shadow]]
        key = (link, frame, shadow.restarts)
        found = self.arrivals.get(key)
        if found is None:
            sender, to = self.cluster.links[link]
            what = space.frames.values[frame]
            if link < self.cluster.between_engines:
                known = self.cluster.seconds.get(sender, sender)
                what = Received(known, space.incarnation(shadow, sender), what)
            found = self.arrivals[key] = self.events.of((self.cluster.at[to], what))
        self.turn(draft, self.events.values[found][0], found)

    def turn(self, draft: Draft, node: int, event: int) -> int:
        """Apply an event of this number to a draft, and judge its effects. Returns the number of their batch, or -1 if
        there are none to judge."""
        first, end = self.span[node]
        key = (event, *draft[first:end])
        turn = self.turns.get(key)
        if turn is None:
            turn = self._run(key[1:], first, event)
            if self.observer is None:
                self.turns[key] = turn
        draft[first:end], sends, batch = turn
        for slot, frames in sends:
            more = (draft[slot], frames)
            chan = self.appended.get(more)
            if chan is None:
                chans = self.space.chans
                chan = self.appended[more] = chans.of(chans.values[draft[slot]] + frames)
            draft[slot] = chan
        if batch >= 0:
            space = self.space
            op, task, shadow = space.op, space.task, space.shadow
            before = (batch, draft[op], draft[task], draft[shadow])
            after = self.checked.get(before)
            if after is None:
                after = self._check_effects(*before)
                if self.observer is None:
                    self.checked[before] = after
            draft[op], draft[task], draft[shadow] = after
            if self.posting is not None:
                self.posting.post(draft, batch)
        return batch

    def _run(self, ends: tuple[int, ...], first: int, event: int) -> Turn:
        """Run the endpoints of one engine. What one sends another of them is delivered at once, unless ranks lag."""
        after = list(ends)
        space, cluster = self.space, self.cluster
        nodes, links, lagging = cluster.nodes, cluster.link_of, space.scope.lagging
        sends: dict[int, list[int]] = {}
        batch: Batch = []
        queue = deque([event])
        role_at, taken = self.role_at[first], self.core_takes[first]
        while queue:
            event = queue.popleft()
            at, what = self.events.values[event]
            node = nodes[at]
            if at == role_at:
                self._role_turn(after, first, event, queue, batch)
                continue
            before = after[at - first]
            after[at - first], effects = self.step(before, event)
            if self.observer is not None:
                self.observer.stepped(node, space.bodies[before], space.bodies[after[at - first]], what, effects)
            if node in cluster.orphans:
                effects = tuple(effect for effect in effects if type(effect) not in SENDING_EFFECTS)
            for effect in effects:
                kind = type(effect)
                if kind is SendLocal:
                    if _is_sync(effect.event):
                        batch.append((node, effect, what))
                    if not lagging:
                        queue.append(self.events.of((cluster.at[self._within(node, effect.to)], effect.event)))
                        continue
                    slot = space.first_link + links[node, effect.to]
                    sends.setdefault(slot, []).append(space.frames.of(effect.event))
                elif kind is Send:
                    to = self._peer(effect.to, after[at - first]) if cluster.seconds else effect.to
                    slot = space.first_link + links[node, to]
                    sends.setdefault(slot, []).append(self._frame(node, effect.message))
                    if _claims(effect.message) and node not in cluster.seconds:
                        batch.append((node, effect, what))
                elif kind is not Note:
                    batch.append((node, effect, what))
                    if kind in taken and node not in cluster.orphans:
                        self._role_turn(after, first, self.events.of((role_at, effect)), queue, batch)
        number = self.batches.of(tuple(batch)) if batch else -1
        if self.http is not None:
            for node, effect, _ in batch:
                for link, what in self.http.sent(node, effect):
                    sends.setdefault(space.first_link + link, []).append(space.frames.of(what))
        return tuple(after), tuple((slot, tuple(frames)) for slot, frames in sends.items()), number

    def _within(self, node: Address, to: Address) -> Address:
        """Return the address of an endpoint of this node's own engine."""
        return SECOND + to if node in self.cluster.seconds else to

    def _peer(self, to: Address, sender: int) -> Address:
        """Return the process that a frame reaches. Of two engines of one id, D's connection leads to the one whose
        incarnation its last handshake has shown."""
        known = self.space.bodies[sender].peers.incarnations.get(engine_of(to))
        second = SECOND + to
        return second if second in self.cluster.seconds and known == FIRST_INCARNATION["P"] + 1 else to

    def _role_turn(self, after: list[int], first: int, event: int, queue: deque[int], batch: Batch) -> None:
        """Run the engine's core. Events that it sends its scheduler's endpoint are appended to the queue."""
        at, what = self.events.values[event]
        key = (after[at - first], event)
        hit = self.role_steps.get(key)
        if hit is None:
            before = self.space.bodies[key[0]]
            try:
                body = before.fork()
                effects = body.handle(what, 0)
                hit = self.role_steps[key] = (self.space.endpoint(self.cluster.nodes[at], body), effects)
            except AssertionError as error:
                raise Broken("S6", str(error)) from error
            except KeyError as error:
                raise Broken("S6", f"{type(what).__name__} of {error}, which its engine has already ended") from error
            except Exception as error:
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
            gives_room_in_order(self.cluster.nodes[at], before, body)
        after[at - first], effects = hit
        for effect in effects:
            if type(effect) is SendLocal:
                queue.append(self.events.of((self.cluster.at[effect.to], effect.event)))
            else:
                batch.append((self.cluster.nodes[at], effect, what))

    def step(self, end: int, event: int) -> StepResult:
        """Return an endpoint's number after an event, and the effects of the event. Raises Broken."""
        hit = self.steps.get((end, event))
        if hit is None:
            at, what = self.events.values[event]
            node, before = self.cluster.nodes[at], self.space.bodies[end]
            try:
                body = before.fork()
                effects = body.handle(what, 0)
                known = len(self.space.bodies)
                after = self.space.endpoint(node, body)
            except Exception as error:
                # That the core raises on what it ought to bear is a violation like any other.
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
            if after == known:
                counts_right(node, body)
            if type(what) is TimerFired:
                is_woken_again(node, before, self.space.armed[end], what)
            elif after != end:
                is_woken(node, before, self.space.armed[end], body, self.space.armed[after])
            if after != end:
                admits_right(node, before, body, counted=after == known)
            for check in self.checks:
                check(node, before, body, what, effects)
            for effect in effects:
                if type(effect) is PostWrite:
                    passes_the_codec(node, effect.notification, self.strict)
            hit = self.steps[end, event] = (after, effects)
        return hit

    def _frame(self, node: Address, message: Any) -> int:
        """Return the number of a frame on a link between engines. It passes the codec when it is new; one of strict
        does not if a guard that is off takes fields from it."""
        frames = self.space.frames
        known, what = len(frames.values), self._on_the_wire(message)
        number = frames.of(what)
        if number == known and (what is message or not self.strict):
            passes_the_codec(node, message, self.strict)
        return number

    def _on_the_wire(self, message: Any) -> Any:
        """Return a message without the fields that the dialect lacks on the wire: vLLM's PUSH_REG names neither the
        prefill product nor the part of it that is wanted."""
        dialect = self.space.scope.dialect
        if not isinstance(message, Register) or dialect.matches_by_xid:
            return message
        if dialect.control_frames:
            return msgspec.structs.replace(message, xid="")
        return msgspec.structs.replace(message, xid="", token_start=0, num_tokens=0, digest=0, weights=0)

    def _check_effects(self, batch: int, op: int, task: int, shadow: int) -> tuple[int, int, int]:
        space = self.space
        draft = PartialState(space.ops.values[op], space.tasks.values[task], space.shadows.values[shadow])
        for node, effect, event in self.batches.values[batch]:
            if self.observer is not None:
                self.observer.checking(node)
            space.checker.check(draft, node, effect, event)
        return (
            space.ops.of(tuple(sorted(draft.ops))),
            space.tasks.of(tuple(sorted(draft.tasks))),
            space.shadows.of(draft.shadow()),
        )


def _is_sync(event: Any) -> bool:
    """True if an event is the order of a SYNC, whose lists are checked against the shadow state."""
    return isinstance(event, FrameOrdered) and isinstance(event.message, Sync)


def _claims(message: Any) -> bool:
    """True if a message says that a WRITE was sent, or answers a CANCEL or a SYNC, which the checker must judge."""
    if isinstance(message, RegisterAck):
        return message.progress is Progress.SENT
    return isinstance(message, (CancelAck, SyncReply))

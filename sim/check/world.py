"""A state of the explored world, and the turn: one event into one endpoint, and all that follows from it.

A state is a flat tuple of small numbers, one slot for each endpoint, each link, the late duplicates, the tasks, the
operations, the ghosts and the budgets; `Interned` knows the values behind them. A turn is remembered by what it read
(the event and the engine's endpoints; then the effects, operations, tasks and ghosts), so that almost none runs the
core: an explorer's time goes into tuples and dictionaries. `now` stays 0: every deadline is a constant then, and an
armed timer may fire at any moment, which over-approximates every clock.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import msgspec

from pdflow.protocol.effects import Note, Send, Tell
from pdflow.protocol.events import FrameOrdered, HandshakeEnded, Received
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import CancelAck, Progress, Register, RegisterAck, Sync, SyncReply
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Address, RequestId, Xid
from pdflow.serving.events import PrefillRequested
from sim.check.cluster import DIGEST, FIRST_LIFE, Cluster
from sim.check.former import heeds_former_life
from sim.check.ghost import CRASH, Broken, Ghost, Interned, Product, Sketch, Stage
from sim.check.judge import Judge
from sim.check.scope import TOKENS, Scope
from sim.check.wake import overslept

HEARD = (Send, Tell)
"""What an orphan does of this reaches nobody: its connections and its scheduler are gone."""
State: TypeAlias = tuple[int, ...]
Draft: TypeAlias = list[int]
"""A state while a move changes it."""
Turn: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...], int]
"""The engine's endpoints afterwards; frames by the slot of their link; a number for the effects that must be judged, or
-1."""


class World:
    """The explored world of one scope: its values, and `turn`. What may happen in it is relation.py's."""

    cluster_type: type[Cluster] = Cluster
    judge_type: type[Judge] = Judge

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.cluster = cluster = self.cluster_type(scope)
        self.judge = self.judge_type(cluster)
        self.endpoints = Interned()
        """(address, incarnation, fingerprint) of each; the endpoint itself in `bodies`."""
        self.bodies: list[Any] = []
        self.armed: list[tuple[Timer, ...]] = []
        self.holding: list[bool] = []
        """Whether each endpoint remembers a transfer."""
        self.frames = Interned()
        self.chans = Interned()
        self.bags = Interned()
        self.tasks = Interned()
        self.ops = Interned()
        self.ghosts = Interned()
        self.budgets = Interned()
        self.events = Interned()
        """(node, event)"""
        self.batches = Interned()
        """(address, effect, event) of effects that must be judged."""
        self.steps: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}
        self.role_steps: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}
        self.turns: dict[tuple[int, ...], Turn] = {}
        self.judged: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
        self.appended: dict[tuple[int, tuple[int, ...]], int] = {}
        self.arrivals: dict[tuple[int, int, tuple[int, int]], int] = {}
        self._nothing_left: int | None = None
        self._resolved: dict[tuple[int, int], bool] = {}

        count = len(cluster.nodes)
        self.first_link = count
        self.living = count - len(cluster.orphans)
        """Up to here stand those whose cells must end. An orphan is asked nothing, and owes nobody anything."""
        self.bag = count + len(cluster.links)
        self.task, self.op, self.ghost, self.budget = (self.bag + i for i in range(1, 5))
        engines = [engine_of(node) for node in cluster.nodes]
        self.span = [(engines.index(engine), count - engines[::-1].index(engine)) for engine in engines]
        """The slots of each node's engine."""
        bodies = {engine: cluster.role(engine) for engine in cluster.roles}
        self.role_at = [cluster.at.get(cluster.roles.get(engine, ""), -1) for engine in engines]
        """The slot of its core; -1: it has none."""
        roles = [bodies.get(engine) for engine in engines]
        self.core_takes = [frozenset() if role is None else role.takes for role in roles]
        """Effects of each node that its engine's core takes."""
        self.over: tuple[int, ...] = (Stage.DECODED if cluster.decodes else Stage.COMMITTED, Stage.FREED, Stage.LEFT)
        """Stages of requests that want nothing more."""
        self.chans.of(())
        self.bags.of(())

    # Values.

    def endpoint(self, node: Address, body: Any) -> int:
        found = self.endpoints.of((node, getattr(body, "incarnation", 0), body.fingerprint()))
        if found == len(self.bodies):
            self.bodies.append(body)
            self.armed.append(body.armed())
            self.holding.append(bool(getattr(body, "cells", None)))
        return found

    def body(self, state: State | Draft, node: Address) -> Any:
        return self.bodies[state[self.cluster.at[node]]]

    def ghost_of(self, state: State | Draft) -> Ghost:
        ghost: Ghost = self.ghosts.values[state[self.ghost]]
        return ghost

    def ops_of(self, state: State | Draft) -> tuple[tuple[int, int], ...]:
        ops: tuple[tuple[int, int], ...] = self.ops.values[state[self.op]]
        return ops

    def tasks_of(self, state: State | Draft) -> tuple[tuple[str, int, int], ...]:
        tasks: tuple[tuple[str, int, int], ...] = self.tasks.values[state[self.task]]
        return tasks

    def further(self, state: State) -> dict[str, Any]:
        """What stands in a state beyond the budgets, by value, for its digest."""
        clocks = state[self.budget + 1 :]
        return {"clocks": clocks} if clocks else {}

    def carried(self, flags: int) -> Any:
        """An operation's flags by value, for a state's digest."""
        return flags

    def life(self, ghost: Ghost, node: Address) -> int:
        engine = engine_of(node)
        return FIRST_LIFE[engine] + ghost.lives[self.cluster.number[engine]]

    @staticmethod
    def put(state: State, slot: int, value: int) -> State:
        """The same state but for one slot."""
        return (*state[:slot], value, *state[slot + 1 :])

    def spent(self, state: State) -> State:
        """The same state with faults over: nothing is left of any budget."""
        if self._nothing_left is None:
            self._nothing_left = self.budgets.of((0,) * len(self.scope.budget))
        return self.put(state, self.budget, self._nothing_left)

    def start(self) -> State:
        """Every prompt is queued at P, and nothing else has happened."""
        state = self.beginning()
        cluster = self.cluster
        for i, (xid, prefill_id) in enumerate(zip(cluster.xids, cluster.prefill_ids, strict=True)):
            state = self.feed(state, *self.requested(i, xid, prefill_id))
        return state

    def requested(self, i: int, xid: Xid, request_id: RequestId) -> tuple[Address, Any]:
        """A prefill leg reaches P: whom that is told, and how."""
        engine = self.cluster.p_of[i].engine
        return self.cluster.roles[engine], PrefillRequested(xid, request_id, TOKENS, DIGEST + i)

    def beginning(self) -> State:
        """Before that."""
        cluster = self.cluster
        return (
            *(self.endpoint(node, body) for node, body in zip(cluster.nodes, cluster.endpoints(), strict=True)),
            *(0 for _ in cluster.links),
            self.bags.of(()),
            self.tasks.of(()),
            self.ops.of(()),
            self.ghosts.of(self.first_ghost()),
            self.budgets.of(self.scope.budget),
        )

    def first_ghost(self) -> Ghost:
        n = len(self.cluster.requests)
        none = (0,) * n
        queued, unborn = (Product.QUEUED,) * len(self.cluster.xids), (Stage.UNBORN,) * n
        return Ghost(queued, unborn, none, none, (0,) * len(self.cluster.engines), none)

    # The turn.

    def feed(self, state: State, node: Address, event: Any) -> State:
        """One event, and all that follows from it. Raises Broken."""
        draft = list(state)
        self.event(draft, node, event)
        return tuple(draft)

    def event(self, draft: Draft, node: Address, event: Any) -> int:
        """The same, to a draft; the number of the effects that were judged, or -1."""
        at = self.cluster.at[node]
        return self.turn(draft, at, self.events.of((at, event)))

    def arrive(self, draft: Draft, link: int, frame: int) -> None:
        """A frame reaches the other end of its link. One between endpoints of an engine is an event by itself."""
        ghost = self.ghosts.values[draft[self.ghost]]
        key = (link, frame, ghost.lives)
        found = self.arrivals.get(key)
        if found is None:
            sender, to = self.cluster.links[link]
            what = self.frames.values[frame]
            if link < self.cluster.between_engines:
                what = Received(sender, self.life(ghost, sender), what)
            found = self.arrivals[key] = self.events.of((self.cluster.at[to], what))
        self.turn(draft, self.events.values[found][0], found)

    def turn(self, draft: Draft, node: int, event: int) -> int:
        """Change the draft of a state by what this event does, judged: the effects of this number, or none with -1."""
        first, end = self.span[node]
        key = (event, *draft[first:end])
        turn = self.turns.get(key)
        if turn is None:
            turn = self.turns[key] = self._turn(key[1:], first, event)
        draft[first:end], sends, batch = turn
        for slot, frames in sends:
            more = (draft[slot], frames)
            chan = self.appended.get(more)
            if chan is None:
                chan = self.appended[more] = self.chans.of(self.chans.values[draft[slot]] + frames)
            draft[slot] = chan
        if batch >= 0:
            before = (batch, draft[self.op], draft[self.task], draft[self.ghost])
            after = self.judged.get(before)
            if after is None:
                after = self.judged[before] = self._judge(*before)
            draft[self.op], draft[self.task], draft[self.ghost] = after
        return batch

    def _turn(self, ends: tuple[int, ...], first: int, event: int) -> Turn:
        """Run the endpoints: what one tells another of its engine comes at once, unless ranks lag."""
        after = list(ends)
        nodes, links = self.cluster.nodes, self.cluster.link_of
        sends: dict[int, list[int]] = {}
        batch: list[tuple[Address, Any, Any]] = []
        queue = deque([event])
        role_at, taken = self.role_at[first], self.core_takes[first]
        while queue:
            event = queue.popleft()
            at, what = self.events.values[event]
            node = nodes[at]
            if at == role_at:
                self._role_turn(after, first, event, queue, batch)
                continue
            after[at - first], effects = self._step(after[at - first], event)
            if node in self.cluster.orphans:
                effects = tuple(effect for effect in effects if type(effect) not in HEARD)
            for effect in effects:
                kind = type(effect)
                if kind is Tell:
                    if _says_all(effect.event):
                        batch.append((node, effect, what))
                    if not self.scope.lagging:
                        queue.append(self.events.of((self.cluster.at[effect.to], effect.event)))
                        continue
                    slot = self.first_link + links[node, effect.to]
                    sends.setdefault(slot, []).append(self.frames.of(effect.event))
                elif kind is Send:
                    slot = self.first_link + links[node, effect.to]
                    sends.setdefault(slot, []).append(self.frames.of(self._on_the_wire(effect.message)))
                    if _claims(effect.message):
                        batch.append((node, effect, what))
                elif kind is not Note:
                    batch.append((node, effect, what))
                    if kind in taken and node not in self.cluster.orphans:
                        self._role_turn(after, first, self.events.of((role_at, effect)), queue, batch)
        number = self.batches.of(tuple(batch)) if batch else -1
        return tuple(after), tuple((slot, tuple(frames)) for slot, frames in sends.items()), number

    def _role_turn(
        self, after: list[int], first: int, event: int, queue: deque[int], batch: list[tuple[Address, Any, Any]]
    ) -> None:
        """The core of the engine: what it tells its scheduler's endpoint is handled behind what is there already."""
        at, what = self.events.values[event]
        key = (after[at - first], event)
        hit = self.role_steps.get(key)
        if hit is None:
            try:
                body = self.bodies[key[0]].fork()
                effects = body.handle(what, 0)
                hit = self.role_steps[key] = (self.endpoint(self.cluster.nodes[at], body), effects)
            except AssertionError as error:
                raise Broken("S6", str(error)) from error
            except KeyError as error:
                raise Broken("S6", f"{type(what).__name__} of {error}, which has ended at its engine") from error
            except Exception as error:
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
        after[at - first], effects = hit
        for effect in effects:
            if type(effect) is Tell:
                queue.append(self.events.of((self.cluster.at[effect.to], effect.event)))
            else:
                batch.append((self.cluster.nodes[at], effect, what))

    def _step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        hit = self.steps.get((end, event))
        if hit is None:
            node, what = self.events.values[event]
            try:
                body = self.bodies[end].fork()
                effects = body.handle(what, 0)
                after = self.endpoint(self.cluster.nodes[node], body)
            except Exception as error:
                # That the core raises on what it ought to bear is a violation like any other.
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
            if (timer := overslept(self.bodies[end], body)) is not None:
                wants = f"{self.cluster.nodes[node]} wants {timer.kind.name} earlier than before"
                raise Broken("L", f"{wants}, and would not be woken for it")
            if type(what) is HandshakeEnded and heeds_former_life(body, what):
                who = self.cluster.nodes[node]
                raise Broken("S8", f"a frame of the life before makes {who} act, though {what.peer} has shown another")
            hit = self.steps[end, event] = (after, effects)
        return hit

    def _on_the_wire(self, message: Any) -> Any:
        """vLLM's PUSH_REG has no word for the prefill product, and none for what of it is wanted."""
        if not isinstance(message, Register) or self.scope.dialect.matches_by_xid:
            return message
        if self.scope.dialect.control_frames:
            return msgspec.structs.replace(message, xid="")
        return msgspec.structs.replace(message, xid="", token_start=0, num_tokens=0, digest=0, weights=0)

    def _judge(self, batch: int, op: int, task: int, ghost: int) -> tuple[int, int, int]:
        draft = Sketch(self.ops.values[op], self.tasks.values[task], self.ghosts.values[ghost])
        for node, effect, event in self.batches.values[batch]:
            self.judge.judge(draft, node, effect, event)
        return (
            self.ops.of(tuple(sorted(draft.ops))),
            self.tasks.of(tuple(sorted(draft.tasks))),
            self.ghosts.of(draft.ghost()),
        )

    def settled(self, state: State) -> bool:
        """Everything has an outcome, nothing is held or under way."""
        key = (state[self.ghost], state[self.op])
        resolved = self._resolved.get(key)
        if resolved is None:
            ghost = self.ghost_of(state)
            resolved = self._resolved[key] = (
                all(product in (Product.ABSENT, Product.RELEASED, Product.DEAD) for product in ghost.products)
                and all(stage in self.over for stage in ghost.stages)
                and not self.ops_of(state)
            )
        if not resolved or any(self.holding[end] for end in state[: self.living]):
            return False
        return not self.unanswered(state)

    def unanswered(self, state: State) -> list[str]:
        """What a router has not ended, in words. Here there is none (routed.py)."""
        return []

    def cut_short(self, state: State) -> int:
        """How many attempts a router has taken back for what their client had received."""
        return 0


def _says_all(told: Any) -> bool:
    """Whether it is the order of a SYNC, whose lists the ghosts know."""
    return isinstance(told, FrameOrdered) and isinstance(told.message, Sync)


def _claims(message: Any) -> bool:
    """Whether it says that something was sent, or answers a CANCEL: the ghosts must look at it."""
    if isinstance(message, RegisterAck):
        return message.progress is Progress.SENT
    return isinstance(message, (CancelAck, SyncReply))

"""Moves of worlds with clocks: timers fire when they are due, and no sooner.

Untimed, any armed timer may fire at any moment, which is more than any clock does; whatever holds there needs no clock.
Some rules rest on clocks all the same: that D frees a quarantine when a correctly running P can no longer write
(vllm-compat, spec 6.2), and that everything ends within a bounded time (L1 to L3). Here each engine has a clock of
its own, in ticks, and either may be ahead of the other by `skew`. Between two ticks anything may happen in any order;
a tick waits for frames on their way, for timers that are due, and for an operation that would otherwise outlast the
transport's bound. What takes longer than that, a fault has to delay.

With `drift`, one clock advances by several ticks at a time while the other advances by one, so that no number of
ticks bounds the difference between the two. Which of the rates is right does not matter; the transport's bound is
that of the slower clock. With `idle`, D's clock does not wait for a SYNC that is due while no request is open.

Only differences of time count (tests/protocol/test_cells.py holds that), so a clock stands still at 0 and everything
else moves: a tick brings each of the engine's instants one nearer, and the space is finite without an end of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.events import TimerFired
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import NEVER, Instant
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.scopes.scope import ENDLESS
from pdflow_sim.check.state.cluster import TRANSPORT_TICKS, role_of
from pdflow_sim.check.state.shadow_state import (
    AGE,
    ENDED_ERR,
    ERROR_REPORTED,
    IN_FLIGHT,
    Broken,
    PromptStage,
    RequestStage,
)
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

LONG_AGO = -10
"""Earliest instant that is kept, in ticks: longer ago than any duration of TICKS, so that the difference never
counts."""


class DueTimers:
    """The moves of timers that are due. They have no budget: time itself bounds them."""

    def __init__(self, space: StateSpace, turns: TurnRunner) -> None:
        self.space = space
        self.turns = turns
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}

    def acts(self) -> Acts:
        return {"timer": self.fire}

    def moves(self, state: State) -> list[Move]:
        moves: list[Move] = []
        armed, known = self.space.armed, self._moves
        for node, end in enumerate(state[: self.space.first_link]):
            if armed[end]:
                due = known.get((node, end))
                moves += self.due_at(node, end) if due is None else due
        return moves

    def due_at(self, node: int, end: int) -> tuple[Move, ...]:
        """Return the moves of the timers that are due at one endpoint."""
        found = self._moves.get((node, end))
        if found is None:
            body = self.space.bodies[end]
            due = [(i, body.deadline(timer)) for i, timer in enumerate(self.space.armed[end])]
            found = tuple(("timer", node, i) for i, at in due if at is not None and at <= 0)
            self._moves[node, end] = found
        return found

    def fire(self, draft: Draft, move: Move) -> None:
        _, node, i = move
        before, name = draft[node], self.space.cluster.nodes[node]
        timer = self.space.armed[before][i]
        self.turns.event(draft, name, TimerFired(timer))
        if draft[node] == before:
            raise Broken("L", f"{timer.kind.name} is due at {name}, but firing it changes nothing")


class Clocks:
    """The moves of clocks. Two more slots: by how many ticks P's clock is ahead of D's, and the ticks left to P's."""

    def __init__(self, space: StateSpace, timers: DueTimers) -> None:
        self.space = space
        self.scope = space.scope
        self.timers = timers
        self.ahead = space.claim((0, self.scope.horizon), self._by_value)
        self.left_ticks = self.ahead + 1
        space.with_faults_over(self.left_ticks, ENDLESS)
        self._aged: dict[int, int] = {}
        self._aged_ops: dict[tuple[int, int], int] = {}
        self._overdue: dict[tuple[int, int], bool] = {}
        nodes = space.cluster.nodes
        self._slots = [[at for at, node in enumerate(nodes) if role_of(node) == name] for name in "PD"]
        self.rates = (1 + max(0, -self.scope.drift), 1 + max(0, self.scope.drift))
        """Ticks by which the clocks of P and D advance with each move."""

    def _by_value(self, state: State) -> dict[str, Any]:
        return {"clocks": state[self.ahead : self.ahead + 2]}

    def acts(self) -> Acts:
        return {"tick": self.tick}

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        if not any(state[self.space.first_link : self.space.bag]):
            ahead, left = state[self.ahead], state[self.left_ticks]
            if left and ahead < self.scope.skew and not self._waited_for(state, 0):
                yield ("tick", 0)
            if ahead > -self.scope.skew and not self._waited_for(state, 1):
                yield ("tick", 1)

    def _waited_for(self, state: State, engine: int) -> bool:
        """True if something has to happen before this clock goes on: 0 is the P engines', 1 the D engines'."""
        for node in self._slots[engine]:
            end = state[node]
            if self.space.armed[end] and self.timers.due_at(node, end) and not self._stands_still(end):
                return True
        if self._undispatched(state):
            return True
        key = (engine, state[self.space.op])
        overdue = self._overdue.get(key)
        if overdue is None:
            overdue = self._overdue[key] = any(
                role_of(self.space.operations(op)[0]) == "PD"[engine]
                and _lands(flags)
                and flags >> AGE >= TRANSPORT_TICKS
                for op, flags in self.space.ops_of(state)
            )
        return overdue

    def _stands_still(self, end: int) -> bool:
        """True if nothing makes this endpoint's driver fire its timers in time: D's scheduler has no request."""
        return self.scope.idle and type(self.space.bodies[end]) is ConsumerScheduler and not self.space.holding[end]

    def _undispatched(self, state: State) -> bool:
        """True if a pull's decode leg is still to be dispatched. It follows the prefill leg at once: D cannot know how
        much of the lease has passed by then (C10). With the router's endpoint the dispatch is under way on a link, and
        time waits for that."""
        if not self.scope.pulls or self.scope.attempts:
            return False
        shadow = self.space.shadow_of(state)
        return any(
            stage == RequestStage.UNREGISTERED and shadow.products[product] == PromptStage.HELD
            for stage, product in zip(shadow.stages, self.space.cluster.product_of, strict=True)
        )

    # Time.

    def tick(self, draft: Draft, move: Move) -> None:
        space, engine = self.space, move[1]
        for node in self._slots[engine]:
            for _ in range(self.rates[engine]):
                draft[node] = self._older(draft[node], space.cluster.nodes[node])
        key = (engine, draft[space.op])
        older = self._aged_ops.get(key)
        if older is None:
            space.put_ops(draft, [(op, self._flown(engine, op, flags)) for op, flags in space.ops_of(draft)])
            older = self._aged_ops[key] = draft[space.op]
        draft[space.op] = older
        draft[self.ahead] += 1 - 2 * engine
        if engine == 0 and self.scope.horizon < ENDLESS:
            draft[self.left_ticks] -= 1

    def _flown(self, engine: int, op: int, flags: int) -> int:
        """Return an operation's flags one tick of this engine later."""
        if role_of(self.space.operations(op)[0]) == "PD"[engine] and flags & IN_FLIGHT:
            flags += 1 << AGE
            if flags >> AGE > TRANSPORT_TICKS:
                # It has ended badly without landing, and never will.
                flags &= ~IN_FLIGHT
        return flags

    def _older(self, end: int, address: str) -> int:
        found = self._aged.get(end)
        if found is None:
            found = self._aged[end] = self.space.endpoint(address, aged(self.space.bodies[end]))
        return found


def _lands(flags: int) -> bool:
    return bool(flags & IN_FLIGHT and not flags & (ENDED_ERR | ERROR_REPORTED))


def aged(body: Any) -> Any:
    """Return an endpoint one tick later, with its instants relative to then."""
    other = body.fork()
    if isinstance(other, (ProducerRank, ConsumerRank)):
        other.peers.retry_at = {peer: _nearer(at) for peer, at in other.peers.retry_at.items()}
    if isinstance(other, ProducerRank):
        other.store.cells = {
            key: msgspec.structs.replace(
                cell,
                lease_until=cell.lease_until if cell.source is None else _nearer(cell.lease_until),
                registration_until=_nearer(cell.registration_until) if cell.registrations else cell.registration_until,
                join_until=_nearer(cell.join_until),
                expect_until=_nearer(cell.expect_until),
            )
            for key, cell in other.cells.items()
        }
    elif isinstance(other, ConsumerScheduler):
        other.store.cells = {
            key: msgspec.structs.replace(
                cell,
                deadline_until=_nearer(cell.deadline_until),
                stall_until=_nearer(cell.stall_until),
                cancel_at=_nearer(cell.cancel_at),
                reclaim_until=_nearer(cell.reclaim_until),
            )
            for key, cell in other.cells.items()
        }
        for peer in other.store.peers.values():
            peer.last_seen = {address: _nearer(at) for address, at in peer.last_seen.items()}
            peer.sync_at = None if peer.sync_at is None else _nearer(peer.sync_at)
    elif isinstance(other, ConsumerRank):
        reading = other.reading
        reading.reads = {
            op: msgspec.structs.replace(read, begun_at=_nearer(read.begun_at)) for op, read in reading.reads.items()
        }
        reading.kept = {
            peer: {request_id: _nearer(at) for request_id, at in kept.items()} for peer, kept in reading.kept.items()
        }
    return other


def _nearer(at: Instant) -> Instant:
    return at if at >= NEVER else max(at - 1, LONG_AGO)

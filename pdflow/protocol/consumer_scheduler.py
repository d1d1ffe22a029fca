"""The endpoint of D's scheduler: mints sequence numbers, watches over its prefill engines, and says what D wants.

It decides when a prefill engine is suspect or dead, and what is said in SYNC. How a changed cell is put back or buried,
and who must wait for an engine at its block limit, stands in `consumer_cells`; what a request does in each phase, in
`consumer_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.protocol.consumer import (
    HELD,
    QUARANTINED,
    QUEUED,
    WAITING,
    Admission,
    CancelDue,
    CellEvent,
    ConsumerCell,
    PeerReborn,
    ReclaimDue,
    RequestDoomed,
    order_fences,
)
from pdflow.protocol.consumer_cells import ConsumerCells, PrefillPeer
from pdflow.protocol.consumer_rules import deadline_of
from pdflow.protocol.effects import NOTHING, Effect, Effects, Enqueue, Note, Tell
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import (
    ConsumerSchedulerEvent,
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    FrameOrdered,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerFenced,
    PeerHeard,
    PeerRestarted,
    PrefillLegEnded,
    TimeReached,
    TimerFired,
)
from pdflow.protocol.ids import Reg, engine_of, rank_address
from pdflow.protocol.messages import Code, Heartbeat, Message, Sync
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import EngineId, Instant, RequestId


class ConsumerScheduler(ConsumerCells):
    """One decode engine's scheduler half of the protocol."""

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ()

    def handle(self, event: ConsumerSchedulerEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        return self.deadlines.wake_at()

    # From the engine.

    def _queued(self, event: DecodeQueued, now: Instant) -> Effects:
        request_id, params = event.request_id, event.params
        if request_id in self.cells:
            raise LocalProtocolError(f"request {request_id!r} is queued already; every attempt needs an id of its own")
        info = params.prefill
        peer = self.peers.get(info.engine)
        if peer is None:
            peer = self.peers[info.engine] = PrefillPeer(info)
        if peer.sync_at is not None and peer.sync_at < now and not peer.requests:
            # Overdue, since a driver may stand still while nothing is open. Judged behind this request, a silence in
            # which P was never asked would be its death.
            self._sync_due(peer, now)
        timers = self.context.timers
        wanted = event.deadline_ns or timers.deadline_ns
        dialect = self.context.dialect
        if dialect.watchdog_resolves and not dialect.control_frames and not self.context.pulls:
            wanted = min(wanted, timers.watchdog_ns)
        until = now + wanted
        held = bool(peer.held) or not self._has_room(peer, event.num_blocks, now)
        self.cells[request_id] = ConsumerCell(HELD if held else QUEUED, request_id, params, event.num_blocks, until)
        peer.requests[request_id] = None
        self.deadlines.push(until, Timer(TimerKind.DEADLINE, request_id))
        if peer.sync_at is None:
            self._touch(peer, now)
        if held:
            peer.held.append(request_id)
            return NOTHING
        peer.blocks += event.num_blocks
        return (Enqueue(request_id),)

    def _admitted(self, event: DecodeAdmitted, now: Instant) -> Effects:
        cell = self.cells.get(event.request_id)
        if cell is None or cell.phase is not QUEUED:
            raise LocalProtocolError(f"request {event.request_id!r} was admitted, but it is not queued")
        engine = self.context.engine.engine
        if self.context.dialect.control_frames:
            reg = Reg(engine, self.incarnation, self.next_seq, event.request_id)
            self.seqs.append(self.next_seq)
            self.next_seq += 1
        else:
            reg = Reg(engine, 0, 0, event.request_id)
        if self.context.floor != self.floor:
            self.context = msgspec.structs.replace(self.context, floor=self.floor)
        return self._apply(cell, Admission(reg, event), now)

    def _for_cell(self, event: DecodeHit | DecodeAborted | PrefillLegEnded, now: Instant) -> Effects:
        cell = self.cells.get(event.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        return self._apply(cell, event, now)

    # From the ranks.

    def _for_pair(self, event: PairReported | PairLanded | PairFailed, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        peer = self.peers[cell.params.prefill.engine]
        if event.sender in peer.heard:
            peer.heard[event.sender] = now
        return self._apply(cell, event, now)

    def _missing(self, event: PairMissing, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg.request_id)
        return NOTHING if cell is None else self._apply(cell, event, now)

    def _heard(self, event: PeerHeard, now: Instant) -> Effects:
        peer = self.peers.get(engine_of(event.peer))
        if peer is not None and event.peer in peer.heard:
            peer.heard[event.peer] = now
        return NOTHING

    def _to_all_of(self, engine: EngineId, event: CellEvent, now: Instant) -> Effects:
        peer = self.peers.get(engine)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests) if peer is not None else ():
            cell = self.cells.get(request_id)
            if cell is not None and (cell.phase, type(event)) != (HELD, PeerFenced):
                effects += self._apply(cell, event, now)
        return tuple(effects)

    def _fenced(self, event: PeerFenced, now: Instant) -> Effects:
        return self._to_all_of(engine_of(event.peer), event, now)

    def _restarted(self, event: PeerRestarted, now: Instant) -> Effects:
        """Every rank reports it; the first report counts, so that what registers with the new life is left alone."""
        life = (event.engine, event.retired)
        peer = self.peers.get(event.engine)
        if life in self.retired or peer is None:
            return NOTHING
        self.retired.add(life)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests):
            cell = self.cells.get(request_id)
            if cell is not None:
                queued = cell.phase in (HELD, QUEUED)
                told = RequestDoomed(Code.PEER_RESTARTED) if queued else PeerReborn()
                effects += self._apply(cell, told, now)
        return tuple(effects)

    # Time.

    def _time_reached(self, event: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.deadlines.first_due(now, self.deadline)) is not None:
            effects += self._timer_fired(TimerFired(timer), now)
        return tuple(effects)

    def deadline(self, timer: Timer) -> Instant | None:
        """When an armed timer is due."""
        if timer.kind is TimerKind.SYNC:
            return self.peers[str(timer.key)].sync_at
        cell = self.cells.get(str(timer.key))
        return None if cell is None else deadline_of(cell, timer.kind)

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        kind, key = event.timer.kind, str(event.timer.key)
        if kind is TimerKind.SYNC:
            return self._sync_due(self.peers[key], now)
        cell = self.cells.get(key)
        if cell is None:
            return (Note("consumer: timer of a dead cell"),)
        told: CellEvent
        if kind is TimerKind.CANCEL:
            told = CancelDue()
        elif kind is TimerKind.RECLAIM:
            told = ReclaimDue()
        else:
            told = RequestDoomed(Code.DEADLINE if kind is TimerKind.DEADLINE else Code.STALLED)
        return self._apply(cell, told, now)

    # Whether a peer shows life, and what it is told.

    def _touch(self, peer: PrefillPeer, now: Instant) -> None:
        """Something is open towards this peer: from now on it must show life, and be told what we want."""
        # A rank that moves nothing (a replica of another's heads) is never asked, so its silence means nothing.
        for rank in self._writers(peer):
            peer.heard[rank_address(peer.info.engine, rank)] = now
        self._arm_sync(peer, now)

    def _writers(self, peer: PrefillPeer) -> tuple[int, ...]:
        try:
            pairs = self.context.geometry.pairs(peer.info.shards, self.context.engine.shards)
        except ValueError:
            return ()
        return tuple(dict.fromkeys(p_rank for p_rank, _ in pairs))

    def _arm_sync(self, peer: PrefillPeer, now: Instant) -> None:
        timers = self.context.timers
        peer.sync_at = now + (timers.sync_ns if self.context.dialect.control_frames else timers.heartbeat_ns)
        self.deadlines.push(peer.sync_at, Timer(TimerKind.SYNC, peer.info.engine))

    def _sync_due(self, peer: PrefillPeer, now: Instant) -> Effects:
        """Once a second while something is open: say what we want, and judge who has been silent for too long."""
        if not peer.requests or self._all_given_up(peer):
            peer.sync_at = None
            peer.heard.clear()
            return NOTHING
        effects = self._judge(peer, now) if self.context.dialect.control_frames else NOTHING
        self._arm_sync(peer, now)
        if peer.held:
            # Who was kept out because this peer was suspect has nobody else's end to wait for.
            effects += self._make_room(peer, now)
        return effects + self._sync(peer)

    def _all_given_up(self, peer: PrefillPeer) -> bool:
        """vllm-stock: there is nothing more to say of requests whose blocks nothing but a completion frees."""
        if self.context.dialect.quarantine_ends:
            return False
        return all(self.cells[request_id].phase is QUARANTINED for request_id in peer.requests)

    def _judge(self, peer: PrefillPeer, now: Instant) -> Effects:
        dead = self.context.timers.dead_ns
        silent = frozenset(rank for rank, heard in peer.heard.items() if now - heard >= dead)
        if not silent:
            return NOTHING
        effects: list[Effect] = [*self._to_all_of(peer.info.engine, RequestDoomed(Code.PEER_DEAD), now)]
        for request_id in peer.requests:
            cell = self.cells[request_id]
            if cell.phase is QUARANTINED:
                effects += order_fences(cell, silent, self.context)
        return tuple(effects)

    def _sync(self, peer: PrefillPeer) -> Effects:
        cells = [self.cells[request_id] for request_id in peer.requests]
        message: Message
        if self.context.dialect.control_frames:
            peer.synced += 1
            # A pulling D has no registrations: what it reads it must keep P interested in.
            pulls = self.context.pulls
            interest = tuple(c.params.xid for c in cells if c.phase in (HELD, QUEUED) or (pulls and c.phase is WAITING))
            open_regs = () if pulls else tuple(c.reg for c in cells if c.phase in (WAITING, QUARANTINED))
            message = Sync(peer.synced, self.floor, interest, open_regs)
        else:
            # C6: a resolved request is not renewed, or P and D would pin each other for ever (L4).
            message = Heartbeat(tuple([self._prefill_id(c) for c in cells if c.phase is not QUARANTINED]))
            if not message.request_ids:
                return NOTHING
        context = self.context
        effects: list[Effect] = []
        for rank, address in enumerate(context.ranks):
            try:
                sources = context.geometry.sources(rank, peer.info.shards, context.engine.shards)
            except ValueError:
                continue
            to = tuple(rank_address(peer.info.engine, p_rank) for p_rank in sources)
            effects.append(Tell(address, FrameOrdered(to, message)))
        return tuple(effects)

    def _prefill_id(self, cell: ConsumerCell) -> RequestId:
        """What a heartbeat calls this request's prompt. P's answer, which names blocks, brings P's own id of it; a vLLM
        proxy that did not wait for that gives one of its own (R05)."""
        params = cell.params
        return params.request_id if params.blocks or self.context.dialect.knows_prefill_id else params.xid


_ON: dict[type, Callable[[Any, Any, Instant], Effects]] = {
    DecodeQueued: ConsumerScheduler._queued,
    DecodeAdmitted: ConsumerScheduler._admitted,
    DecodeHit: ConsumerScheduler._for_cell,
    DecodeAborted: ConsumerScheduler._for_cell,
    PrefillLegEnded: ConsumerScheduler._for_cell,
    PairReported: ConsumerScheduler._for_pair,
    PairLanded: ConsumerScheduler._for_pair,
    PairFailed: ConsumerScheduler._for_pair,
    PairMissing: ConsumerScheduler._missing,
    PeerHeard: ConsumerScheduler._heard,
    PeerFenced: ConsumerScheduler._fenced,
    PeerRestarted: ConsumerScheduler._restarted,
    TimeReached: ConsumerScheduler._time_reached,
    TimerFired: ConsumerScheduler._timer_fired,
}

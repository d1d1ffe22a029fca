"""The endpoint of one P rank: owns its cells, finds the one that an event names, and steps it.

`handle(event, now)` is the only door for changes. Here stands what its scheduler, its transport and time have to say;
what D's frames do is in `producer_frames`, how a changed cell is put back or buried in `producer_cells`. None of the
three decides anything about a transfer: those rules are in `producer` and `lease`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.protocol.effects import NOTHING, Effect, Effects, Note, Tell
from pdflow.protocol.events import (
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PeerExited,
    PeerLost,
    PrefillEnded,
    PrefillWanted,
    ProducerRankEvent,
    Received,
    SourceCompleted,
    SourceReady,
    SourceWithdrawn,
    TimeReached,
    TimerFired,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.ids import Reg, engine_of, rank_of
from pdflow.protocol.messages import Code
from pdflow.protocol.producer import (
    IN_FLIGHT,
    OPEN,
    READY,
    SETTLING,
    Connected,
    JoinEnded,
    LeaseEnded,
    PeerQuiet,
    ProducerCell,
    RegistrationRefused,
    RegistrationRetired,
    ShardTaken,
)
from pdflow.protocol.producer_cells import Key
from pdflow.protocol.producer_frames import ProducerFrames
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, EngineId, Instant, Xid


class ProducerRank(ProducerFrames):
    """One prefill rank's half of the protocol."""

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ()

    def handle(self, event: ProducerRankEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        return self.deadlines.wake_at()

    # From the scheduler of this engine.

    def _source_ready(self, event: SourceReady, now: Instant) -> Effects:
        xid = event.xid
        timers = self.contexts[0].timers
        unwanted = xid in self.early
        if unwanted:
            del self.early[xid]
        takers = None
        if self.early_takers:
            takers = self.early_takers.pop(xid if self.contexts[0].dialect.matches_by_xid else event.request_id, None)
        keys = self.keys.get(xid, ())
        if not keys and not self.contexts[0].dialect.matches_by_xid:
            keys = self._adopt(event)
        if not self.contexts[0].dialect.matches_by_xid:
            self.matching.add_product(xid, event.request_id)
            if keys and not self.contexts[0].dialect.prompts_serve_again:
                self.matching.spend(xid, event.request_id)
        if event.source.complete:
            self.deadlines.push(now + timers.lease_ns, Timer(TimerKind.LEASE, xid))
        until = now + timers.release_lease_ns if unwanted else now + timers.lease_ns if event.source.complete else NEVER
        if keys:
            effects: Effects = NOTHING
            for key in keys:
                cell = self.cells[key]
                effects += self._apply(key, cell, event, now, self._connected(cell, event))
            return effects + self._shorten(xid, until) if unwanted else effects
        cell = ProducerCell(OPEN, xid).becoming_leased(event.source, event.request_id, until)
        self.cells[xid] = cell
        self.keys[xid] = (xid,)
        if unwanted:
            self.deadlines.push(until, Timer(TimerKind.LEASE, xid))
        return NOTHING if takers is None else self._take_early(xid, takers, now)

    def _source_completed(self, event: SourceCompleted, now: Instant) -> Effects:
        self.deadlines.push(now + self.contexts[0].timers.lease_ns, Timer(TimerKind.LEASE, event.xid))
        effects: Effects = NOTHING
        for key in self.keys.get(event.xid, ()):
            effects += self._apply(key, self.cells[key], event, now)
        return effects

    def _take_early(self, xid: Xid, takers: dict[int, int], now: Instant) -> Effects:
        """Each reader that was quicker than this rank counts for itself: a sibling of it may still be reading."""
        effects: Effects = NOTHING
        for d_rank, readers in takers.items():
            cell = self.cells.get(xid)
            if cell is not None:
                effects += self._apply(xid, cell, ShardTaken(d_rank, readers), now)
        return effects

    def _adopt(self, event: SourceReady) -> tuple[Key, ...]:
        """vllm-compat: a registration without an xid finds its product by request id."""
        reg = self.matching.registration_of(event.request_id)
        if reg is None:
            return ()
        self.matching.drop_registration(reg)
        cell = self.cells[reg]
        self._rekey(cell.xid, reg, None)
        self.cells[reg] = msgspec.structs.replace(cell, xid=event.xid)
        self.keys[event.xid] = (reg,)
        return (reg,)

    def _prefill_ended(self, event: PrefillEnded, now: Instant) -> Effects:
        effects: Effects = NOTHING
        self.early.pop(event.xid, None)
        for key in self.keys.get(event.xid, ()):
            effects += self._apply(key, self.cells[key], event, now)
        self._remember_dead(event.xid, event.code)
        return effects

    # From the transport.

    def _handshake_ended(self, event: HandshakeEnded, now: Instant) -> Effects:
        peer = event.peer
        if not event.ok:
            self.peers.refused(peer, now, self.contexts[0].timers)
            return self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
        before = self.peers.answered(peer, event.incarnation)
        effects: Effects = NOTHING
        if before is not None:
            effects = self._retire(engine_of(peer), before, now)
        if engine_of(peer) in self.peers.duplicates:
            refused = self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
            return (Note("producer: DUPLICATE_ENGINE_ID"), *effects, *refused)
        return effects + self._to_waiting(peer, Connected(), now)

    def _to_waiting(self, peer: Address, event: Connected | RegistrationRefused, now: Instant) -> Effects:
        effects: list[Effect] = []
        for reg in self.waiting.pop(peer, ()):
            cell = self.cells.get(reg)
            if cell is None or cell.phase is not READY:
                continue
            if type(event) is Connected and not self._connected(cell, event):
                # Another of its ranks was lost meanwhile, or is still being connected.
                effects += self._connect(cell, now)
                continue
            effects += self._apply(reg, cell, event, now, True)
        return tuple(effects)

    def _retire(self, engine: EngineId, incarnation: int, now: Instant) -> Effects:
        if not self.contexts[0].dialect.registrations_end:
            return NOTHING
        effects: list[Effect] = []
        tombs = self.tombs.get(engine)
        if tombs is not None and tombs.incarnation == incarnation:
            del self.tombs[engine]
        for key in tuple(self.cells):
            if isinstance(key, Reg) and key.engine == engine and key.incarnation in (incarnation, 0):
                cell = self.cells[key]
                effects += self._apply(key, cell, RegistrationRetired(), now)
        return tuple(effects)

    def _peer_exited(self, event: PeerExited, now: Instant) -> Effects:
        self.peers.lost(event.peer)
        engine = engine_of(event.peer)
        return self._retire(engine, self.peers.incarnations.get(engine, 0), now)

    def _peer_lost(self, event: PeerLost, now: Instant) -> Effects:
        self.peers.lost(event.peer)
        return NOTHING

    def _write_ended(self, event: WriteEnded | WriteStopped, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg)
        if cell is None:
            return (Note("producer: WRITE ended for nothing"),)
        return self._apply(event.op.reg, cell, event, now)

    def _quiet(self, event: FlushEnded | FenceEnded, now: Instant) -> Effects:
        if type(event) is FlushEnded:
            return self._flushed(event, now)
        self.peers.lost(event.peer)
        told = PeerQuiet(rank_of(event.peer), True, True)
        engine = engine_of(event.peer)
        effects: list[Effect] = []
        for key in tuple(self.cells):
            if isinstance(key, Reg) and key.engine == engine:
                cell = self.cells[key]
                open_there = bool(cell.flying & 1 << told.d_rank)
                if (cell.phase is SETTLING and open_there) or (cell.phase is IN_FLIGHT and not open_there):
                    effects += self._apply(key, cell, told, now)
        return tuple(effects)

    def _flushed(self, event: FlushEnded, now: Instant) -> Effects:
        """Flushes of one link end in their order. Each speaks of what was posted before it: of its own cell alone."""
        waiting = self.flushes.get(event.peer, ())
        if len(waiting) > 1:
            self.flushes[event.peer] = waiting[1:]
        else:
            self.flushes.pop(event.peer, None)
        cell = self.cells.get(waiting[0]) if waiting else None
        d_rank = rank_of(event.peer)
        if cell is None or cell.phase is not SETTLING or not cell.flying >> d_rank & 1:
            return (Note("producer: flush ended for nothing"),)
        return self._apply(waiting[0], cell, PeerQuiet(d_rank, event.ok, False), now)

    # Time.

    def _time_reached(self, event: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.deadlines.first_due(now, self.deadline)) is not None:
            effects += self._timer_fired(TimerFired(timer), now)
        return tuple(effects)

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        kind, key = event.timer.kind, event.timer.key
        if kind is TimerKind.LEASE:
            return self._lease_over(str(key), now)
        cell_or_none = self.cells.get(key) if isinstance(key, Reg) else None
        if cell_or_none is None or not isinstance(key, Reg):
            return (Note("producer: timer of a dead cell"),)
        if kind is TimerKind.GRANT and (cell_or_none.phase is not OPEN or cell_or_none.expect_until > now):
            return self._apply(key, cell_or_none, RegistrationRefused(Code.EXPIRED), now)
        if kind is TimerKind.JOIN:
            return self._apply(key, cell_or_none, JoinEnded(), now, self._connected(cell_or_none, JoinEnded()))
        # One timer stands for both: an open registration's prompt is asked for first, its grant judged after that.
        self.cells[key] = cell_or_none.expecting(NEVER)
        self.deadlines.push(cell_or_none.grant_until, Timer(TimerKind.GRANT, key))
        return (Tell(self.scheduler, PrefillWanted(cell_or_none.xid, self.contexts[0].rank)),)

    def _lease_over(self, xid: Xid, now: Instant) -> Effects:
        effects: Effects = NOTHING
        for key in self.keys.get(xid, ()):
            cell = self.cells[key]
            if cell.source is not None and not cell.expired:
                effects += self._apply(key, cell, LeaseEnded(), now)
        return effects

    def _withdrawn(self, event: SourceWithdrawn, now: Instant) -> Effects:
        return self._lease_over(event.xid, now)


_ON: dict[type, Callable[[Any, Any, Instant], Effects]] = {
    SourceReady: ProducerRank._source_ready,
    SourceWithdrawn: ProducerRank._withdrawn,
    SourceCompleted: ProducerRank._source_completed,
    PrefillEnded: ProducerRank._prefill_ended,
    Received: ProducerRank._received,
    HandshakeEnded: ProducerRank._handshake_ended,
    PeerLost: ProducerRank._peer_lost,
    PeerExited: ProducerRank._peer_exited,
    WriteEnded: ProducerRank._write_ended,
    WriteStopped: ProducerRank._write_ended,
    FlushEnded: ProducerRank._quiet,
    FenceEnded: ProducerRank._quiet,
    TimeReached: ProducerRank._time_reached,
    TimerFired: ProducerRank._timer_fired,
}

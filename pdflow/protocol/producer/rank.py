"""The endpoint of one P rank: finds the cell that an event names, and has its store step it.

`handle(event, now)` is the only entry point. The events of its scheduler, its transport and time are handled here, D's
frames in `producer.frames`; how a changed cell is stored or removed is in `producer.cells`. None of the three
decides anything about a transfer: those rules are in `producer.writes` and `lease`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias, TypeVar, cast

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.effects import NOTHING, Effect, Effects, Note, SendLocal
from pdflow.protocol.events import (
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PeerExited,
    PeerLost,
    PrefillEnded,
    PrefillMissing,
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
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    OPEN,
    READY,
    SETTLING,
    Connected,
    JoinEnded,
    PeerQuiet,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
    RegistrationRetired,
    ShardTaken,
)
from pdflow.protocol.producer.cells import Key, ProducerCells
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, EngineId, Instant, Xid


class ProducerRank:
    """The endpoint of one prefill rank.

    Args:
        engine: this engine's id.
        incarnation: of this engine. No rule reads it: it distinguishes two ranks that began alike.
        context: which rank it is, its dialect, timers and geometry, and what its transport and method can do.
        store: the state to continue from; None for an empty store.
    """

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ("frames", "incarnation", "store")

    def __init__(
        self, engine: EngineId, incarnation: int, context: ProducerContext, store: ProducerCells | None = None
    ) -> None:
        self.incarnation = incarnation
        self.store = ProducerCells(engine, context) if store is None else store
        self.frames = ProducerFrames(self.store)

    @property
    def cells(self) -> Mapping[Key, ProducerCell]:
        """Every transfer that this rank remembers. Only the store changes it."""
        return self.store.cells

    @property
    def peers(self) -> Peers:
        """The peers of this rank, connected or not."""
        return self.store.peers

    @property
    def deadlines(self) -> Deadlines:
        """The heap of deadlines, from which a driver reads when to wake this rank."""
        return self.store.deadlines

    def handle(self, event: ProducerRankEvent, now: Instant) -> Effects:
        """Handle one event and return its effects."""
        if type(event) is Received:
            return self.frames.received(event, now)
        return ON[type(event)](self, event, now)

    def wake_at(self) -> Instant | None:
        return self.store.deadlines.wake_at()

    def armed(self) -> tuple[Timer, ...]:
        """Every timer that could fire, whatever the time: the choices of the untimed checker."""
        return self.store.armed()

    def deadline(self, timer: Timer) -> Instant | None:
        """When an armed timer is due."""
        return self.store.deadline(timer)

    def unfinished(self) -> Mapping[Key, ProducerCell]:
        """Every registration that is not over. To be read only."""
        return self.store.cells

    def fork(self) -> ProducerRank:
        store = self.store.fork()
        return ProducerRank(store.scheduler, self.incarnation, store.context, store)

    def fingerprint(self) -> Hashable:
        return self.store.fingerprint()

    # From the scheduler of this engine.

    def _source_ready(self, event: SourceReady, now: Instant) -> Effects:
        store, xid = self.store, event.xid
        timers, dialect = store.context.timers, store.context.dialect
        unwanted = xid in store.early
        if unwanted:
            del store.early[xid]
        early = None
        if store.early_readers:
            early = store.early_readers.pop(xid if dialect.matches_by_xid else event.request_id, None)
        keys = store.keys.get(xid, ())
        if not keys and not dialect.matches_by_xid:
            keys = self._adopt(event)
        if not dialect.matches_by_xid:
            store.matching.add_product(xid, event.request_id)
            if keys and not dialect.prompts_match_again:
                store.matching.spend(xid, event.request_id)
        if event.source.complete:
            store.deadlines.push(now + timers.lease_ns, Timer(TimerKind.LEASE, xid))
        until = now + timers.release_lease_ns if unwanted else now + timers.lease_ns if event.source.complete else NEVER
        if keys:
            effects: Effects = NOTHING
            for key in keys:
                cell = store.cells[key]
                effects += store.apply(key, cell, event, now, store.connected(cell, event))
            if unwanted:
                store.shorten(xid, until)
            return effects
        store.add(xid, ProducerCell(OPEN, xid).becoming_leased(event.source, event.request_id, until))
        if unwanted:
            store.deadlines.push(until, Timer(TimerKind.LEASE, xid))
        return NOTHING if early is None else self._take_early(xid, early, now)

    def _source_completed(self, event: SourceCompleted, now: Instant) -> Effects:
        store = self.store
        store.deadlines.push(now + store.context.timers.lease_ns, Timer(TimerKind.LEASE, event.xid))
        effects: Effects = NOTHING
        for key in store.keys.get(event.xid, ()):
            effects += store.apply(key, store.cells[key], event, now)
        return effects

    def _take_early(self, xid: Xid, early: dict[int, int], now: Instant) -> Effects:
        """Count the D ranks that read the prompt before this rank saw it finished, each for itself: another may still
        be reading."""
        effects: Effects = NOTHING
        for d_rank, readers in early.items():
            cell = self.store.cells.get(xid)
            if cell is not None:
                effects += self.store.apply(xid, cell, ShardTaken(d_rank, readers), now)
        return effects

    def _adopt(self, event: SourceReady) -> tuple[Key, ...]:
        """Match a registration without an xid with a finished prompt, by request id (vllm-compat)."""
        store = self.store
        reg = store.matching.registration_of(event.request_id)
        if reg is None:
            return ()
        store.matching.drop_registration(reg)
        store.adopt(reg, event.xid)
        return (reg,)

    def _prefill_ended(self, event: PrefillEnded, now: Instant) -> Effects:
        store = self.store
        effects: Effects = NOTHING
        store.early.pop(event.xid, None)
        for key in store.keys.get(event.xid, ()):
            effects += store.apply(key, store.cells[key], event, now)
        store.remember_dead(event.xid, event.code)
        return effects

    def _withdrawn(self, event: SourceWithdrawn, now: Instant) -> Effects:
        return self.store.end_lease(event.xid, now)

    # From the transport.

    def _handshake_ended(self, event: HandshakeEnded, now: Instant) -> Effects:
        store, peer = self.store, event.peer
        if not event.ok:
            store.peers.unreached(peer, now, store.context.timers)
            return self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
        before = store.peers.answered(peer, event.incarnation)
        effects: Effects = NOTHING
        if before is not None:
            effects = self._retire(engine_of(peer), before, now)
        if engine_of(peer) in store.peers.duplicates:
            refused = self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
            return (Note("producer: DUPLICATE_ENGINE_ID"), *effects, *refused)
        return effects + self._to_waiting(peer, Connected(), now)

    def _to_waiting(self, peer: Address, event: Connected | RegistrationRefused, now: Instant) -> Effects:
        store = self.store
        effects: list[Effect] = []
        for reg in store.waiting.pop(peer, ()):
            cell = store.cells.get(reg)
            if cell is None or cell.phase is not READY:
                continue
            if type(event) is Connected and not store.connected(cell, event):
                # Another of its ranks was lost meanwhile, or is still being connected.
                effects += store.connect(cell, now)
                continue
            effects += store.apply(reg, cell, event, now, True)
        return tuple(effects)

    def _retire(self, engine: EngineId, incarnation: int, now: Instant) -> Effects:
        store = self.store
        if not store.context.dialect.registrations_end:
            return NOTHING
        effects: list[Effect] = []
        tombs = store.tombs.get(engine)
        if tombs is not None and tombs.incarnation == incarnation:
            del store.tombs[engine]
        for key in tuple(store.cells):
            if isinstance(key, Reg) and key.engine == engine and key.incarnation in (incarnation, 0):
                effects += store.apply(key, store.cells[key], RegistrationRetired(), now)
        return tuple(effects)

    def _peer_exited(self, event: PeerExited, now: Instant) -> Effects:
        peers = self.store.peers
        peers.lost(event.peer)
        engine = engine_of(event.peer)
        return self._retire(engine, peers.incarnations.get(engine, 0), now)

    def _peer_lost(self, event: PeerLost, now: Instant) -> Effects:
        self.store.peers.lost(event.peer)
        return NOTHING

    def _write_ended(self, event: WriteEnded | WriteStopped, now: Instant) -> Effects:
        reg = event.op.reg
        cell = self.store.cells.get(reg)
        if cell is None:
            return (Note("producer: WRITE ended for nothing"),)
        return self.store.apply(reg, cell, event, now)

    def _fenced(self, event: FenceEnded, now: Instant) -> Effects:
        store = self.store
        store.peers.lost(event.peer)
        peer_quiet = PeerQuiet(rank_of(event.peer), True, True)
        engine = engine_of(event.peer)
        effects: list[Effect] = []
        for key in tuple(store.cells):
            if isinstance(key, Reg) and key.engine == engine:
                cell = store.cells[key]
                open_there = bool(cell.in_flight_mask & 1 << peer_quiet.d_rank)
                if (cell.phase is SETTLING and open_there) or (cell.phase is IN_FLIGHT and not open_there):
                    effects += store.apply(key, cell, peer_quiet, now)
        return tuple(effects)

    def _flushed(self, event: FlushEnded, now: Instant) -> Effects:
        """Handle the end of a flush. Flushes of one link end in order, and each counts for its own cell alone."""
        store = self.store
        waiting = store.flushes.get(event.peer, ())
        if len(waiting) > 1:
            store.flushes[event.peer] = waiting[1:]
        else:
            store.flushes.pop(event.peer, None)
        cell = store.cells.get(waiting[0]) if waiting else None
        d_rank = rank_of(event.peer)
        if cell is None or cell.phase is not SETTLING or not cell.in_flight_mask >> d_rank & 1:
            return (Note("producer: flush ended for nothing"),)
        return store.apply(waiting[0], cell, PeerQuiet(d_rank, event.ok, False), now)

    # Time.

    def _time_reached(self, _: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.store.first_due(now)) is not None:
            effects += self._fire(timer, now)
        return tuple(effects)

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        return self._fire(event.timer, now)

    def _fire(self, timer: Timer, now: Instant) -> Effects:
        store, kind, key = self.store, timer.kind, timer.key
        if kind is TimerKind.LEASE:
            return store.end_lease(str(key), now)
        if not isinstance(key, Reg) or (cell := store.cells.get(key)) is None:
            return (Note("producer: timer of a dead cell"),)
        if kind is TimerKind.REGISTRATION and (cell.phase is not OPEN or cell.expect_until > now):
            return store.apply(key, cell, RegistrationRefused(Code.EXPIRED), now)
        if kind is TimerKind.JOIN:
            return store.apply(key, cell, JoinEnded(), now, store.connected(cell, JoinEnded()))
        # One timer stands for both: an open registration's prompt is asked for first, its grant judged after that.
        store.update(key, cell.expecting(NEVER))
        store.deadlines.push(cell.registration_until, Timer(TimerKind.REGISTRATION, key))
        return (SendLocal(store.scheduler, PrefillMissing(cell.xid, store.context.rank)),)


Handler: TypeAlias = Callable[[ProducerRank, ProducerRankEvent, Instant], Effects]
"""A handler as the table stores it: it is called only with events of its row."""
E = TypeVar("E", bound=ProducerRankEvent)


def _on(kind: type[E], handler: Callable[[ProducerRank, E, Instant], Effects]) -> tuple[type, Handler]:
    """A row of the table. That the handler takes this kind of event is checked by its types."""
    return kind, cast(Handler, handler)


ON: Final[dict[type, Handler]] = dict(
    (
        _on(SourceReady, ProducerRank._source_ready),
        _on(SourceCompleted, ProducerRank._source_completed),
        _on(SourceWithdrawn, ProducerRank._withdrawn),
        _on(PrefillEnded, ProducerRank._prefill_ended),
        _on(HandshakeEnded, ProducerRank._handshake_ended),
        _on(PeerLost, ProducerRank._peer_lost),
        _on(PeerExited, ProducerRank._peer_exited),
        _on(WriteEnded, ProducerRank._write_ended),
        _on(WriteStopped, ProducerRank._write_ended),
        _on(FlushEnded, ProducerRank._flushed),
        _on(FenceEnded, ProducerRank._fenced),
        _on(TimeReached, ProducerRank._time_reached),
        _on(TimerFired, ProducerRank._timer_fired),
    )
)
"""The handler of each kind of event but `Received`, the most frequent, which goes directly to the object for frames."""

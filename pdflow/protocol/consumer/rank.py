"""The endpoint of one D rank: connects, sends what the scheduler orders, and reports what arrives.

It owns its connections and the frames that wait for one. What a peer's frame means stands in `consumer.frames`, and
what becomes of a READ in `consumer.reads`, each with the state that it needs; this endpoint owns one of either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias, TypeVar, cast

from pdflow.protocol.consumer.frames import ON_FRAME, ConsumerFrames
from pdflow.protocol.consumer.reads import ConsumerReads, ReadCell
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effects, Fence, Handshake, Note, Send, SendLocal
from pdflow.protocol.events import (
    ConnectionLost,
    ConsumerRankEvent,
    FenceEnded,
    FenceOrdered,
    FrameOrdered,
    HandshakeEnded,
    PairFailed,
    PeerExited,
    PeerFenced,
    PeerLost,
    PeerRestarted,
    ReadEnded,
    ReadOrdered,
    Received,
    ReconnectRefused,
    TimeReached,
    TimerFired,
    WordRead,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Op, engine_of, rank_address, rank_of
from pdflow.protocol.messages import Cancel, Code, Heartbeat, Message, Register, Sync
from pdflow.protocol.peers import Peers
from pdflow.protocol.timers import Timer, Timers
from pdflow.protocol.values import Address, Instant, in_order


class ConsumerRank:
    """The endpoint of one decode rank: executes its scheduler's orders and reports peers' frames and READs."""

    timed = False
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = (
        "dialect",
        "engine",
        "fencing",
        "frames",
        "geometry",
        "incarnation",
        "me",
        "newest",
        "peers",
        "pending",
        "rank",
        "reading",
        "scheduler",
        "timers",
    )

    def __init__(
        self,
        engine: EngineInfo,
        rank: int,
        incarnation: int,
        dialect: Dialect,
        timers: Timers,
        geometry: Geometry,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.incarnation = incarnation
        self.dialect = dialect
        self.timers = timers
        self.geometry = geometry
        self.me = rank_address(engine.engine, rank)
        self.scheduler: Address = engine.engine
        self.peers = Peers(dialect)
        self.fencing: set[Address] = set()
        """Peers that are being fenced; none of them is connected again before its fence has ended."""
        self.pending: dict[Address, tuple[Message, ...]] = {}
        """Frames that wait for a connection."""
        self.newest = 0
        """The `seq` of the newest registration that this rank has received from its scheduler."""
        self.frames = ConsumerFrames(engine, rank, incarnation, dialect)
        self.reading = ConsumerReads(engine, rank, dialect, timers, geometry)

    # What every endpoint has.

    def handle(self, event: ConsumerRankEvent, now: Instant) -> Effects:
        """Handle one event and return its effects."""
        return ON[type(event)](self, event, now)

    def wake_at(self) -> Instant | None:
        return None

    def armed(self) -> tuple[Timer, ...]:
        return ()

    @property
    def reads(self) -> Mapping[Op, ReadCell]:
        """Every READ that is open. To be read only."""
        return self.reading.reads

    def unfinished(self) -> Mapping[Op, ReadCell]:
        """Every READ that is open. To be read only."""
        return self.reading.reads

    def fork(self) -> ConsumerRank:
        other = ConsumerRank(self.engine, self.rank, self.incarnation, self.dialect, self.timers, self.geometry)
        other.peers = self.peers.fork()
        other.fencing = self.fencing.copy()
        other.pending = self.pending.copy()
        other.newest = self.newest
        other.frames = self.frames.fork()
        other.reading = self.reading.fork()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state, in a fixed order that the digests of recorded counterexamples depend on."""
        reads, waiting, kept = self.reading.fingerprint()
        synced, awaited = self.frames.fingerprint()
        return (
            self.peers.fingerprint(),
            in_order(self.pending.items()),
            reads,
            waiting,
            synced,
            kept,
            in_order(self.fencing),
            self.newest,
            awaited,
        )

    # Orders of the scheduler.

    def _frame_ordered(self, event: FrameOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        message = event.message
        if type(message) is Register:
            self.newest = max(self.newest, message.reg.seq)
            if self.frames.counts:
                self.frames.registered(message, event.to)
        elif type(message) is Heartbeat:
            self.reading.keep(event.to, message, now)
        for peer in event.to:
            if peer in self.peers.connected:
                effects += self._sending(peer, message, now)
            else:
                effects += self._defer(peer, message, now)
        return effects

    def _sending(self, peer: Address, message: Message, now: Instant) -> Effects:
        if type(message) is Sync:
            self.frames.sync_sent(peer, message)
        elif type(message) is Heartbeat:
            self.reading.beat(peer, message, now)
        return (Send(peer, message),)

    def _defer(self, peer: Address, message: Message, now: Instant) -> Effects:
        """Queue a frame until its peer is connected: in order, of SYNCs only the newest, of a CANCEL no repetition.

        A heartbeat is not kept. It would extend leases later than the scheduler, which counts from its order, assumes;
        when a quarantine is reclaimed rests on that (found by the search with clocks).
        """
        if not self.peers.may_try(peer, now):
            return self._undeliverable(peer, message)
        if type(message) is Heartbeat:
            return self._connect(peer)
        kept = self.pending.get(peer, ())
        if type(message) is Sync:
            kept = tuple(m for m in kept if type(m) is not Sync)
        if not (isinstance(message, Cancel) and any(type(m) is Cancel and m.reg == message.reg for m in kept)):
            self.pending[peer] = (*kept, message)
        return self._connect(peer)

    def _undeliverable(self, peer: Address, message: Message) -> Effects:
        """Report a REG that cannot be sent as a failed pair; every other frame is repeated by its own timer."""
        if type(message) is Register:
            self.frames.unregistered(message)
            op = Op(message.reg, rank_of(peer), self.rank)
            return (SendLocal(self.scheduler, PairFailed(op, peer, Code.UNREACHABLE, True, True)),)
        return (Note("consumer: frame to an unreachable peer"),)

    def _fence_ordered(self, event: FenceOrdered, now: Instant) -> Effects:
        if event.peer in self.fencing:
            return NOTHING
        self.fencing.add(event.peer)
        self.peers.lost(event.peer)
        return (Fence(event.peer),)

    def _read_ordered(self, event: ReadOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        self.newest = max(self.newest, event.registration.reg.seq)
        for source, readers in zip(event.sources, event.readers, strict=True):
            op = Op(event.registration.reg, rank_of(source), self.rank)
            read = ReadCell(op, source, readers, event.params, event.registration, False, now)
            if source in self.peers.connected:
                effects += self.reading.post(read)
            elif self.peers.may_try(source, now):
                self.reading.wait(read)
                effects += self._connect(source)
            else:
                effects += (SendLocal(self.scheduler, PairFailed(op, source, Code.UNREACHABLE, True, True)),)
        return effects

    def _connect(self, peer: Address) -> Effects:
        if peer in self.peers.connecting or peer in self.fencing:
            return NOTHING
        self.peers.connecting.add(peer)
        return (Handshake(peer),)

    # From the transport.

    def _received(self, event: Received, now: Instant) -> Effects:
        sender, message = event.sender, event.message
        handler = ON_FRAME.get(type(message))
        if handler is None:
            return (Note(f"consumer got {type(message).__name__}"),)
        if not self.peers.current(sender, event.incarnation):
            note = Note("consumer: frame of another incarnation")
            if not self.peers.may_try(sender, now):
                return (note,)
            return (*self._connect(sender), note)
        return handler(self.frames, sender, message)

    def _read_ended(self, event: ReadEnded, now: Instant) -> Effects:
        return self.reading.ended(event, now)

    def _word_read(self, event: WordRead, now: Instant) -> Effects:
        return self.reading.word_read(event, now)

    def _handshake_ended(self, event: HandshakeEnded, now: Instant) -> Effects:
        peer = event.peer
        pending = self.pending.pop(peer, ())
        effects: Effects = NOTHING
        if not event.ok:
            lost = peer not in self.peers.connected
            self.peers.unreached(peer, now, self.timers)
            for message in pending:
                effects += self._undeliverable(peer, message)
            effects += self.reading.fail_waiting(peer, Code.UNREACHABLE)
            # Behind what has never left: what else is registered went over the connection that is lost.
            if event.refused and lost and self.dialect.refusals_resolve:
                effects += (SendLocal(self.scheduler, ReconnectRefused(peer, self.rank, self.newest)),)
            return effects
        before = self.peers.answered(peer, event.incarnation)
        if engine_of(peer) in self.peers.duplicates:
            return self._refuse_duplicate(peer, before, pending)
        if before is not None:
            # What waited here was meant for the life that is over.
            effects = (SendLocal(self.scheduler, PeerRestarted(engine_of(peer), before)),)
            effects += self.reading.fail_waiting(peer, Code.PEER_RESTARTED, event.incarnation)
            pending = tuple(m for m in pending if type(m) is not Register)
        if peer in self.fencing:
            # This connection is part of what is being closed. Only the life that its reply has shown counts (S8).
            self.peers.lost(peer)
            if pending:
                self.pending[peer] = pending
            return effects
        for message in pending:
            effects += self._sending(peer, message, now)
        return effects + self.reading.post_waiting(peer)

    def _refuse_duplicate(self, peer: Address, before: int | None, pending: tuple[Message, ...]) -> Effects:
        """Refuse a peer whose retired incarnation has answered: two engines share one id, and neither can be trusted
        (spec 1.3)."""
        effects: Effects = (Note("consumer: DUPLICATE_ENGINE_ID"),)
        if before is not None:
            effects += (SendLocal(self.scheduler, PeerRestarted(engine_of(peer), before)),)
        for message in pending:
            effects += self._undeliverable(peer, message)
        return effects + self.reading.fail_waiting(peer, Code.UNREACHABLE)

    def _peer_lost(self, event: PeerLost, now: Instant) -> Effects:
        """Have the scheduler ask again what is open: the peer may have answered over the connection that is lost."""
        peer = event.peer
        was_connected = peer in self.peers.connected
        self.peers.lost(peer)
        self.frames.connection_lost(peer)
        if was_connected and self.dialect.control_frames:
            return (SendLocal(self.scheduler, ConnectionLost(peer)),)
        return NOTHING

    def _peer_quiet(self, event: PeerExited | FenceEnded, now: Instant) -> Effects:
        """Settle all that this peer was granted: it has died or is fenced, so no registration queued for it may be
        sent."""
        peer = event.peer
        if not self.dialect.quarantine_ends:
            return (Note("consumer: death of a peer is ignored"),)
        self.peers.lost(peer)
        self.fencing.discard(peer)
        self.reading.drop_waiting(peer)
        kept = tuple(m for m in self.pending.pop(peer, ()) if type(m) is not Register)
        effects: Effects = (SendLocal(self.scheduler, PeerFenced(peer, self.rank, self.newest)),)
        if kept:
            self.pending[peer] = kept
            effects += self._connect(peer)
        return effects

    def _time(self, _: TimeReached | TimerFired, now: Instant) -> Effects:
        return NOTHING


Handler: TypeAlias = Callable[[ConsumerRank, ConsumerRankEvent, Instant], Effects]
"""A handler as the table stores it: it is called only with events of its row."""
E = TypeVar("E", bound=ConsumerRankEvent)


def _on(kind: type[E], handler: Callable[[ConsumerRank, E, Instant], Effects]) -> tuple[type, Handler]:
    """A row of the table. That the handler takes this kind of event is checked by its types."""
    return kind, cast(Handler, handler)


ON: Final[dict[type, Handler]] = dict(
    (
        _on(FrameOrdered, ConsumerRank._frame_ordered),
        _on(FenceOrdered, ConsumerRank._fence_ordered),
        _on(ReadOrdered, ConsumerRank._read_ordered),
        _on(Received, ConsumerRank._received),
        _on(HandshakeEnded, ConsumerRank._handshake_ended),
        _on(PeerLost, ConsumerRank._peer_lost),
        _on(PeerExited, ConsumerRank._peer_quiet),
        _on(FenceEnded, ConsumerRank._peer_quiet),
        _on(ReadEnded, ConsumerRank._read_ended),
        _on(WordRead, ConsumerRank._word_read),
        _on(TimeReached, ConsumerRank._time),
        _on(TimerFired, ConsumerRank._time),
    )
)
"""The handler of each kind of event; tests/protocol/test_consumer_cells.py holds it against ConsumerRankEvent."""

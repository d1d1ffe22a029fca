"""The endpoint of one D rank: connects, sends what the scheduler orders, and reports what arrives.

It keeps no table of registrations: the scheduler made the cell before any rank could send its REG, so a completion can
never be early here (R26), and it names its shard by its sender, never by a count (R14). `vllm-stock` does keep one, of
how many completions each request still waits for here. Only READs have a small state of their own: `consumer_reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pdflow.protocol.consumer_reads import ConsumerReads, Read
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, Fence, Note, Send, Tell
from pdflow.protocol.events import (
    ConsumerRankEvent,
    FenceEnded,
    FenceOrdered,
    FrameOrdered,
    HandshakeEnded,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerExited,
    PeerFenced,
    PeerHeard,
    PeerLost,
    PeerRestarted,
    ReadEnded,
    ReadOrdered,
    Received,
    TimeReached,
    TimerFired,
    WordRead,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Completion,
    Done,
    Fail,
    Heartbeat,
    Message,
    Progress,
    Register,
    RegisterAck,
    Sync,
    SyncReply,
)
from pdflow.protocol.timers import Timer, Timers
from pdflow.protocol.values import Address, Instant, RequestId


class ConsumerRank(ConsumerReads):
    """One decode rank's half of the protocol."""

    timed = False
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ("awaited", "counts", "incarnation", "me", "pending", "synced")

    def __init__(
        self,
        engine: EngineInfo,
        rank: int,
        incarnation: int,
        dialect: Dialect,
        timers: Timers,
        geometry: Geometry,
    ) -> None:
        super().__init__(engine, rank, dialect, timers, geometry)
        self.me = rank_address(engine.engine, rank)
        self.incarnation = incarnation
        self.pending: dict[Address, tuple[Message, ...]] = {}
        self.synced: dict[Address, Sync] = {}
        self.counts = not (dialect.counts_senders and dialect.keeps_early)
        self.awaited: dict[RequestId, tuple[Address, ...]] = {}
        """vllm-stock: of every request registered from here, the writers whose completion has not been counted."""

    # The four doors of every endpoint.

    def handle(self, event: ConsumerRankEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        return None

    def armed(self) -> tuple[Timer, ...]:
        return ()

    def fork(self) -> ConsumerRank:
        other = ConsumerRank(self.engine, self.rank, self.incarnation, self.dialect, self.timers, self.geometry)
        other.peers = self.peers.fork()
        other.pending, other.synced = self.pending.copy(), self.synced.copy()
        other.reads, other.waiting_reads = self.reads.copy(), self.waiting_reads.copy()
        other.fencing = self.fencing.copy()
        other.newest = self.newest
        other.awaited = self.awaited.copy()
        other.kept = {peer: kept.copy() for peer, kept in self.kept.items()}
        return other

    def fingerprint(self) -> Hashable:
        return (
            self.peers.fingerprint(),
            tuple(sorted(self.pending.items())),
            tuple(sorted(self.reads.values(), key=_read_order)),
            tuple(sorted(self.waiting_reads.items())),
            tuple(sorted(self.synced.items())),
            tuple((peer, tuple(sorted(kept.items()))) for peer, kept in sorted(self.kept.items())),
            tuple(sorted(self.fencing)),
            self.newest,
            tuple(sorted(self.awaited.items())),
        )

    # Orders of the scheduler.

    def _frame_ordered(self, event: FrameOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        if type(event.message) is Heartbeat:
            self._keep(event.to, event.message, now)
        if self.counts and type(event.message) is Register:
            self.awaited[event.message.reg.request_id] = event.to
        if isinstance(event.message, Register):
            self.newest = max(self.newest, event.message.reg.seq)
        for peer in event.to:
            if peer in self.peers.connected:
                effects += self._sending(peer, event.message, now)
            else:
                effects += self._defer(peer, event.message, now)
        return effects

    def _sending(self, peer: Address, message: Message, now: Instant) -> Effects:
        kind = type(message)
        if kind is Sync and isinstance(message, Sync):
            self.synced[peer] = message
        elif kind is Heartbeat and isinstance(message, Heartbeat):
            self._beat(peer, message, now)
        return (Send(peer, message),)

    def _defer(self, peer: Address, message: Message, now: Instant) -> Effects:
        """No connection yet: keep the order of frames, of SYNCs only the newest, and of a CANCEL no repetition.

        A heartbeat is not kept. It would extend leases later than the scheduler, which counts from its order, believes;
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
        """A REG that never left cannot be answered by a write; every other frame is repeated by its own timer."""
        if type(message) is Register and isinstance(message, Register):
            op = Op(message.reg, rank_of(peer), self.rank)
            self.awaited.pop(message.reg.request_id, None)
            return (Tell(self.scheduler, PairFailed(op, peer, Code.UNREACHABLE, True)),)
        return (Note("consumer: frame to an unreachable peer"),)

    def _fence_ordered(self, event: FenceOrdered, now: Instant) -> Effects:
        if event.peer in self.fencing:
            return NOTHING
        self.fencing.add(event.peer)
        self.peers.lost(event.peer)
        return (Fence(event.peer),)

    # From the transport.

    def _received(self, event: Received, now: Instant) -> Effects:
        handler = _ON_FRAME.get(type(event.message))
        if handler is None:
            return (Note(f"consumer got {type(event.message).__name__}"),)
        if not self.peers.current(event.sender, event.incarnation):
            note = Note("consumer: frame of another incarnation")
            if not self.peers.may_try(event.sender, now):
                return (note,)
            return (*self._connect(event.sender), note)
        effects: Effects = handler(self, event.sender, event.message)
        return effects

    def _mine(self, reg: Reg) -> bool:
        """S8: what was sent for another life of this engine changes nothing here."""
        return reg.engine == self.engine.engine and reg.incarnation in (self.incarnation, 0)

    def _done(self, sender: Address, message: Done) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: DONE of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (Tell(self.scheduler, PairLanded(op, sender, message)),)

    def _completed(self, sender: Address, message: Completion) -> Effects:
        if self.counts:
            writer = self._counted(sender, message.request_id)
            if writer is None:
                return (Note("consumer: completion of an unknown request"),)
            sender = writer
        reg = Reg(self.engine.engine, 0, 0, message.request_id)
        return (Tell(self.scheduler, PairLanded(Op(reg, rank_of(sender), self.rank), sender)),)

    def _counted(self, sender: Address, request_id: RequestId) -> Address | None:
        """Whose completion this passes for: where senders are not told apart, the next writer's, whoever sent it (R14).
        None if this rank has not registered the request, or not yet (R26)."""
        awaited = self.awaited.get(request_id)
        if awaited is None:
            return sender if self.dialect.keeps_early else None
        writer = sender if self.dialect.counts_senders else awaited[0]
        rest = tuple([w for w in awaited if w != writer])
        if rest:
            self.awaited[request_id] = rest
        else:
            del self.awaited[request_id]
        return writer

    def _acknowledged(self, sender: Address, message: RegisterAck) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: REG_ACK of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        if message.targets and self.rank not in message.targets:
            return (Tell(self.scheduler, PairFailed(op, sender, Code.LAYOUT, False)),)
        return (Tell(self.scheduler, PairReported(op, sender, message.progress)),)

    def _failed(self, sender: Address, message: Fail) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: FAIL of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (Tell(self.scheduler, PairFailed(op, sender, message.code, message.flushed)),)

    def _cancel_answered(self, sender: Address, message: CancelAck) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: CANCEL_ACK of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (Tell(self.scheduler, PairFailed(op, sender, Code.CANCELLED, message.flushed)),)

    def _sync_answered(self, sender: Address, message: SyncReply) -> Effects:
        effects: list[Effect] = [Tell(self.scheduler, PeerHeard(sender))]
        p_rank = rank_of(sender)
        answered = set()
        for item in message.items:
            if not self._mine(item.reg):
                continue
            answered.add(item.reg)
            op = Op(item.reg, p_rank, self.rank)
            if item.progress is not Progress.UNKNOWN:
                effects.append(Tell(self.scheduler, PairReported(op, sender, item.progress, True)))
            elif item.code is not Code.NONE:
                effects.append(Tell(self.scheduler, PairFailed(op, sender, item.code, item.flushed)))
        asked = self.synced.get(sender)
        if asked is not None and asked.seq == message.seq:
            del self.synced[sender]
            for reg in asked.open:
                if reg not in answered:
                    effects.append(Tell(self.scheduler, PairMissing(Op(reg, p_rank, self.rank))))
        return tuple(effects)

    def _handshake_ended(self, event: HandshakeEnded, now: Instant) -> Effects:
        peer = event.peer
        waiting = self.waiting_reads.pop(peer, ())
        pending = self.pending.pop(peer, ())
        effects: Effects = NOTHING
        if not event.ok:
            self.peers.refused(peer, now, self.timers)
            for message in pending:
                effects += self._undeliverable(peer, message)
            for op in waiting:
                effects += self._read_failed(op, Code.UNREACHABLE)
            return effects
        before = self.peers.answered(peer, event.incarnation)
        if engine_of(peer) in self.peers.duplicates:
            return self._refuse_duplicate(peer, before, pending, waiting)
        if before is not None:
            # What waited here was meant for the life that is over.
            effects = (Tell(self.scheduler, PeerRestarted(engine_of(peer), before)),)
            for op in waiting:
                effects += self._read_failed(op, Code.PEER_RESTARTED)
            waiting = ()
            pending = tuple(m for m in pending if type(m) is not Register)
        if peer in self.fencing:
            self._keep_waiting(peer, pending, waiting)
            return effects
        for message in pending:
            effects += self._sending(peer, message, now)
        for op in waiting:
            effects += self._post(self.reads[op])
        return effects

    def _keep_waiting(self, peer: Address, pending: tuple[Message, ...], waiting: tuple[Op, ...]) -> None:
        """This connection is part of what is being closed. Only the life that its reply has shown counts (S8)."""
        self.peers.lost(peer)
        if pending:
            self.pending[peer] = pending
        if waiting:
            self.waiting_reads[peer] = waiting

    def _refuse_duplicate(
        self, peer: Address, before: int | None, pending: tuple[Message, ...], waiting: tuple[Op, ...]
    ) -> Effects:
        """A life that was over has answered: two engines share one id, and neither can be trusted (PROTOCOL 7.3)."""
        effects: Effects = (Note("consumer: DUPLICATE_ENGINE_ID"),)
        if before is not None:
            effects += (Tell(self.scheduler, PeerRestarted(engine_of(peer), before)),)
        for message in pending:
            effects += self._undeliverable(peer, message)
        for op in waiting:
            effects += self._read_failed(op, Code.UNREACHABLE)
        return effects

    def _peer_lost(self, event: PeerLost, now: Instant) -> Effects:
        self.peers.lost(event.peer)
        self.synced.pop(event.peer, None)
        return NOTHING

    def _peer_quiet(self, event: PeerExited | FenceEnded, now: Instant) -> Effects:
        """Every grant to this peer counts as settled now, so none that is still waiting here may leave any more."""
        peer = event.peer
        if not self.dialect.quarantine_ends:
            return (Note("consumer: nobody here learns of a peer's death"),)
        self.peers.lost(peer)
        self.fencing.discard(peer)
        for op in self.waiting_reads.pop(peer, ()):
            del self.reads[op]
        kept = tuple(m for m in self.pending.pop(peer, ()) if type(m) is not Register)
        effects: Effects = (Tell(self.scheduler, PeerFenced(peer, self.rank, self.newest)),)
        if kept:
            self.pending[peer] = kept
            effects += self._connect(peer)
        return effects

    def _time(self, event: TimeReached | TimerFired, now: Instant) -> Effects:
        return NOTHING


def _read_order(read: Read) -> tuple[str, int]:
    return (read.op.reg.request_id, read.op.p_rank)


_ON: dict[type, Callable[[Any, Any, Instant], Effects]] = {
    FrameOrdered: ConsumerRank._frame_ordered,
    FenceOrdered: ConsumerRank._fence_ordered,
    ReadOrdered: ConsumerRank._read_ordered,
    Received: ConsumerRank._received,
    HandshakeEnded: ConsumerRank._handshake_ended,
    PeerLost: ConsumerRank._peer_lost,
    PeerExited: ConsumerRank._peer_quiet,
    FenceEnded: ConsumerRank._peer_quiet,
    ReadEnded: ConsumerRank._read_ended,
    WordRead: ConsumerRank._word_read,
    TimeReached: ConsumerRank._time,
    TimerFired: ConsumerRank._time,
}
_ON_FRAME: dict[type, Callable[[Any, Address, Any], Effects]] = {
    Done: ConsumerRank._done,
    Completion: ConsumerRank._completed,
    RegisterAck: ConsumerRank._acknowledged,
    Fail: ConsumerRank._failed,
    CancelAck: ConsumerRank._cancel_answered,
    SyncReply: ConsumerRank._sync_answered,
}

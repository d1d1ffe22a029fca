"""The endpoint of one D rank: connects, sends what the scheduler orders, reports what arrives, and reads (pull).

It keeps no table of registrations: the scheduler made the cell before any rank could send its REG, so a completion can
never be early here (R26), and it names its shard by its sender, never by a count (R14). Only READs have a small state
of their own: posted, then the lease word (PROTOCOL 7.5).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, Fence, Handshake, Note, PostRead, ReadWord, Send, Tell
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
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.messages import (
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
    Taken,
)
from pdflow.protocol.peers import Peers
from pdflow.protocol.timers import Timer, Timers
from pdflow.protocol.values import Address, Instant, RequestId, Value


class Read(Value, frozen=True, gc=False):
    """One READ of one P rank's shard. Posted from the start, or waiting for its connection."""

    op: Op
    source: Address
    readers: int
    params: KvParams
    grant: Register
    posted: bool = False
    begun_at: Instant = 0

    def becoming_posted(self) -> Read:
        return msgspec.structs.replace(self, posted=True)


class ConsumerRank:
    """One decode rank's half of the protocol."""

    timed = False
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = (
        "deadlines",
        "dialect",
        "engine",
        "fencing",
        "geometry",
        "incarnation",
        "kept",
        "me",
        "peers",
        "pending",
        "rank",
        "reads",
        "scheduler",
        "synced",
        "timers",
        "waiting_reads",
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
        self.me = rank_address(engine.engine, rank)
        self.scheduler: Address = engine.engine
        self.incarnation = incarnation
        self.dialect = dialect
        self.timers = timers
        self.geometry = geometry
        self.peers = Peers()
        self.pending: dict[Address, tuple[Message, ...]] = {}
        self.reads: dict[Op, Read] = {}
        self.waiting_reads: dict[Address, tuple[Op, ...]] = {}
        self.synced: dict[Address, Sync] = {}
        self.kept: dict[Address, dict[RequestId, Instant]] = {}
        """Against a vLLM P: up to when each of its prompts that we want was kept by heartbeats without a gap."""
        self.fencing: set[Address] = set()
        self.deadlines = Deadlines()

    # The four doors of every endpoint.

    def handle(self, event: ConsumerRankEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        return None

    def armed(self) -> tuple[Timer, ...]:
        return ()

    def fork(self) -> ConsumerRank:
        other = object.__new__(ConsumerRank)
        fixed = ("engine", "rank", "me", "scheduler", "incarnation", "dialect", "timers", "geometry")
        for name in fixed:
            setattr(other, name, getattr(self, name))
        other.peers = self.peers.fork()
        for name in ("pending", "reads", "waiting_reads", "synced", "fencing"):
            setattr(other, name, getattr(self, name).copy())
        other.kept = {peer: kept.copy() for peer, kept in self.kept.items()}
        other.deadlines = Deadlines()
        return other

    def fingerprint(self) -> Hashable:
        return (
            self.peers.fingerprint(),
            tuple(sorted(self.pending.items())),
            tuple(sorted(self.reads.values(), key=_read_order)),
            tuple(sorted(self.synced.items())),
            tuple((peer, tuple(sorted(kept.items()))) for peer, kept in sorted(self.kept.items())),
            tuple(sorted(self.fencing)),
        )

    # Orders of the scheduler.

    def _frame_ordered(self, event: FrameOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        if type(event.message) is Heartbeat:
            self._keep(event.to, event.message, now)
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

    def _keep(self, peers: tuple[Address, ...], message: Heartbeat, now: Instant) -> None:
        """From the first heartbeat that should have gone out on; without it, from the READ's order on."""
        for peer in peers:
            before = self.kept.get(peer, {})
            self.kept[peer] = {request_id: before.get(request_id, now) for request_id in message.request_ids}

    def _beat(self, peer: Address, message: Heartbeat, now: Instant) -> None:
        """A heartbeat leaves. One that comes after too long a silence revives no lease, and mends no gap."""
        kept = self.kept.get(peer, {})
        for request_id in message.request_ids:
            since = kept.get(request_id)
            if since is not None and not self._too_long(since, now):
                kept[request_id] = now

    def _too_long(self, since: Instant, now: Instant) -> bool:
        return (now - since) * 4 > self.timers.lease_extension_ns * 3

    def _defer(self, peer: Address, message: Message, now: Instant) -> Effects:
        """No connection yet: keep the order of frames, and of SYNCs only the newest."""
        if not self.peers.may_try(peer, now):
            return self._undeliverable(peer, message)
        kept = self.pending.get(peer, ())
        if type(message) in (Sync, Heartbeat):
            kept = tuple(m for m in kept if type(m) is not type(message))
        self.pending[peer] = (*kept, message)
        return self._connect(peer)

    def _connect(self, peer: Address) -> Effects:
        if peer in self.peers.connecting or peer in self.fencing:
            return NOTHING
        self.peers.connecting.add(peer)
        return (Handshake(peer),)

    def _undeliverable(self, peer: Address, message: Message) -> Effects:
        """A REG that never left cannot be answered by a write; every other frame is repeated by its own timer."""
        if type(message) is Register and isinstance(message, Register):
            op = Op(message.reg, rank_of(peer), self.rank)
            return (Tell(self.scheduler, PairFailed(op, peer, Code.UNREACHABLE, True)),)
        return (Note("consumer: frame to an unreachable peer"),)

    def _fence_ordered(self, event: FenceOrdered, now: Instant) -> Effects:
        if event.peer in self.fencing:
            return NOTHING
        self.fencing.add(event.peer)
        self.peers.lost(event.peer)
        return (Fence(event.peer),)

    def _read_ordered(self, event: ReadOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        for source, readers in zip(event.sources, event.readers, strict=True):
            op = Op(event.grant.reg, rank_of(source), self.rank)
            read = Read(op, source, readers, event.params, event.grant, False, now)
            self.reads[op] = read
            if source in self.peers.connected:
                effects += self._post(read)
            elif self.peers.may_try(source, now):
                self.waiting_reads[source] = (*self.waiting_reads.get(source, ()), op)
                effects += self._connect(source)
            else:
                effects += self._read_failed(op, Code.UNREACHABLE)
        return effects

    def _post(self, read: Read) -> Effects:
        self.reads[read.op] = read.becoming_posted()
        p, d = read.params.prefill.shards, self.engine.shards
        nbytes = self.geometry.nbytes(read.op.p_rank, self.rank, p, d, read.grant.num_tokens)
        notice = None if self.dialect.lease_words else Completion(read.params.request_id, read.readers)
        return (PostRead(read.op, read.source, read.params.blocks, read.grant, nbytes, notice),)

    # From the transport.

    def _read_ended(self, event: ReadEnded, now: Instant) -> Effects:
        read = self.reads.get(event.op)
        if read is None:
            return (Note("consumer: READ ended for nothing"),)
        if not event.ok:
            return self._read_failed(event.op, Code.IO)
        if self.dialect.lease_words:
            words = read.params.words
            if read.op.p_rank >= len(words):
                return self._read_failed(event.op, Code.STALE)
            return (ReadWord(read.op, read.source, words[read.op.p_rank].index),)
        # A vLLM P cannot prove its pin: trust the bytes only if we ourselves were not silent for too long (R04, R09).
        since = self.kept.get(read.source, {}).get(read.params.request_id, read.begun_at)
        if self._too_long(since, now):
            return self._read_failed(event.op, Code.STALE)
        del self.reads[event.op]
        return (Tell(self.scheduler, PairLanded(read.op, read.source)),)

    def _word_read(self, event: WordRead, now: Instant) -> Effects:
        """A word unchanged after the data proves that the pin covered them: a seqlock."""
        read = self.reads.get(event.op)
        if read is None:
            return (Note("consumer: lease word for nothing"),)
        if event.word is None or event.word != read.params.words[read.op.p_rank].word:
            return self._read_failed(event.op, Code.STALE)
        del self.reads[event.op]
        taken = Taken(read.params.xid, self.rank, read.readers)
        return (Tell(self.scheduler, PairLanded(read.op, read.source)), Send(read.source, taken))

    def _read_failed(self, op: Op, code: Code) -> Effects:
        read = self.reads.pop(op)
        return (Tell(self.scheduler, PairFailed(op, read.source, code, True)),)

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
        reg = Reg(self.engine.engine, 0, 0, message.request_id)
        return (Tell(self.scheduler, PairLanded(Op(reg, rank_of(sender), self.rank), sender)),)

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
                effects.append(Tell(self.scheduler, PairReported(op, sender, item.progress)))
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
        if event.ok and peer in self.fencing:
            # This connection is part of what is being closed. What waits for one goes on waiting.
            self.peers.connecting.discard(peer)
            return NOTHING
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
            waiting, doomed = (), waiting
            for op in doomed:
                effects += self._read_failed(op, Code.PEER_RESTARTED)
            pending = tuple(m for m in pending if type(m) is not Register)
        for message in pending:
            effects += self._sending(peer, message, now)
        for op in waiting:
            effects += self._post(self.reads[op])
        return effects

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
        self.peers.lost(peer)
        self.fencing.discard(peer)
        for op in self.waiting_reads.pop(peer, ()):
            del self.reads[op]
        kept = tuple(m for m in self.pending.pop(peer, ()) if type(m) is not Register)
        effects: Effects = (Tell(self.scheduler, PeerFenced(peer, self.rank)),)
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

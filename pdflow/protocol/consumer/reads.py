"""The READs of one D rank (pull): posted, then accepted only if P still held the prompt when they ended.

With strict the lease word read after the data proves it (spec 2.3); with a vLLM P, which proves nothing, the
bytes count only if D itself was never silent for so long that its lease could have run out (R04, R09). Whether there is
a connection to read over is the endpoint's affair (`consumer.rank`).
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effects, Note, PostRead, ReadWord, Send, SendLocal
from pdflow.protocol.events import PairFailed, PairLanded, ReadEnded, WordRead
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, KvParams, Op
from pdflow.protocol.messages import Code, Completion, Heartbeat, Register, Taken
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Address, Instant, RequestId, Value, in_order


class ReadCell(Value, frozen=True, gc=False):
    """The state of a READ of one P rank's shard: posted, or waiting for its connection."""

    op: Op
    source: Address
    readers: int
    params: KvParams
    registration: Register
    posted: bool = False
    begun_at: Instant = 0

    def with_posted(self) -> ReadCell:
        return msgspec.structs.replace(self, posted=True)


class ConsumerReads:
    """The store of a D rank's READs: those that are open, and how long each prompt that is wanted was kept at P."""

    __slots__ = ("dialect", "engine", "geometry", "kept", "rank", "reads", "scheduler", "timers", "waiting")

    def __init__(self, engine: EngineInfo, rank: int, dialect: Dialect, timers: Timers, geometry: Geometry) -> None:
        self.engine = engine
        self.rank = rank
        self.scheduler: Address = engine.engine
        self.dialect = dialect
        self.timers = timers
        self.geometry = geometry
        self.reads: dict[Op, ReadCell] = {}
        self.waiting: dict[Address, tuple[Op, ...]] = {}
        """The keys of `reads` that wait for a connection, by P rank."""
        self.kept: dict[Address, dict[RequestId, Instant]] = {}
        """With a vLLM P: until when each wanted prompt was kept by heartbeats without a gap."""

    def fork(self) -> ConsumerReads:
        other = ConsumerReads(self.engine, self.rank, self.dialect, self.timers, self.geometry)
        other.reads, other.waiting = self.reads.copy(), self.waiting.copy()
        other.kept = {peer: kept.copy() for peer, kept in self.kept.items()}
        return other

    def fingerprint(self) -> tuple[Hashable, Hashable, Hashable]:
        """The hashable state: the READs, those of them that wait, and what was kept."""
        return (
            tuple(sorted(self.reads.values(), key=_read_order)),
            in_order(self.waiting.items()),
            tuple([(peer, tuple(sorted(kept.items()))) for peer, kept in sorted(self.kept.items())]),
        )

    # Ordered, and waiting for a connection.

    def post(self, read: ReadCell) -> Effects:
        """Post a READ over the existing connection."""
        self.reads[read.op] = read.with_posted()
        p, d = read.params.prefill.shards, self.engine.shards
        nbytes = self.geometry.nbytes(read.op.p_rank, self.rank, p, d, read.registration.num_tokens)
        notification = None if self.dialect.lease_words else Completion(read.params.request_id, read.readers)
        blocks, groups = read.params.blocks, read.params.groups
        return (PostRead(read.op, read.source, blocks, read.registration, nbytes, notification, groups),)

    def wait(self, read: ReadCell) -> None:
        """Keep a READ until there is a connection to its source."""
        self.reads[read.op] = read
        self.waiting[read.source] = (*self.waiting.get(read.source, ()), read.op)

    def post_waiting(self, peer: Address) -> Effects:
        """Post the READs that waited for a connection to this peer."""
        effects: Effects = NOTHING
        for op in self.waiting.pop(peer, ()):
            effects += self.post(self.reads[op])
        return effects

    def fail_waiting(self, peer: Address, code: Code, shown: int | None = None) -> Effects:
        """Fail the READs that wait for a connection to this peer, each with this code; but not those of prompts that
        the incarnation `shown` by a handshake has computed."""
        effects: Effects = NOTHING
        waiting = self.waiting.pop(peer, ())
        spared = tuple([op for op in waiting if self.reads[op].params.incarnation == shown])
        if spared:
            self.waiting[peer] = spared
        for op in waiting:
            if op not in spared:
                effects += self.failed(op, code)
        return effects

    def drop_waiting(self, peer: Address) -> None:
        """Forget the READs that wait for a connection to this peer. Nothing is reported: a fence has settled them."""
        for op in self.waiting.pop(peer, ()):
            del self.reads[op]

    # Posted.

    def ended(self, event: ReadEnded, now: Instant) -> Effects:
        """Handle the end of a READ: read P's lease word, or accept or reject the bytes at once where there is none."""
        read = self.reads.get(event.op)
        if read is None:
            return (Note("consumer: READ ended for nothing"),)
        if not event.ok:
            return self.failed(event.op, Code.IO)
        if self.dialect.lease_words:
            rank_words = read.params.rank_words
            if read.op.p_rank >= len(rank_words):
                return self.failed(event.op, Code.STALE)
            return (ReadWord(read.op, read.source, rank_words[read.op.p_rank].index),)
        # A vLLM P cannot prove its pin: trust the bytes only if we ourselves were not silent for too long (R04, R09).
        since = self.kept.get(read.source, {}).get(read.params.request_id, read.begun_at)
        if self.dialect.doubts_reads and self._too_long(since, now):
            return self.failed(event.op, Code.STALE)
        del self.reads[event.op]
        return (SendLocal(self.scheduler, PairLanded(read.op, read.source)),)

    def word_read(self, event: WordRead, now: Instant) -> Effects:
        """Accept a READ if the lease word is unchanged after the data: P held the prompt throughout (a seqlock)."""
        read = self.reads.get(event.op)
        if read is None:
            return (Note("consumer: lease word for nothing"),)
        if event.value is None or event.value != read.params.rank_words[read.op.p_rank].value:
            return self.failed(event.op, Code.STALE)
        del self.reads[event.op]
        taken = Taken(read.params.xid, self.rank, read.readers)
        return (SendLocal(self.scheduler, PairLanded(read.op, read.source)), Send(read.source, taken))

    def failed(self, op: Op, code: Code) -> Effects:
        """Give up an open READ. It writes nothing from here on, so that its pair is settled."""
        read = self.reads.pop(op)
        return (SendLocal(self.scheduler, PairFailed(op, read.source, code, True, code is Code.UNREACHABLE)),)

    # How long a vLLM P may be trusted to have kept a prompt.

    def keep(self, peers: tuple[Address, ...], message: Heartbeat, now: Instant) -> None:
        """Set the prompts whose gaps between heartbeats are watched: from the first heartbeat that was due on, or
        without one from the READ's order on."""
        for peer in peers:
            before = self.kept.get(peer, {})
            self.kept[peer] = {request_id: before.get(request_id, now) for request_id in message.request_ids}

    def beat(self, peer: Address, message: Heartbeat, now: Instant) -> None:
        """Record that a heartbeat is sent. After too long a silence it renews no lease, so the gap remains."""
        kept = self.kept.get(peer, {})
        for request_id in message.request_ids:
            since = kept.get(request_id)
            if since is not None and not self._too_long(since, now):
                kept[request_id] = now

    def _too_long(self, since: Instant, now: Instant) -> bool:
        return (now - since) * 4 > self.timers.lease_extension_ns * 3


def _read_order(read: ReadCell) -> tuple[str, int]:
    return (read.op.reg.request_id, read.op.p_rank)

"""READs of one D rank (pull): posted, then judged by what shows that P kept its pin all the while.

Against strict the lease word read after the data proves it (PROTOCOL 7.5); against a vLLM P, which proves nothing, the
bytes count only if D itself was never silent for so long that its lease could have run out (R04, R09).
"""

from __future__ import annotations

import msgspec

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effects, Handshake, Note, PostRead, ReadWord, Send, Tell
from pdflow.protocol.events import PairFailed, PairLanded, ReadEnded, ReadOrdered, WordRead
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, KvParams, Op, rank_of
from pdflow.protocol.messages import Code, Completion, Heartbeat, Register, Taken
from pdflow.protocol.peers import Peers
from pdflow.protocol.timers import Timers
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


class ConsumerReads:
    """What a D rank keeps in order to read: its READs, who is connected, and how long each prompt was kept at P."""

    __slots__ = (
        "dialect",
        "engine",
        "fencing",
        "geometry",
        "kept",
        "newest",
        "peers",
        "rank",
        "reads",
        "scheduler",
        "timers",
        "waiting_reads",
    )

    def __init__(self, engine: EngineInfo, rank: int, dialect: Dialect, timers: Timers, geometry: Geometry) -> None:
        self.engine = engine
        self.rank = rank
        self.scheduler: Address = engine.engine
        self.dialect = dialect
        self.timers = timers
        self.geometry = geometry
        self.peers = Peers(dialect)
        self.reads: dict[Op, Read] = {}
        self.waiting_reads: dict[Address, tuple[Op, ...]] = {}
        self.kept: dict[Address, dict[RequestId, Instant]] = {}
        """Against a vLLM P: up to when each of its prompts that we want was kept by heartbeats without a gap."""
        self.fencing: set[Address] = set()
        self.newest = 0
        """The `seq` of the newest registration that this rank has been told of."""

    def _read_ordered(self, event: ReadOrdered, now: Instant) -> Effects:
        effects: Effects = NOTHING
        self.newest = max(self.newest, event.grant.reg.seq)
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
        if self.dialect.doubts_reads and self._too_long(since, now):
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

    def _connect(self, peer: Address) -> Effects:
        if peer in self.peers.connecting or peer in self.fencing:
            return NOTHING
        self.peers.connecting.add(peer)
        return (Handshake(peer),)

    # How long a vLLM P may be trusted to have kept a prompt.

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

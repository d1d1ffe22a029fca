"""A tiny cluster for protocol tests: real endpoints, a clock that is moved by hand, an oracle that watches all of it.

Nothing happens by itself. Frames, handshakes, one-sided operations, flushes and fences wait in `pending` until `run`
carries them out, first come, first served; what `holding` names stays where it is. A test reads as a sequence diagram:

    c.holding = {"WRITE"}; c.run(); c.pass_time(31 * S); c.holding = set(); c.run()
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.effects import (
    AnswerPrefill,
    BumpWord,
    Commit,
    Enqueue,
    Fence,
    Flush,
    FreeBlocks,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    Quarantine,
    ReadWord,
    ReleaseBlocks,
    Resolve,
    Send,
    Tell,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PrefillAborted,
    PrefillFinished,
    PrefillQueued,
    ReadEnded,
    Received,
    TimeReached,
    WordRead,
    WriteEnded,
)
from pdflow.protocol.ids import EngineInfo, KvParams, Shards, engine_of, rank_address
from pdflow.protocol.invariants import Oracle
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Allocation

BLOCK = 16
SHAPE = KvShape(num_layers=4, num_kv_heads=2, head_dim=8, bytes_per_value=2, block_size=BLOCK)


def engine_info(engine: str, tp: int = 1, pp: int = 1, block_size: int = BLOCK) -> EngineInfo:
    return EngineInfo(engine, Shards(tp, pp, block_size))


class Item:
    """Something under way. `kind` is its message's class, or what it is."""

    def __init__(self, kind: str, node: str, peer: str, what: Any = None) -> None:
        self.kind = kind
        self.node = node
        self.peer = peer
        self.what = what

    def __repr__(self) -> str:
        return f"{self.kind} {self.node}->{self.peer}"


class Cluster:
    """P engines and D engines by name; requests by name; everything else follows from effects."""

    def __init__(
        self,
        p: tuple[EngineInfo, ...] = (engine_info("P"),),
        d: tuple[EngineInfo, ...] = (engine_info("D"),),
        dialect: Dialect = STRICT,
        pulls: bool = False,
        done_is_remote: bool = True,
        timers: Timers | None = None,
        pool_blocks: int = 1000,
        watched: bool = True,
    ) -> None:
        self.dialect, self.pulls, self.done_is_remote = dialect, pulls, done_is_remote
        self.timers = timers or Timers()
        self.geometry = TransferGeometry(SHAPE, initiator="pull" if pulls else "push")
        self.pool_blocks = pool_blocks
        self.oracle = Oracle(self.geometry, done_is_remote) if watched else None
        self.infos = {info.engine: info for info in (*p, *d)}
        self.endpoints: dict[str, Any] = {}
        self.incarnations: dict[str, int] = {}
        self.now = 0
        self.pending: list[Item] = []
        self.holding: set[str] = set()
        self.unreachable: set[str] = set()
        """Addresses that no handshake reaches."""
        self.lagging: set[str] = set()
        """Endpoints that are told things late: an "order" to them waits in `pending` like all else."""
        self.log: list[tuple[str, Any]] = []
        """Every effect, with the node that wanted it."""
        self.words: dict[tuple[str, int], int] = {}
        self.outcomes: dict[str, list[str]] = defaultdict(list)
        self.freed: list[Allocation] = []
        self.quarantined: list[Allocation] = []
        self.released: list[tuple[str, str]] = []
        """(xid, code) at P."""
        self.answers: dict[str, KvParams] = {}
        self.enqueued: list[str] = []
        self.notes: list[str] = []
        self.generation = 0
        self.sources: dict[str, PrefillFinished] = {}
        for info in p:
            self.start_prefill(info.engine, 101)
        for info in d:
            self.start_decode(info.engine, 201)

    def start_prefill(self, engine: str, incarnation: int) -> None:
        info = self.infos[engine]
        self.incarnations[engine] = incarnation
        self.endpoints[engine] = ProducerScheduler(info, incarnation, self.dialect)
        for rank in range(info.shards.ranks):
            self.endpoints[rank_address(engine, rank)] = ProducerRank(
                info, rank, incarnation, self.dialect, self.timers, self.geometry, self.done_is_remote
            )

    def start_decode(self, engine: str, incarnation: int) -> None:
        info = self.infos[engine]
        self.incarnations[engine] = incarnation
        self.endpoints[engine] = ConsumerScheduler(
            info, incarnation, self.dialect, self.timers, self.geometry, self.pulls, self.pool_blocks
        )
        for rank in range(info.shards.ranks):
            self.endpoints[rank_address(engine, rank)] = ConsumerRank(
                info, rank, incarnation, self.dialect, self.timers, self.geometry
            )

    def crash(self, engine: str) -> None:
        """All of an engine's processes die; what they had on the wire is lost, what they were owed too."""
        if self.oracle is not None:
            self.oracle.lost(engine)
        self.pending = [i for i in self.pending if engine not in (engine_of(i.node), engine_of(i.peer))]

    # What engines and clients do.

    def prefill(self, xid: str, engine: str = "P", request_id: str | None = None) -> None:
        self.feed(engine, PrefillQueued(xid, request_id or self.prefill_id(xid)))

    def prefill_id(self, xid: str) -> str:
        """P's internal id of a prompt, unless a test says otherwise."""
        return f"p-{xid}"

    def allocate(self, num_blocks: int) -> Allocation:
        self.generation += 1
        return Allocation(self.generation, tuple(range(self.generation * 1000, self.generation * 1000 + num_blocks)))

    def finish(self, xid: str, engine: str = "P", num_tokens: int = 64, digest: int = 7, weights: int = 1) -> None:
        size = self.infos[engine].shards.block_size
        event = PrefillFinished(xid, self.allocate(-(-num_tokens // size)), num_tokens, digest, weights)
        self.sources[xid] = event
        self.feed(engine, event)

    def abort_prefill(self, xid: str, engine: str = "P") -> None:
        self.feed(engine, PrefillAborted(xid, Code.PREFILL_ABORTED))

    def params(self, xid: str, engine: str = "P", num_tokens: int = 64) -> KvParams:
        """What the router tells D: P's answer where there is one, else what it can know before."""
        for params in self.answers.values():
            if params.xid == xid:
                return params
        return KvParams(self.infos[engine], xid, self.prefill_id(xid), num_tokens)

    def decode(
        self, request_id: str, xid: str, engine: str = "D", prefill: str = "P", deadline_ns: int = 0, blocks: int = 4
    ) -> None:
        self.feed(engine, DecodeQueued(request_id, self.params(xid, prefill), blocks, deadline_ns))

    def admit(
        self,
        request_id: str,
        engine: str = "D",
        token_start: int = 0,
        num_tokens: int = 64,
        digest: int = 7,
        weights: int = 1,
    ) -> Allocation:
        size = self.infos[engine].shards.block_size
        allocation = self.allocate(-(-num_tokens // size))
        self.feed(engine, DecodeAdmitted(request_id, allocation, token_start, num_tokens, digest, weights))
        return allocation

    def hit(self, request_id: str, engine: str = "D") -> None:
        self.feed(engine, DecodeHit(request_id))

    def abort(self, request_id: str, engine: str = "D") -> None:
        self.feed(engine, DecodeAborted(request_id, Code.CANCELLED))

    def serve(self, request_id: str, xid: str, **kw: Any) -> None:
        """Prefill, then decode, up to the admission."""
        self.prefill(xid)
        self.finish(xid)
        self.decode(request_id, xid, **kw)
        self.admit(request_id, **{k: v for k, v in kw.items() if k == "engine"})

    # What the world does.

    def feed(self, node: str, event: Any) -> list[Any]:
        """Hand over one event and everything that endpoints of one engine tell each other because of it."""
        queue = [(node, event)]
        out: list[Any] = []
        while queue:
            at, told = queue.pop(0)
            effects = self.endpoints[at].handle(told, self.now)
            if self.oracle is not None:
                self.oracle.observe(at, told, effects, self.now)
            for effect in effects:
                out.append(effect)
                self.log.append((at, effect))
                if type(effect) is Tell and effect.to in self.lagging:
                    self.pending.append(Item("order", at, effect.to, effect.event))
                elif type(effect) is Tell:
                    queue.append((effect.to, effect.event))
                else:
                    self.do(at, effect)
        return out

    def do(self, node: str, effect: Any) -> None:
        kind = type(effect)
        if kind is Send:
            message = effect.message
            received = Received(node, self.incarnations[engine_of(node)], message)
            self.pending.append(Item(type(message).__name__, node, effect.to, received))
        elif kind is Handshake:
            self.pending.append(Item("handshake", node, effect.peer))
        elif kind is PostWrite:
            self.pending.append(Item("WRITE", node, effect.to, effect))
        elif kind is PostRead:
            self.pending.append(Item("READ", node, effect.source, effect))
        elif kind is ReadWord:
            self.pending.append(Item("word", node, effect.source, effect))
        elif kind is Flush:
            self.pending.append(Item("flush", node, effect.peer))
        elif kind is Fence:
            self.pending.append(Item("fence", node, effect.peer))
        elif kind is BumpWord:
            self.words[node, effect.word.index] = effect.word.word + 1
        elif kind is AnswerPrefill:
            self.answers[effect.request_id] = effect.params
            for rank, word in enumerate(effect.params.words):
                self.words[rank_address(node, rank), word.index] = word.word
        elif kind is ReleaseBlocks:
            self.released.append((effect.xid, effect.code.name))
        elif kind is Enqueue:
            self.enqueued.append(effect.request_id)
        elif kind is Commit:
            self.outcomes[effect.request_id].append("COMMITTED")
        elif kind is Resolve:
            self.outcomes[effect.request_id].append(effect.code.name)
        elif kind is Quarantine:
            self.quarantined.append(effect.allocation)
        elif kind is FreeBlocks:
            self.freed.append(effect.allocation)
        elif kind is Note:
            self.notes.append(effect.name)

    def carry_out(self, item: Item, ok: bool = True) -> None:
        """Let one pending item happen."""
        self.pending.remove(item)
        node, peer, what = item.node, item.peer, item.what
        if item.kind == "handshake":
            reached = ok and peer not in self.unreachable and engine_of(peer) not in self.unreachable
            self.feed(node, HandshakeEnded(peer, reached, self.incarnations[engine_of(peer)] if reached else 0))
        elif item.kind == "WRITE":
            if ok:
                self.feed(peer, Received(node, self.incarnations[engine_of(node)], what.notice))
            self.feed(node, WriteEnded(what.op, ok))
        elif item.kind == "READ":
            self.feed(node, ReadEnded(what.op, ok))
            if ok and what.notice is not None:
                self.feed(peer, Received(node, self.incarnations[engine_of(node)], what.notice))
        elif item.kind == "word":
            self.feed(node, WordRead(what.op, self.words.get((peer, what.index)) if ok else None))
        elif item.kind == "flush":
            self.feed(node, FlushEnded(peer, ok))
        elif item.kind == "fence":
            self.feed(node, FenceEnded(peer))
        else:
            self.feed(peer, what)

    def find(self, kind: str, node: str | None = None, peer: str | None = None) -> Item:
        """The oldest pending item of a kind."""
        for item in self.pending:
            if item.kind == kind and node in (None, item.node) and peer in (None, item.peer):
                return item
        raise AssertionError(f"no {kind} is pending, only {self.pending}")

    def has(self, kind: str) -> bool:
        return any(item.kind == kind for item in self.pending)

    def drop(self, kind: str, node: str | None = None, peer: str | None = None) -> None:
        self.pending.remove(self.find(kind, node, peer))

    def fail(self, kind: str, node: str | None = None, peer: str | None = None) -> None:
        self.carry_out(self.find(kind, node, peer), ok=False)

    def run(self) -> None:
        """Until nothing is pending but what is held."""
        for _ in range(10_000):
            item = next((i for i in self.pending if i.kind not in self.holding), None)
            if item is None:
                return
            self.carry_out(item)
        raise AssertionError(f"the cluster does not come to rest: {self.pending[:10]}")

    def pass_time(self, ns: int, step: bool = True) -> None:
        """Move the clock, stopping at every deadline on the way and running whatever it starts."""
        until = self.now + ns
        while True:
            self.run()
            due = [at for e in self.endpoints.values() if (at := e.wake_at()) is not None]
            first = min(due, default=until + 1)
            if first > until:
                break
            self.now = max(self.now, first)
            for node, endpoint in list(self.endpoints.items()):
                at = endpoint.wake_at()
                if at is not None and at <= self.now:
                    self.feed(node, TimeReached())
        self.now = until

    def frames(self, kind: type) -> list[Any]:
        """Every message of a class that was ever sent, notices included."""
        sent = [e.message for _, e in self.log if type(e) is Send and type(e.message) is kind]
        notices = [e.notice for _, e in self.log if type(e) in (PostWrite, PostRead) and type(e.notice) is kind]
        return sent + notices

    def wrote(self) -> list[PostWrite]:
        return [e for _, e in self.log if type(e) is PostWrite]

    def at_rest(self) -> None:
        """Long enough for every lease and quarantine to end; then nothing may be left."""
        self.holding = set()
        self.pass_time(700 * 1_000_000_000)
        if self.oracle is not None:
            self.oracle.finish(self.now)
        assert not self.pending
        for node, endpoint in self.endpoints.items():
            cells = getattr(endpoint, "cells", None) or getattr(endpoint, "products", None)
            assert not cells, (node, cells)

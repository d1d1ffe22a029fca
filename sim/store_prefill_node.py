"""A prefill engine that puts what it computes into a store, and loads from there what others have put.

What a decode engine is to others, the store is to it: its blocks come back when the store has them. Where blocks have
keys, it asks before it computes, and is D towards the store for the beginning of the prompt that is there, under a
second name. What it cannot load it computes. As published its engine waits until what it has computed is put.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Admitted, NeverFitsError, Phase, Sequence
from pdflow.methods.kv_store_ledger import Lookup, Put
from pdflow.methods.method import Conduct
from pdflow.methods.store_memory import Item
from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    FreeBlocks,
    PostRead,
    Quarantine,
    ReadWord,
    ReleaseBlocks,
    Resolve,
)
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeHit, DecodeQueued
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import RequestId, Xid
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from pdflow.wiring.stores import load_name, load_xid
from sim.node import Port
from sim.prefill_node import WEIGHTS, PrefillLeg, PrefillNode
from sim.store_node import StoreNode

if TYPE_CHECKING:
    from sim.stores import Stores
    from sim.world import World


class StorePrefillNode(PrefillNode):
    def __init__(
        self, world: World, index: int, name: str, engine: Engine, block_bytes: int, stores: Stores, conduct: Conduct
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.stores = stores
        self.conduct = conduct
        self.salt = 0
        self.putting: dict[RequestId, tuple[StoreNode, Xid]] = {}
        """What has been computed and is held here until the store has it."""
        self.objects: dict[Xid, tuple[Item, ...]] = {}
        """Under which keys each prompt is stored: worked out once."""
        self.load_port: Port | None = None
        self.asking: dict[RequestId, PrefillLeg] = {}
        """Whoever waits for the store to say what is there."""
        self.loading: dict[RequestId, PrefillLeg] = {}
        """Whose beginning is to be loaded."""
        self.do.update(
            {
                Enqueue: self.enqueue,
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Commit: self.commit,
                Resolve: self.resolve,
                Quarantine: self.quarantine,
                FreeBlocks: self.free,
            }
        )

    def make_scheduler(self, endpoint: ProducerScheduler, incarnation: int) -> None:
        super().make_scheduler(endpoint, incarnation)
        if self.conduct.salts_keys:
            self.salt = incarnation
        loads = self.stores.loads(endpoint.engine, self.engine.pool.num_blocks, incarnation)
        if loads is not None:
            scheduler, ranks = loads
            self.load_port = self.add(load_name(self.name), scheduler, incarnation)
            for rank in ranks:
                self.add(rank.me, rank, incarnation)

    @property
    def engines(self) -> tuple[str, ...]:
        return (self.name, load_name(self.name))

    def accept(self, leg: DispatchPrefill) -> None:
        if leg.keeps and not self.stores.fits(self.world.records.input_tokens[leg.request]):
            self.world.router.later(PrefillAnswered(leg.request_id, None, Code.REJECTED))
            return
        super().accept(leg)

    def submit(self, leg: PrefillLeg) -> None:
        if self.load_port is None or not leg.keeps:
            super().submit(leg)
            return
        items = self.items(leg)
        if len(items) == 1:
            # Nothing before its end has a name.
            super().submit(leg)
            return
        self.asking[leg.request_id] = leg
        digest = self.world.digest(leg.request)
        ask = Lookup(self.told, leg.request_id, load_xid(leg.xid), items[:-1], digest, WEIGHTS)
        self.env.call(self.world.fabric.control_ns, self.stores.node_of(items).look, ask)

    def items(self, leg: PrefillLeg) -> tuple[Item, ...]:
        items = self.objects.get(leg.xid)
        if items is None:
            items = self.objects[leg.xid] = self.stores.items(leg.request, self.salt)
        return items

    def end(self, leg: PrefillLeg, code: Code) -> None:
        self.objects.pop(leg.xid, None)
        super().end(leg, code)

    # What is stored of a prompt already.

    def told(self, about: tuple[StoreNode, Lookup, KvParams | None]) -> None:
        """What the store has of it, if anything."""
        store, ask, params = about
        leg = self.asking.pop(ask.request_id, None)
        if leg is None or not self.alive:
            if params is not None:
                self.call(store, ask.request_id, ask.xid)
            return
        if params is None or self.load_port is None:
            super().submit(leg)
            return
        leg.seq.remote_kv = True
        leg.seq.loaded_tokens = params.num_tokens
        self.loading[leg.request_id] = leg
        blocks = -(-params.num_tokens // self.engine.limits.block_size)
        self.feed(self.load_port, DecodeQueued(leg.request_id, params, blocks, 0))

    def call(self, store: StoreNode, request_id: RequestId, xid: Xid) -> None:
        """Nobody will come for this one."""
        self.env.call(self.world.fabric.control_ns, store.abort, (request_id, xid))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        try:
            self.engine.submit(self.loading[effect.request_id].seq, self.env.now)
        except NeverFitsError:
            self.feed(port, DecodeAborted(effect.request_id, Code.REJECTED))
            return
        self.rearm()

    def came(self, outcome: object) -> None:
        if type(outcome) is not Admitted:
            super().came(outcome)
            return
        seq = outcome.seq
        leg = self.by_seq[id(seq)]
        assert self.load_port is not None
        assert seq.allocation is not None
        here, there = seq.cached_tokens, seq.loaded_tokens
        event: Any = DecodeHit(leg.request_id)
        if here < there:
            digest = self.world.digest(leg.request)
            event = DecodeAdmitted(leg.request_id, seq.allocation, here, there - here, digest, WEIGHTS)
        self.feed(self.load_port, event)

    def commit(self, port: Port, effect: Commit) -> None:
        leg = self.loading.pop(effect.request_id)
        self.engine.loaded(leg.seq, self.env.now)
        self.rearm()

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It cannot be loaded, so this prompt is computed, unless nobody wants it any more."""
        leg = self.loading.pop(effect.request_id)
        self.engine.drop(leg.seq, self.env.now)
        if effect.code is Code.CANCELLED:
            self.end(leg, Code.CANCELLED)
        else:
            del self.by_seq[id(leg.seq)]
            old = leg.seq
            leg.seq = Sequence(old.index, old.prompt_tokens, 1, False, True, 0, old.prefix)
            self.by_seq[id(leg.seq)] = leg
            super().submit(leg)
        self.rearm()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.engine.pool.quarantine(effect.allocation)

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation, self.env.now)
        self.rearm()

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.world.fabric.read(port, effect, self.world.request_of(effect.op.reg.request_id))

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.world.fabric.read_word(port, effect.op, effect.source, effect.index)

    # What is computed.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        """What the router is told comes from the store."""
        params = effect.params
        del self.by_request[effect.request_id]
        leg = self.by_xid[params.xid]
        items = self.items(leg)
        store = self.stores.node_of(items)
        self.putting[leg.request_id] = (store, params.xid)
        put = Put(leg.request, leg.request_id, params, items, params.digest, params.weights)
        self.env.call(self.world.fabric.control_ns, store.start, put)
        if self.conduct.prefill_waits:
            self.hold()

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        self.putting.pop(self.by_xid[effect.xid].request_id, None)
        self.objects.pop(effect.xid, None)
        super().release(port, effect)
        if self.held and not self.putting:
            self.let_go()

    def abort(self, request_id: RequestId) -> None:
        """Wherever it is: before the engine has it, on its way here, being computed, or on its way from here."""
        loads, putting = self.loading.get(request_id), self.putting.get(request_id)
        if request_id in self.asking:
            self.end(self.asking.pop(request_id), Code.CANCELLED)
        elif loads is not None and loads.seq.phase in (Phase.NEW, Phase.WAITING, Phase.LOADING):
            assert self.load_port is not None
            self.feed(self.load_port, DecodeAborted(request_id, Code.CANCELLED))
        elif putting is not None:
            self.call(putting[0], request_id, putting[1])
        else:
            super().abort(request_id)

    def assert_empty(self) -> None:
        kept = (self.putting, self.asking, self.loading, self.objects)
        assert not any(kept), f"{self.name} still keeps {kept}"
        assert not self.held, f"{self.name} still waits"

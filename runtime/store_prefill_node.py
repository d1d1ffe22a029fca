"""A prefill engine, live, that puts what it computes into a store, and loads from there what others have put.

What a decode engine is to others, the store is to it: its blocks come back when the store has them, and its leg is
answered in the store's words. Where blocks have keys it asks before it computes, and is D towards the store for the
beginning of the prompt that is there, under a second name. What it cannot load it computes.
"""

from __future__ import annotations

from typing import Final

import trio

from pdflow.engine.sequence import Admitted, Dropped, NeverFitsError, Phase
from pdflow.engine.sequence import Sequence as Seq
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
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillAborted,
)
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from pdflow.serving.core import Port
from pdflow.wiring.stores import Consumer, Producer, load_xid, node_name
from runtime.content import digest_of
from runtime.engines.job import Job, Sampling
from runtime.engines.loop import Told
from runtime.kv_params import Coordinates
from runtime.prefill_node import PrefillLeg, PrefillNode
from runtime.ranked_node import Place
from runtime.store_calls import Found, StoreClient
from runtime.store_keys import StoreKeys
from runtime.transports.base import MakeTransport

NOBODY: Final = Coordinates("", 0)


class StorePrefillNode(PrefillNode):
    """Args: `loads` are the endpoints with which it loads, if it does; `client` asks the store's nodes."""

    def __init__(
        self,
        place: Place,
        ends: Producer,
        loads: Consumer | None,
        transport: MakeTransport,
        keys: StoreKeys,
        client: StoreClient,
    ) -> None:
        super().__init__(place, *ends, transport)
        self.keys: Final = keys
        self.client: Final = client
        self.stores: tuple[Coordinates, ...] = ()
        """Where the nodes hear, as the latest request has said."""
        self.objects: dict[Xid, tuple[Item, ...]] = {}
        """Of each prompt that is here."""
        self.asking: dict[RequestId, PrefillLeg] = {}
        """Whoever waits for the store to say what is there."""
        self.loading: dict[RequestId, PrefillLeg] = {}
        """Whose beginning is to be loaded."""
        self.granted: set[RequestId] = set()
        """Of these, of whose blocks the protocol has been told."""
        self.putting: dict[RequestId, trio.CancelScope] = {}
        """What is computed and held here until the store has it."""
        self.load_port: Port | None = None
        self._load_cells = {} if loads is None else loads[0].cells
        if loads is not None:
            self.load_port = self.add_end(loads[0].context.engine, *loads, over=self.ends[self.name])
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

    def begin(self, request_id: RequestId, xid: Xid, tokens: list[int], sampling: Sampling | None = None) -> PrefillLeg:
        if request_id in self._load_cells:
            raise KeyError(f"request {request_id} is being loaded still; every attempt needs an id of its own")
        if not self.keys.fits(len(tokens)):
            raise NeverFitsError(f"a prompt of {len(tokens)} tokens is too long for a node of the store")
        return super().begin(request_id, xid, tokens, sampling)

    def submit(self, leg: PrefillLeg) -> None:
        """Ask first, if there may be something to load."""
        items = self.keys.objects(leg.job.tokens)
        if self.load_port is None or len(items) == 1:
            super().submit(leg)
        else:
            self.asking[leg.request_id] = leg
            self.nursery.start_soon(self._look, leg, items[:-1], self._home(items))
        self.objects[leg.xid] = items

    def _home(self, items: tuple[Item, ...]) -> tuple[str, Coordinates]:
        """The node that has these, and where it takes requests; port 0 if it is not up."""
        number = self.keys.home(items)
        return node_name(number), self.stores[number] if number < len(self.stores) else NOBODY

    def _compute(self, leg: PrefillLeg) -> None:
        """It is the engine's from now on."""
        try:
            super().submit(leg)
        except NeverFitsError:
            self._end(leg, Code.REJECTED)

    def _end(self, leg: PrefillLeg, code: Code) -> None:
        """This prefill ends without KV."""
        del self.by_request[leg.request_id], self.by_xid[leg.xid], self.by_seq[id(leg.job.seq)]
        del self.objects[leg.xid]
        self.put(self.scheduler, PrefillAborted(leg.xid, code))
        leg.answer(None, code)

    async def aclose(self) -> None:
        self.client.close()
        await super().aclose()

    # What is stored of a prompt already.

    async def _look(self, leg: PrefillLeg, items: tuple[Item, ...], home: tuple[str, Coordinates]) -> None:
        request_id, xid = leg.request_id, load_xid(leg.xid)
        found = Found(None)
        if home[1].port:
            found = await self.client.look(*home, request_id, xid, items, self._content(leg))
        if found.params is not None and found.at is not None:
            await self.links.learn(found.params.prefill.engine, found.at.host, found.at.port)
        if self.asking.get(request_id) is not leg:
            if found.params is not None:
                await self.client.withdraw(*home, request_id, xid)
            return
        del self.asking[request_id]
        if found.params is None or not 0 < found.params.num_tokens < len(leg.job.tokens):
            self._compute(leg)
        else:
            self._load(leg, found.params)

    def _content(self, leg: PrefillLeg) -> tuple[int, int]:
        """What its KV is computed from (S4)."""
        weights = self.place.weights
        return digest_of(leg.job.tokens, weights), weights

    def _load(self, leg: PrefillLeg, params: KvParams) -> None:
        assert self.load_port is not None
        leg.job.seq.remote_kv = True
        leg.job.seq.loaded_tokens = params.num_tokens
        self.loading[leg.request_id] = leg
        blocks = -(-params.num_tokens // self.place.info.shards.block_size)
        self.put(self.load_port, DecodeQueued(leg.request_id, params, blocks, 0))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        try:
            super().submit(self.loading[effect.request_id])
        except NeverFitsError:
            self.put(port, DecodeAborted(effect.request_id, Code.REJECTED))

    def came(self, outcome: Told) -> None:
        if isinstance(outcome, Admitted):
            self.settle()
            leg = self.by_seq.get(id(outcome.seq))
            if leg is not None:
                self._admitted(leg)
        else:
            super().came(outcome)

    def _admitted(self, leg: PrefillLeg) -> None:
        """It has blocks for its beginning."""
        seq = leg.job.seq
        assert self.load_port is not None
        assert seq.allocation is not None
        self.granted.add(leg.request_id)
        here, there = seq.cached_tokens, seq.loaded_tokens
        if here >= there:
            self.feed(self.load_port, DecodeHit(leg.request_id))
            return
        about = self._content(leg)
        self.feed(self.load_port, DecodeAdmitted(leg.request_id, seq.allocation, here, there - here, *about))

    def commit(self, port: Port, effect: Commit) -> None:
        leg = self._loaded(effect.request_id)
        self.notes["store: tokens loaded"] += max(0, leg.job.seq.loaded_tokens - leg.job.seq.cached_tokens)
        self.engine.loaded(leg.job.seq)

    def _loaded(self, request_id: RequestId) -> PrefillLeg:
        self.granted.discard(request_id)
        return self.loading.pop(request_id)

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It cannot be loaded, so this prompt is computed, unless nobody wants it any more."""
        granted = effect.request_id in self.granted
        leg = self._loaded(effect.request_id)
        seq = leg.job.seq
        if self.engine.drop(seq) is Dropped.BLOCKS_ARE_YOURS and not granted:
            # The engine gave it blocks in this very turn: the protocol never heard of them.
            assert seq.allocation is not None
            self.engine.release(seq.allocation)
        if effect.code is Code.CANCELLED:
            self._end(leg, Code.CANCELLED)
            return
        self.notes["store: prompts not loaded"] += 1
        del self.by_seq[id(seq)]
        again = Seq(0, seq.prompt_tokens, seq.output_tokens, prefill_only=True, prefix=seq.prefix)
        leg.job = Job(again, leg.job.tokens, leg.job.sampling, tells_first=leg.job.tells_first)
        self.by_seq[id(again)] = leg
        self._compute(leg)

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.ranks[port.address].read(effect)

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.ranks[port.address].read_word(effect)

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.pool.quarantine(effect.allocation)

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation)

    # What is computed.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        """What is answered comes from the store."""
        leg = self.by_request[effect.request_id]
        scope = self.putting[leg.request_id] = trio.CancelScope()
        self.nursery.start_soon(self._put, leg, effect.params, scope)

    async def _put(self, leg: PrefillLeg, params: KvParams, scope: trio.CancelScope) -> None:
        items = self.objects[leg.xid]
        home = self._home(items)
        found = Found(None, None, Code.CANCELLED)
        with scope:
            unreachable = Found(None, None, Code.UNREACHABLE)
            found = await self.client.put(*home, params, self.port, items) if home[1].port else unreachable
        del self.putting[leg.request_id], self.by_request[leg.request_id]
        if found.params is None:
            # Nobody comes for it: were its lease waited for, so would be its blocks.
            self.withdraw(leg.xid)
        leg.at = found.at
        leg.answer(found.params, found.code)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        self.objects.pop(effect.xid, None)
        super().release(port, effect)

    def abort(self, leg: PrefillLeg) -> None:
        """Wherever it is: before the engine has it, on its way here, being computed, or on its way from here."""
        self.settle()
        request_id = leg.request_id
        if self.asking.pop(request_id, None) is not None:
            self._end(leg, Code.CANCELLED)
        elif request_id in self.putting:
            self.putting[request_id].cancel()
        elif request_id in self.loading and leg.job.seq.phase in (Phase.NEW, Phase.WAITING, Phase.LOADING):
            assert self.load_port is not None
            self.put(self.load_port, DecodeAborted(request_id, Code.CANCELLED))
        else:
            super().abort(leg)
            if leg.xid not in self.by_xid:
                self.objects.pop(leg.xid, None)

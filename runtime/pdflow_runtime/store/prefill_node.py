"""The node of a prefill engine that puts what it computes into a store, and loads from there what others have put.

What it does with a prompt is decided in `pdflow/serving/storing.py`. Here are its calls of the store's nodes.
"""

from __future__ import annotations

from typing import Final

import trio

from pdflow.engine.sequence import Admitted
from pdflow.engine.sequence import Sequence as Seq
from pdflow.methods.store.memory import Item
from pdflow.protocol.effects import Commit, FreeBlocks, PostRead, Quarantine, ReadWord
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    AnswerStored,
    AskStore,
    ComputeAgain,
    EnqueueLoading,
    Forget,
    StartPut,
    WithdrawFound,
    WithdrawPut,
)
from pdflow.serving.events import EngineAdmitted, PrefillRequested, PutEnded, StoreAnswered
from pdflow.serving.storing import Storing
from pdflow.wiring.endpoints import Consumer, Producer
from pdflow.wiring.stores import load_xid, node_name, node_of
from pdflow_runtime.engines.job import Job, Sampling
from pdflow_runtime.engines.loop import EngineOutput
from pdflow_runtime.nodes.content import digest_of
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg, LivePrefillNode
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Signer
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.store.calls import StoreClient, StoredKv
from pdflow_runtime.store.keys import StoreKeys
from pdflow_runtime.transports.base import MakeTransport

NOBODY: Final = Coordinates("", 0)


class LiveStorePrefillNode(LivePrefillNode):
    """The node of a prefill engine with a store. Args: `loads` are the endpoints with which it loads, if it does;
    `client` calls the store's nodes."""

    def __init__(
        self,
        config: NodeConfig,
        ends: Producer,
        loads: Consumer | None,
        transport: MakeTransport,
        keys: StoreKeys,
        client: StoreClient,
    ) -> None:
        storing = Storing(keys.most_tokens, config.info.shards.block_size)
        super().__init__(config, ends.scheduler, ends.ranks, transport, storing)
        self.keys: Final = keys
        self.client: Final = client
        self.stores: tuple[Coordinates, ...] = ()
        """The addresses at which the store's nodes take requests, by the latest request."""
        self.objects: dict[Xid, tuple[Item, ...]] = {}
        """The objects of each prompt that is here."""
        self.putting: dict[Xid, trio.CancelScope] = {}
        """The calls of a store that have not been answered, by prompt."""
        self.loads: Final = loads is not None
        self._load_cells = {} if loads is None else loads.scheduler.cells
        if loads is not None:
            info = loads.scheduler.engine
            storing.scheduler = self.add_end(info, loads.scheduler, loads.ranks, over=self.ends[self.name])
        self.do.update(
            {
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Quarantine: self.quarantine,
                FreeBlocks: self.free_blocks,
            }
        )
        self.perform.update(
            {
                AskStore: self.ask,
                WithdrawFound: self.withdraw_found,
                EnqueueLoading: self.enqueue_loading,
                Commit: self.commit,
                ComputeAgain: self.compute_again,
                StartPut: self.start_put,
                WithdrawPut: self.withdraw_put,
                AnswerStored: self.answer_stored,
                FreeBlocks: self.free_blocks,
            }
        )

    def secured_by(self, secret: Secret | None, tls: Tls | None) -> None:
        super().secured_by(secret, tls)
        self.client.secured_by(Signer(secret), tls)

    def update_stores(self, stores: tuple[Coordinates, ...]) -> None:
        self.stores = stores

    def begin(
        self, request_id: RequestId, xid: Xid, tokens: list[int], sampling: Sampling | None = None
    ) -> LivePrefillLeg:
        if request_id in self._load_cells:
            raise KeyError(f"request {request_id} is still being loaded; every attempt needs a new id")
        return super().begin(request_id, xid, tokens, sampling)

    def request(self, leg: LivePrefillLeg) -> PrefillRequested:
        """Return the core's event of a new prompt, and note its objects. A prompt that is one object is not looked up:
        nothing before its end has a name."""
        tokens = leg.job.tokens
        lookup = False
        if leg.keeps:
            items = self.objects[leg.xid] = self.keys.objects(tokens)
            lookup = self.loads and len(items) > 1
        return PrefillRequested(leg.xid, leg.request_id, len(tokens), self._digest(leg), leg.keeps, lookup)

    def _digest(self, leg: LivePrefillLeg) -> int:
        """Return the digest that names what its KV is computed from (S4)."""
        return digest_of(leg.job.tokens, self.config.weights)

    def _home(self, items: tuple[Item, ...]) -> tuple[str, Coordinates]:
        """Return the node that keeps these objects, and where it takes requests; port 0 if it is not up."""
        number = self.keys.home(items)
        return node_name(number), self.stores[number] if number < len(self.stores) else NOBODY

    async def aclose(self) -> None:
        self.client.close()
        await super().aclose()

    # What is stored of a prompt already.

    def ask(self, port: Port, effect: AskStore) -> None:
        self.nursery.start_soon(self._look, self.legs[effect.handle], self.objects[effect.handle])

    async def _look(self, leg: LivePrefillLeg, items: tuple[Item, ...]) -> None:
        node, at = self._home(items)
        found = StoredKv(None)
        if at.port:
            xid, digest, weights = load_xid(leg.xid), self._digest(leg), self.config.weights
            found = await self.client.look(node, at, leg.request_id, xid, items[:-1], digest=digest, weights=weights)
        if found.params is not None and found.at is not None:
            await self.links.update_address(found.params.prefill.engine, found.at.host, found.at.port)
        self.put(self.role, StoreAnswered(leg.xid, found.params))

    def withdraw_found(self, port: Port, effect: WithdrawFound) -> None:
        params = effect.params
        name = node_of(params.prefill.engine)
        at = next((at for number, at in enumerate(self.stores) if node_name(number) == name), NOBODY)
        if at.port:
            self.nursery.start_soon(self.client.withdraw, name, at, params.request_id, params.xid)

    def on_engine_output(self, outcome: EngineOutput) -> None:
        if isinstance(outcome, Admitted):
            seq = outcome.seq
            assert seq.allocation is not None
            self.feed(self.role, EngineAdmitted(seq.handle, seq.allocation, seq.cached_tokens))
        else:
            super().on_engine_output(outcome)

    def enqueue_loading(self, port: Port, effect: EnqueueLoading) -> None:
        leg = self.legs[effect.handle]
        leg.job.seq.remote_kv = True
        leg.job.seq.loaded_tokens = effect.loaded_tokens
        self.submit(leg)

    def compute_again(self, port: Port, effect: ComputeAgain) -> None:
        self.notes["store: prompts not loaded"] += 1
        leg = self.legs[effect.handle]
        old, job = leg.job.seq, leg.job
        seq = Seq(0, old.prompt_tokens, old.output_tokens, prefill_only=True, prefix=old.prefix, handle=old.handle)
        leg.job = Job(seq, job.tokens, job.sampling, returns_first_token=job.returns_first_token)
        self.submit(leg)

    def commit(self, port: Port, effect: Commit) -> None:
        seq = self.legs[effect.request_id].job.seq
        self.notes["store: tokens loaded"] += max(0, seq.loaded_tokens - seq.cached_tokens)
        self.engine.loaded(seq)

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.pool.quarantine(effect.allocation)

    def free_blocks(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation)

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.ranks[port.address].read(effect)

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.ranks[port.address].read_word(effect)

    # What is computed.

    def start_put(self, port: Port, effect: StartPut) -> None:
        handle = effect.handle
        scope = self.putting[handle] = trio.CancelScope()
        self.nursery.start_soon(self._put, self.legs[handle], effect.params, self.objects[handle], scope)

    async def _put(
        self, leg: LivePrefillLeg, params: KvParams, items: tuple[Item, ...], scope: trio.CancelScope
    ) -> None:
        node, at = self._home(items)
        found = StoredKv(None, None, Code.CANCELLED)
        with scope:
            unreachable = StoredKv(None, None, Code.UNREACHABLE)
            found = await self.client.put(node, at, params, self.port, items) if at.port else unreachable
        del self.putting[leg.xid]
        leg.at = found.at
        # A node that says nothing of what it has done has not done it.
        self.put(self.role, PutEnded(leg.xid, found.params, found.code or Code.IO))

    def withdraw_put(self, port: Port, effect: WithdrawPut) -> None:
        """Cancel a put: closing its connection withdraws the call."""
        self.putting[effect.handle].cancel()

    def answer_stored(self, port: Port, effect: AnswerStored) -> None:
        self.legs[effect.handle].answer(effect.params)

    def forget(self, port: Port, effect: Forget) -> None:
        super().forget(port, effect)
        self.objects.pop(effect.handle, None)

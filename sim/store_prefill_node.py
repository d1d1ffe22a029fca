"""A prefill engine that puts what it computes into a store: what a decode engine is to others, the store is to it.

Its blocks come back when the store has them. As published its engine waits until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.methods.method import Conduct
from pdflow.protocol.effects import AnswerPrefill, ReleaseBlocks
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.node import Port
from sim.prefill_node import PrefillNode
from sim.store_node import Put, StoreNode

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
        self.putting: dict[RequestId, tuple[StoreNode, Xid]] = {}
        """What has been computed and is held here until the store has it."""

    def accept(self, leg: DispatchPrefill) -> None:
        if leg.keeps and not self.stores.fits(self.world.records.input_tokens[leg.request]):
            self.world.router.later(PrefillAnswered(leg.request_id, None, Code.REJECTED))
            return
        super().accept(leg)

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        """It is computed; what the router is told comes from the store."""
        params = effect.params
        del self.by_request[effect.request_id]
        leg = self.by_xid[params.xid]
        items = self.stores.items(leg.request)
        store = self.stores.node_of(items)
        self.putting[leg.request_id] = (store, params.xid)
        put = Put(leg.request, leg.request_id, params.num_tokens, params, items)
        self.env.call(self.world.fabric.control_ns, store.start, put)
        if self.conduct.prefill_waits:
            self.hold()

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        self.putting.pop(self.by_xid[effect.xid].request_id, None)
        super().release(port, effect)
        if self.held and not self.putting:
            self.let_go()

    def abort(self, request_id: RequestId) -> None:
        """Of what is being put the store is told."""
        putting = self.putting.get(request_id)
        if putting is None:
            super().abort(request_id)
        else:
            store, xid = putting
            self.env.call(self.world.fabric.control_ns, store.abort, (request_id, xid))

    def assert_empty(self) -> None:
        assert not self.putting, f"{self.name} still puts {list(self.putting)}"
        assert not self.held, f"{self.name} still waits"

"""A store's node, live: D towards the prefill engines that put, and P towards the engines that get, over one memory at
each of its ranks.

What goes in there, and what can be got, is `pdflow/methods/kv_store_ledger.py`'s to say, as in simulations. Whoever
puts or asks waits for a word on its call; hanging up takes the call back, as it does everywhere.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from pdflow.methods.kv_store_ledger import Lookup, Offer, Put, StoreLedger
from pdflow.methods.store_memory import Item, StoreMemory
from pdflow.protocol.effects import (
    AnswerPrefill,
    BumpWord,
    Commit,
    Enqueue,
    FreeBlocks,
    PostWrite,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    StopWrite,
)
from pdflow.protocol.events import DecodeAborted
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId, Xid
from pdflow.serving.core import Port
from pdflow.wiring.stores import Consumer, Producer
from runtime.clock import now_ns
from runtime.ranked_node import Place, RankedNode
from runtime.store_backing import Backing
from runtime.transports.base import MakeTransport


class StoreCall:
    """Somebody puts a prompt here, or asks what is here of one. `answered` is set once there is `params`, by which it
    can be got, or a `code` that says why there will be none; NONE, if nothing is here."""

    def __init__(self, request_id: RequestId, xid: Xid) -> None:
        self.request_id: Final = request_id
        self.xid: Final = xid
        self.begun_ns: Final = now_ns()
        self.answered: Final = trio.Event()
        self.params: KvParams | None = None
        self.code = Code.NONE

    def answer(self, params: KvParams | None, code: Code = Code.NONE) -> None:
        self.params, self.code = params, code
        self.answered.set()


class StoreNode(RankedNode):
    """One life of a node. `place` is that of the end that is put to."""

    def __init__(
        self, name: str, place: Place, put: Consumer, get: Producer, memory: StoreMemory, transport: MakeTransport
    ) -> None:
        super().__init__(name, place, transport)
        self.memory: Final = memory
        self.ledger: Final = StoreLedger(memory, place.info.shards.block_size, self.count)
        self.calls: dict[Xid, StoreCall] = {}
        """By what they would be got as: puts that are not over, and all that can be got."""
        self.backing: Backing | None = None
        """Where what is here is kept, too."""
        self._put_cells = put[0].cells
        self.put_port: Final = self.add_end(place.info, *put)
        self.get_port: Final = self.add_end(get[0].engine, *get, over=list(self.ranks.values()))
        self.do.update(
            {
                Enqueue: self.enqueue,
                Commit: self.commit,
                Resolve: self.resolve,
                Quarantine: self.quarantine,
                FreeBlocks: self.free,
                AnswerPrefill: self.answer,
                ReleaseBlocks: self.release,
                BumpWord: self.bump,
                # Nobody here registers with a store; somebody who does all the same gets what he asks for.
                PostWrite: self.post_write,
                StopWrite: self.stop_write,
            }
        )

    def begin_all(self, nursery: trio.Nursery) -> None:
        if self.backing is not None:
            nursery.start_soon(self.backing.run)

    async def aclose(self) -> None:
        await super().aclose()
        if self.backing is not None:
            self.backing.server.close()

    # What engines ask of it.

    def start(self, params: KvParams, items: tuple[Item, ...]) -> StoreCall:
        """PutStart: somebody has this prompt's KV, and would write it here. KeyError if that is so already."""
        call = self._call(params.request_id, params.xid)
        put = Put(call, params.request_id, params, items, params.digest, params.weights)
        self.put(self.put_port, self.ledger.start(put))
        return call

    def look(self, request_id: RequestId, xid: Xid, items: tuple[Item, ...], digest: int, weights: int) -> StoreCall:
        """GetReplicaList: what is here of a prompt. KeyError if that is being asked already."""
        call = self._call(request_id, xid)
        found = self.ledger.look(Lookup(call, request_id, xid, items, digest, weights))
        if found is None:
            del self.calls[xid]
            call.answer(None)
        else:
            self._offer(found)
        return call

    def _call(self, request_id: RequestId, xid: Xid) -> StoreCall:
        if xid in self.calls or request_id in self.ledger.puts or request_id in self._put_cells:
            raise KeyError(f"request {request_id} is here already; every attempt needs an id of its own")
        call = self.calls[xid] = StoreCall(request_id, xid)
        return call

    def withdraw(self, request_id: RequestId, xid: Xid) -> None:
        """Nobody will come for it."""
        self.settle()
        event = self.ledger.abort(request_id, xid)
        if event is not None:
            self.put(self.put_port if isinstance(event, DecodeAborted) else self.get_port, event)

    # Being written to.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        never = self.ledger.enqueue(effect.request_id)
        if never is None:
            self.grant_soon()
        else:
            self.put(port, never)

    def grants(self, now: Instant) -> list[tuple[Port, Any]]:
        return [(self.put_port, event) for event in self.ledger.granted(now)]

    def commit(self, port: Port, effect: Commit) -> None:
        put = self.ledger.puts[effect.request_id]
        self._offer(self.ledger.commit(effect.request_id))
        if self.backing is not None:
            self.backing.save(put.items, put.tokens)

    def _offer(self, events: Offer) -> None:
        for event in events:
            self.put(self.get_port, event)

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It could not be put: its request alone hears of it."""
        put = self.ledger.failed(effect.request_id)
        call = self.calls.pop(put.params.xid)
        self.stage("put", call.begun_ns)
        call.answer(None, effect.code)
        self.grant_soon()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """What a writer may still reach stays held."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.ledger.free(effect.allocation.generation, now_ns())
        self.grant_soon()

    # Being read from.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        params = effect.params
        for rank, word in zip(self.ends[port.address], params.words, strict=True):
            rank.expose(word)
        call = self.calls[params.xid]
        if isinstance(self.ledger.offered[params.xid], Put):
            self.stage("put", call.begun_ns)
        call.answer(params)

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.ranks[port.address].bump(effect.word)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        del self.calls[effect.xid]
        self.ledger.release(effect.xid, now_ns())
        self.grant_soon()

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.ranks[port.address].write(effect)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.ranks[port.address].orders.stop(effect.op)

    # What is asked of any node.

    def newest_generation(self) -> int:
        return self.memory.pool.newest_generation

    def is_still(self) -> bool:
        """Nobody holds anything here, in whatever way; what is kept stays."""
        saved = self.backing is None or self.backing.is_still()
        return saved and not (self.memory.held or self.memory.waiting or self.calls)

    def count(self, what: str, number: int) -> None:
        if number:
            self.notes[what] += number

"""The live node of a store: D towards the prefill engines that put, and P towards the engines that get, over one memory
at each of its ranks.

What it does with a prompt is decided in `pdflow/serving/store.py`. An engine that puts or looks up waits for the answer
to its call; closing the connection withdraws the call, as it does everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import trio

from pdflow.methods.store.ledger import Put, StoreLedger
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.protocol.effects import AnswerPrefill, BumpWord, PostWrite, StopWrite
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import AnswerCall, AskForRoom, EndCall, Stored
from pdflow.serving.events import CallWithdrawn, LookupRequested, PutRequested, RoomDue
from pdflow.serving.store import StoreCore
from pdflow.wiring.endpoints import Consumer, Producer
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.ranked_node import NodeConfig, RankedNode
from pdflow_runtime.store.backing import Backing
from pdflow_runtime.transports.base import MakeTransport


class StoreCall:
    """A put or a lookup of one prompt. `answered` is set once there is `params`, by which it can be got, or a `code`
    that says why there will be none; NONE, if nothing is here."""

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


class LiveStoreNode(RankedNode):
    """The node of one incarnation of a store's process. `config` is that of the endpoints that are put to."""

    stages = ("put",)

    def __init__(
        self, name: str, config: NodeConfig, put: Consumer, get: Producer, memory: StoreMemory, transport: MakeTransport
    ) -> None:
        self.storing: Final = StoreCore(memory, config.info.shards.block_size, self.count)
        super().__init__(name, config, transport, self.storing)
        self.memory: Final = memory
        self.calls: dict[Xid, StoreCall] = {}
        """Puts that are not over and all that can be got, by the ids under which they would be got."""
        self.backing: Backing | None = None
        """The copy of its objects in a server, if there is one."""
        self._put_cells = put.scheduler.cells
        put_port = self.add_end(config.info, put.scheduler, put.ranks)
        owners = list(self.ranks.values())
        self.get_port: Final = self.add_end(get.scheduler.engine, get.scheduler, get.ranks, over=owners)
        self.do.update(
            {
                BumpWord: self.bump,
                # Nobody here registers with a store; somebody who does all the same gets what he asks for.
                PostWrite: self.post_write,
                StopWrite: self.stop_write,
            }
        )
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                AnswerPrefill: self.expose,
                AnswerCall: self.answer,
                EndCall: self.end_call,
                Stored: self.stored,
            }
        )
        self.storing.begin(put_port, self.get_port)

    @property
    def ledger(self) -> StoreLedger:
        return self.storing.ledger

    def begin_all(self, nursery: trio.Nursery) -> None:
        if self.backing is not None:
            nursery.start_soon(self.backing.run)

    async def aclose(self) -> None:
        await super().aclose()
        if self.backing is not None:
            self.backing.server.close()

    # What engines ask of it.

    def start(self, params: KvParams, items: tuple[Item, ...]) -> StoreCall:
        """Begin a put (PutStart): an engine has this prompt's KV, and would write it here. KeyError if the put is known
        already."""
        call = self._call(params.request_id, params.xid)
        self.put(self.role, PutRequested(params, items))
        return call

    def look(self, request_id: RequestId, xid: Xid, items: tuple[Item, ...], digest: int, weights: int) -> StoreCall:
        """Begin a lookup (GetReplicaList) of what is stored of a prompt. KeyError if the lookup is known already."""
        call = self._call(request_id, xid)
        self.put(self.role, LookupRequested(request_id, xid, items, digest, weights))
        return call

    def _call(self, request_id: RequestId, xid: Xid) -> StoreCall:
        self.settle()
        if xid in self.calls or self.storing.knows(request_id, xid) or request_id in self._put_cells:
            raise KeyError(f"request {request_id} is already open; every attempt needs a new id")
        call = self.calls[xid] = StoreCall(request_id, xid)
        return call

    def withdraw(self, request_id: RequestId, xid: Xid) -> None:
        """Withdraw a call, whose KV no engine will come for."""
        self.settle()
        self.feed(self.role, CallWithdrawn(request_id, xid))

    def ask_for_room(self, port: Port, effect: AskForRoom) -> None:
        self.admit_soon()

    def admissions(self, now: Instant) -> Iterator[tuple[Port, Any]]:
        yield self.role, RoomDue()

    def stored(self, port: Port, effect: Stored) -> None:
        if self.backing is not None:
            self.backing.save(effect.items, effect.num_tokens)

    def answer(self, port: Port, effect: AnswerCall) -> None:
        call = self.calls[effect.xid]
        if isinstance(self.ledger.offered.get(effect.xid), Put) or effect.code is not Code.NONE:
            self.stage(call.request_id, "put", call.begun_ns, now_ns())
        call.answer(effect.params, effect.code)

    def end_call(self, port: Port, effect: EndCall) -> None:
        del self.calls[effect.xid]

    # Being read from.

    def expose(self, port: Port, effect: AnswerPrefill) -> None:
        for rank, lease_word in zip(self.ends[self.get_port.address], effect.params.rank_words, strict=True):
            rank.expose(lease_word)

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.ranks[port.address].bump(effect.lease_word)

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.ranks[port.address].write(effect)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.ranks[port.address].transfers.stop(effect.op)

    # What is asked of any node.

    def newest_generation(self) -> int:
        return self.memory.pool.newest_generation

    def is_drained(self) -> bool:
        """True if no call holds anything here, in whatever way; stored objects stay."""
        saved = self.backing is None or self.backing.is_drained()
        return saved and not (self.memory.held or self.memory.waiting or self.calls)

    def count(self, what: str, number: int) -> None:
        if number:
            self.notes[what] += number

"""A store's node: D towards the prefill engines, which put, and P towards the decode engines, which get.

It has the endpoints of both, under two names, over one memory. A put is a decode leg: the store registers room, P
writes, and the commit makes it complete. What is complete is offered as a prefilled prompt is, and the router hears of
that as of P's answer. So leases, cancelling, quarantine and incarnations are the protocol's, on either side.

Calls of the store's own, like PutStart, take a control message's time and are never lost: as the router's are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.memory.paged import PoolError
from pdflow.methods.store_memory import Item, StoreMemory
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.effects import (
    AnswerPrefill,
    BumpWord,
    Commit,
    Enqueue,
    FreeBlocks,
    Quarantine,
    ReleaseBlocks,
    Resolve,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillFinished,
    PrefillQueued,
    SourceWithdrawn,
)
from pdflow.protocol.ids import KvParams, Shards, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import Instant, RequestId, Xid
from pdflow.routing.router import PrefillAnswered
from sim.node import Node, Port
from sim.prefill_node import WEIGHTS

if TYPE_CHECKING:
    from sim.world import World


class Put:
    """One prompt on its way into the store, and then in it, until nobody holds it for its request."""

    __slots__ = ("generation", "items", "params", "request", "request_id", "tokens")

    def __init__(
        self, request: int, request_id: RequestId, tokens: int, params: KvParams, items: tuple[Item, ...]
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.tokens = tokens
        self.params = params
        """Who puts it."""
        self.items = items
        self.generation = 0
        """Of what it holds, from when it has room."""


class StoreNode(Node):
    """Args: `name` is the node's; engines that put know it as "name.put", those that get as "name.get"."""

    alive = True
    paused_until: Instant = 0
    """It never stands still; no fault happens to it yet, but to what comes and goes."""

    def __init__(self, world: World, name: str, memory: StoreMemory) -> None:
        super().__init__(world)
        self.name = name
        self.memory = memory
        self.put_port: Port
        self.get_port: Port
        self.block_size = 0
        self.puts: dict[RequestId, Put] = {}
        """Not complete yet."""
        self.offered: dict[Xid, Put] = {}
        """Complete, and to be got."""
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
            }
        )

    def make_ends(
        self,
        put: tuple[ConsumerScheduler, list[ConsumerRank]],
        get: tuple[ProducerScheduler, list[ProducerRank]],
        shards: Shards,
        incarnation: int,
    ) -> None:
        """Its endpoints on either side."""
        self.block_size = shards.block_size
        self.put_port = self.add(put_name(self.name), put[0], incarnation)
        self.get_port = self.add(get_name(self.name), get[0], incarnation)
        for rank in range(shards.ranks):
            self.add(rank_address(put_name(self.name), rank), put[1][rank], incarnation)
            self.add(rank_address(get_name(self.name), rank), get[1][rank], incarnation)

    # What engines ask of it.

    def start(self, put: Put) -> None:
        """PutStart: somebody has this prompt's KV and would write it here."""
        self.puts[put.request_id] = put
        blocks = sum(item.blocks for item in put.items)
        self.feed(self.put_port, DecodeQueued(put.request_id, put.params, blocks, 0))

    def abort(self, about: tuple[RequestId, Xid]) -> None:
        """Nobody will come for it."""
        request_id, xid = about
        if request_id in self.puts:
            self.feed(self.put_port, DecodeAborted(request_id, Code.CANCELLED))
        elif xid in self.offered:
            self.feed(self.get_port, SourceWithdrawn(xid))

    # Being written to.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        try:
            self.memory.want(effect.request_id, self.puts[effect.request_id].items)
        except PoolError:
            self.feed(port, DecodeAborted(effect.request_id, Code.REJECTED))
            return
        self.grant()

    def grant(self) -> None:
        """Whoever has room now registers it, without what is here already."""
        for placed in self.memory.granted(self.env.now):
            put = self.puts[placed.name]
            put.generation = placed.target.generation
            here = min(put.tokens, sum(item.blocks for item in put.items[: placed.found]) * self.block_size)
            if here == put.tokens:
                self.feed(self.put_port, DecodeHit(put.request_id))
                continue
            digest = self.world.digest(put.request)
            self.feed(
                self.put_port,
                DecodeAdmitted(put.request_id, placed.target, here, put.tokens - here, digest, WEIGHTS),
            )

    def commit(self, port: Port, effect: Commit) -> None:
        """PutEnd: it is complete, and from now on under a lease."""
        put = self.puts.pop(effect.request_id)
        xid = put.params.xid
        self.offered[xid] = put
        source = self.memory.complete(put.generation)
        digest = self.world.digest(put.request)
        self.feed(self.get_port, PrefillQueued(xid, put.request_id))
        self.feed(self.get_port, PrefillFinished(xid, source, put.tokens, digest, WEIGHTS))

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It could not be put: its request alone hears of it."""
        del self.puts[effect.request_id]
        self.memory.forget(effect.request_id)
        self.world.router.later(PrefillAnswered(effect.request_id, None, effect.code))
        self.grant()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """What a writer may still reach stays held."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.memory.release(effect.allocation.generation)
        self.grant()

    # Being read from.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        for rank, word in enumerate(effect.params.words):
            self.world.fabric.words[rank_address(port.address, rank), word.index] = word.word
        self.world.router.later(PrefillAnswered(effect.request_id, effect.params))

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.world.fabric.words.pop((port.address, effect.word.index), None)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        """Its request has read it, or has not come for it in time."""
        put = self.offered.pop(effect.xid)
        self.memory.release(put.generation)
        self.grant()

    # At the end.

    def newest_generation(self) -> int:
        return self.memory.pool.newest_generation

    def assert_empty(self) -> None:
        assert not self.puts, f"{self.name} still waits for {list(self.puts)}"
        assert not self.offered, f"{self.name} still offers {list(self.offered)}"
        self.memory.assert_empty(self.name)


def put_name(node: str) -> str:
    """The engine that prefill engines write to."""
    return f"{node}.put"


def get_name(node: str) -> str:
    """The engine that decode engines read from."""
    return f"{node}.get"

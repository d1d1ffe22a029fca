"""A store's node: D towards the prefill engines, which put, and P towards the decode engines, which get.

It has the endpoints of both, under two names, over one memory. A put is a decode leg: the store registers room, P
writes, and the commit makes it complete. What is complete is offered as a prefilled prompt is, and the router hears of
that as of P's answer. So leases, cancelling, quarantine and incarnations are the protocol's, on either side.

Calls of the store's own, like PutStart, take a control message's time and are never lost: as the router's are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from pdflow.protocol.values import Allocation, Instant, RequestId, Xid
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


class Lookup:
    """Somebody asks what is here of a prompt, to load it. `told(node, lookup, params)` hears of it."""

    __slots__ = ("generation", "items", "request", "request_id", "tokens", "told", "xid")

    def __init__(
        self, request: int, request_id: RequestId, xid: Xid, items: tuple[Item, ...], told: Callable[[Any], None]
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.xid = xid
        self.items = items
        self.told = told
        self.tokens = 0
        self.generation = 0


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
        self.offered: dict[Xid, Put | Lookup] = {}
        """Complete, and to be got."""
        self.granting = False
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
        blocks = -(-put.tokens // self.block_size)
        self.feed(self.put_port, DecodeQueued(put.request_id, put.params, blocks, 0))

    def look(self, ask: Lookup) -> None:
        """GetReplicaList: what is here of a prompt, from its start on, under a lease."""
        found = self.memory.lease(ask.items)
        if found is None:
            self.env.call(self.world.fabric.control_ns, ask.told, (self, ask, None))
            return
        ask.generation = found.generation
        ask.tokens = len(found.blocks) * self.block_size
        self.count("store: tokens found by P", ask.tokens)
        self.offer(ask.xid, ask, found)

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
        self.grant_soon()

    def grant_soon(self) -> None:
        """When all that happens now has: who gets room may be among those that are given up at this very instant."""
        if self.memory.waiting and not self.granting:
            self.granting = True
            self.env.call(0, self.grant, None)

    def grant(self, _: None) -> None:
        """Whoever has room now registers it, without what is here already."""
        self.granting = False
        evicted = self.memory.evicted
        granted = self.memory.granted(self.env.now)
        self.count("store: objects evicted", self.memory.evicted - evicted)
        for placed in granted:
            put = self.puts[placed.name]
            put.generation = placed.target.generation
            here = min(put.tokens, placed.found_blocks * self.block_size)
            self.count("store: tokens not put again", here)
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
        self.offer(put.params.xid, put, self.memory.complete(put.generation))

    def offer(self, xid: Xid, what: Put | Lookup, source: Allocation) -> None:
        """From now on it can be got."""
        self.offered[xid] = what
        digest = self.world.digest(what.request)
        self.feed(self.get_port, PrefillQueued(xid, what.request_id))
        self.feed(self.get_port, PrefillFinished(xid, source, what.tokens, digest, WEIGHTS))

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It could not be put: its request alone hears of it."""
        del self.puts[effect.request_id]
        self.memory.forget(effect.request_id)
        self.world.router.later(PrefillAnswered(effect.request_id, None, effect.code))
        self.grant_soon()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """What a writer may still reach stays held."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.memory.release(effect.allocation.generation, self.env.now)
        self.grant_soon()

    # Being read from.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        params = effect.params
        for rank, word in enumerate(params.words):
            self.world.fabric.words[rank_address(port.address, rank), word.index] = word.word
        offered = self.offered[params.xid]
        if isinstance(offered, Lookup):
            self.env.call(self.world.fabric.control_ns, offered.told, (self, offered, params))
        else:
            self.world.router.later(PrefillAnswered(effect.request_id, params))

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.world.fabric.words.pop((port.address, effect.word.index), None)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        """Its request has read it, or has not come for it in time."""
        self.memory.release(self.offered.pop(effect.xid).generation, self.env.now)
        self.grant_soon()

    # At the end.

    def count(self, what: str, number: int) -> None:
        """For the result."""
        if number:
            notes = self.world.totals.notes
            notes[what] = notes.get(what, 0) + number

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

"""A store's node: D towards the prefill engines, which put, and P towards the decode engines, which get.

It has the endpoints of both, under two names, over one memory. What goes in there, and what can be got, is
`kv_store_ledger.py`'s to say, for both worlds. The router hears of what is complete as of P's answer.

Calls of the store's own, like PutStart, take a control message's time and are never lost: as the router's are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.methods.kv_store_ledger import Lookup, Offer, Put, StoreLedger
from pdflow.methods.store_memory import StoreMemory
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
from pdflow.protocol.events import DecodeAborted
from pdflow.protocol.ids import Shards, rank_address
from pdflow.protocol.values import Instant, RequestId, Xid
from pdflow.routing.router import PrefillAnswered
from pdflow.wiring.stores import Consumer, Producer, get_name, put_name
from sim.node import Node, Port

if TYPE_CHECKING:
    from sim.world import World


class StoreNode(Node):
    """Args: `name` is the node's; engines that put know it as "name.put", those that get as "name.get".

    A lookup is its asker's callable: `whose((node, lookup, params))` hears of it.
    """

    alive = True
    paused_until: Instant = 0
    """It never stands still; no fault happens to it yet, but to what comes and goes."""

    def __init__(self, world: World, name: str, memory: StoreMemory) -> None:
        super().__init__(world)
        self.name = name
        self.memory = memory
        self.put_port: Port
        self.get_port: Port
        self.ledger: StoreLedger
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

    def make_ends(self, put: Consumer, get: Producer, shards: Shards, incarnation: int) -> None:
        """Its endpoints on either side."""
        self.ledger = StoreLedger(self.memory, shards.block_size, self.count)
        self.put_port = self.add(put_name(self.name), put[0], incarnation)
        self.get_port = self.add(get_name(self.name), get[0], incarnation)
        for rank in range(shards.ranks):
            self.add(rank_address(put_name(self.name), rank), put[1][rank], incarnation)
            self.add(rank_address(get_name(self.name), rank), get[1][rank], incarnation)

    # What engines ask of it.

    def start(self, put: Put) -> None:
        """PutStart."""
        self.feed(self.put_port, self.ledger.start(put))

    def look(self, ask: Lookup) -> None:
        """GetReplicaList."""
        found = self.ledger.look(ask)
        if found is None:
            self.env.call(self.world.fabric.control_ns, ask.whose, (self, ask, None))
        else:
            self.offer(found)

    def abort(self, about: tuple[RequestId, Xid]) -> None:
        """Nobody will come for it."""
        event = self.ledger.abort(*about)
        if event is not None:
            self.feed(self.put_port if type(event) is DecodeAborted else self.get_port, event)

    # Being written to.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        never = self.ledger.enqueue(effect.request_id)
        if never is None:
            self.grant_soon()
        else:
            self.feed(port, never)

    def grant_soon(self) -> None:
        """When all that happens now has."""
        if self.memory.waiting and not self.granting:
            self.granting = True
            self.env.call(0, self.grant, None)

    def grant(self, _: None) -> None:
        self.granting = False
        for event in self.ledger.granted(self.env.now):
            self.feed(self.put_port, event)

    def commit(self, port: Port, effect: Commit) -> None:
        self.offer(self.ledger.commit(effect.request_id))

    def offer(self, events: Offer) -> None:
        for event in events:
            self.feed(self.get_port, event)

    def resolve(self, port: Port, effect: Resolve) -> None:
        """It could not be put: its request alone hears of it."""
        self.ledger.failed(effect.request_id)
        self.world.router.later(PrefillAnswered(effect.request_id, None, effect.code))
        self.grant_soon()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """What a writer may still reach stays held."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.ledger.free(effect.allocation.generation, self.env.now)
        self.grant_soon()

    # Being read from.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        params = effect.params
        for rank, word in enumerate(params.words):
            self.world.fabric.words[rank_address(port.address, rank), word.index] = word.word
        offered = self.ledger.offered[params.xid]
        if isinstance(offered, Lookup):
            self.env.call(self.world.fabric.control_ns, offered.whose, (self, offered, params))
        else:
            self.world.router.later(PrefillAnswered(effect.request_id, params))

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.world.fabric.words.pop((port.address, effect.word.index), None)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        self.ledger.release(effect.xid, self.env.now)
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
        self.ledger.assert_empty(self.name)

"""The ledger of a store's node: the prompts that are being put, and those that can be got, between its memory and its
endpoints.

A put is a decode leg: the store registers room, P writes, and the commit makes it complete. The store offers a complete
prompt like a prefilled one, and offers at once what it already has. So the protocol decides leases, cancels, quarantine
and incarnations, on both sides.

Calls answer with events for the node's endpoints, which `pdflow/serving/store.py` delivers to them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

from pdflow.memory.paged import PoolError
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillFinished,
    PrefillQueued,
    SourceWithdrawn,
)
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, RequestId, Xid

Offer: TypeAlias = tuple[PrefillQueued, PrefillFinished]
"""For the endpoint that is got from."""


class Put:
    """The state of one prompt while it is put into the store, and in the store until no request holds it."""

    __slots__ = ("digest", "generation", "items", "params", "request_id", "tokens", "weights")

    def __init__(
        self, request_id: RequestId, params: KvParams, items: tuple[Item, ...], digest: int, weights: int
    ) -> None:
        self.request_id = request_id
        self.tokens = params.num_tokens
        self.params = params
        """Names the engine that puts it."""
        self.items = items
        self.digest = digest
        """The digest of the whole prompt, however much of it this is (S4)."""
        self.weights = weights
        self.generation = 0
        """The generation of what it holds, from when it has room."""


class Lookup:
    """The request of an engine for what is here of a prompt, to load it."""

    __slots__ = ("digest", "generation", "items", "request_id", "tokens", "weights", "xid")

    def __init__(self, request_id: RequestId, xid: Xid, items: tuple[Item, ...], digest: int, weights: int) -> None:
        self.request_id = request_id
        self.xid = xid
        self.items = items
        self.digest = digest
        self.weights = weights
        self.tokens = 0
        self.generation = 0


class StoreLedger:
    """The puts and the offered prompts of one node. Args: `count` adds to a counter of the result: (its name, how
    much)."""

    def __init__(self, memory: StoreMemory, block_size: int, count: Callable[[str, int], None]) -> None:
        self.memory = memory
        self.block_size = block_size
        self.count = count
        self.puts: dict[RequestId, Put] = {}
        """Puts that are not complete yet."""
        self.offered: dict[Xid, Put | Lookup] = {}
        """Prompts that are complete, and can be got."""

    # What engines ask.

    def start(self, put: Put) -> DecodeQueued:
        """PutStart: register that an engine has this prompt's KV and would write it here."""
        self.puts[put.request_id] = put
        return DecodeQueued(put.request_id, put.params, -(-put.tokens // self.block_size), 0)

    def look(self, ask: Lookup) -> Offer | None:
        """GetReplicaList: offer what is here of a prompt, from its start on, under a lease. None if nothing is."""
        found = self.memory.lease(ask.items)
        if found is None:
            return None
        ask.generation = found.generation
        ask.tokens = len(found.blocks) * self.block_size
        self.count("store: tokens found by P", ask.tokens)
        return self._offer(ask.xid, ask, found)

    def abort(self, request_id: RequestId, xid: Xid) -> DecodeAborted | SourceWithdrawn | None:
        """Return the event that withdraws a put or an offer: for the endpoint that is put to, or the one that is got
        from. None if there is neither."""
        if request_id in self.puts:
            return DecodeAborted(request_id, Code.CANCELLED)
        return SourceWithdrawn(xid) if xid in self.offered else None

    # What being put to comes to.

    def enqueue(self, request_id: RequestId) -> DecodeAborted | None:
        """Queue a put for room. Return its abort if there is never enough."""
        try:
            self.memory.enqueue(request_id, self.puts[request_id].items)
        except PoolError:
            return DecodeAborted(request_id, Code.REJECTED)
        return None

    def admit_waiting(self, now: Instant) -> list[DecodeHit | DecodeAdmitted]:
        """Give room to the puts that wait for it, and return their registrations, without what is here already."""
        evicted = self.memory.evicted
        admitted = self.memory.admit_waiting(now)
        self.count("store: objects evicted", self.memory.evicted - evicted)
        events: list[DecodeHit | DecodeAdmitted] = []
        for placed in admitted:
            put = self.puts[placed.name]
            put.generation = placed.target.generation
            here = min(put.tokens, placed.found_blocks * self.block_size)
            self.count("store: tokens not put again", here)
            if here == put.tokens:
                events.append(DecodeHit(put.request_id))
            else:
                missing = put.tokens - here
                events.append(DecodeAdmitted(put.request_id, placed.target, here, missing, put.digest, put.weights))
        return events

    def commit(self, request_id: RequestId) -> Offer:
        """PutEnd: offer a prompt that is complete, from now on under a lease."""
        put = self.puts.pop(request_id)
        return self._offer(put.params.xid, put, self.memory.complete(put.generation))

    def failed(self, request_id: RequestId) -> Put:
        """Forget a put that has failed, and return it."""
        put = self.puts.pop(request_id)
        self.memory.forget(request_id)
        return put

    def free(self, generation: int, now: Instant) -> None:
        """Release what a put held, once nothing can write to it any more."""
        self.memory.release(generation, now)

    # What has been kept elsewhere, and comes back.

    def bring(self, items: tuple[Item, ...], now: Instant) -> Allocation | None:
        """Take room for these objects, but for those of them that are here; None if there is none at once."""
        evicted = self.memory.evicted
        placed = self.memory.bring(items, now)
        self.count("store: objects evicted", self.memory.evicted - evicted)
        return None if placed is None else placed.target

    def brought(self, generation: int, now: Instant) -> None:
        """Complete objects that have been brought back: others can find them."""
        self.memory.complete(generation)
        self.memory.release(generation, now)

    # What being got from comes to.

    def release(self, xid: Xid, now: Instant) -> None:
        """Release a prompt that its request has read, or has not come for in time."""
        self.memory.release(self.offered.pop(xid).generation, now)

    def _offer(self, xid: Xid, what: Put | Lookup, source: Allocation) -> Offer:
        """Offer a prompt: from now on it can be got."""
        self.offered[xid] = what
        finished = PrefillFinished(xid, source, what.tokens, what.digest, what.weights)
        return PrefillQueued(xid, what.request_id), finished

    def fingerprint(self) -> Hashable:
        puts = tuple([(name, put.params.xid, put.items, put.generation) for name, put in self.puts.items()])
        offered = tuple([(xid, type(what) is Put, what.generation) for xid, what in self.offered.items()])
        return self.memory.fingerprint(), puts, offered

    def assert_empty(self, name: str) -> None:
        assert not self.puts, f"{name} still waits for {list(self.puts)}"
        assert not self.offered, f"{name} still offers {list(self.offered)}"
        self.memory.assert_empty(name)

"""All nodes of a store, which of them has a prompt, and under which keys.

A prompt is content by the names of its prefix blocks, as far as it has any, and from there on by itself: no other is
the same. By the prompt it is one object; by the block each named block is one, and what follows them another. All of it
lies on the node of its first object.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

import msgspec

from pdflow.methods.kv_store_keys import Key, block_keys, chained, home, origin
from pdflow.methods.store_memory import Item, StoreMemory
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.scenario.fields import seconds_to_ns
from sim.store_node import StoreNode, get_name, put_name
from sim.store_prefill_node import Loads, load_name

if TYPE_CHECKING:
    from pdflow.scenario.schema import Pool
    from sim.build import Builder

INCARNATION = 0x570E_0000
"""Of the first node; those of engines are below."""


class Stores:
    """Args: `beside` is the pool whose shape and network the nodes share."""

    def __init__(self, builder: Builder, beside: Pool) -> None:
        self.world = builder.world
        self.transfer = builder.scenario.transfer
        self.shards = builder.alike(Shards(beside.tp, 1, beside.block_size))
        self.by_block = self.transfer.store_granularity == "block" and builder.named
        sizes = [pool.block_size for pool in builder.scenario.pools]
        self.unit_tokens = lcm(self.world.prefix_block_tokens, *sizes)
        """Of an object that is named: it ends where a name does, and a block of whoever has it."""
        self.model = builder.scenario.model.name
        self.builder = builder
        self.origins: dict[int, Key] = {}
        """What each process's chains begin with, by its salt."""
        if self.by_block:
            self.world.caches = True
        kv_bytes = builder.shapes[beside.name].engine_bytes_per_token(beside.tp)
        token_bytes = kv_bytes + builder.stored_hidden_bytes * beside.tp
        self.blocks = self.transfer.store_bytes // (token_bytes * beside.block_size)
        self.nodes = [self.node(builder, beside, index) for index in range(self.transfer.store_nodes)]

    def node(self, builder: Builder, beside: Pool, index: int) -> StoreNode:
        transfer, dialect, geometry = self.transfer, builder.dialect, builder.geometry
        name, incarnation = f"store-{index}", INCARNATION + index
        node = StoreNode(self.world, name, StoreMemory(self.blocks, transfer.store_keep, transfer.store_high_water))
        put, get = EngineInfo(put_name(name), self.shards), EngineInfo(get_name(name), self.shards)
        limits = (self.blocks, transfer.quarantine_fraction, transfer.quarantine_suspect_fraction)
        timers = builder.timers
        leases = msgspec.structs.replace(timers, lease_ns=seconds_to_ns(transfer.store_lease_s))
        ranks = range(self.shards.ranks)
        node.make_ends(
            (
                ConsumerScheduler(put, incarnation, dialect, timers, geometry, False, *limits),
                [ConsumerRank(put, rank, incarnation, dialect, timers, geometry) for rank in ranks],
            ),
            (
                ProducerScheduler(get, incarnation, dialect, True),
                [ProducerRank(get, rank, incarnation, dialect, leases, geometry) for rank in ranks],
            ),
            self.shards,
            incarnation,
        )
        for info in (put, get):
            self.world.fabric.paths.pool_of[info.engine] = beside
        return node

    def fits(self, tokens: int) -> bool:
        """Whether a prompt's KV fits a node at all."""
        return -(-tokens // self.shards.block_size) <= self.blocks

    def node_of(self, items: tuple[Item, ...]) -> StoreNode:
        return self.nodes[home(items[0].key, len(self.nodes))]

    def loads(self, engine: EngineInfo, blocks: int, incarnation: int) -> Loads | None:
        """The endpoints with which a prefill engine loads; None if it does not. Layouts have no pipelined D."""
        if not self.by_block or engine.shards.pp > 1:
            return None
        info = EngineInfo(load_name(engine.engine), engine.shards)
        paths, transfer, builder = self.world.fabric.paths, self.transfer, self.builder
        paths.pool_of[info.engine] = paths.pool_of[engine.engine]
        about = (builder.dialect, builder.timers, builder.geometry)
        limits = (blocks, transfer.quarantine_fraction, transfer.quarantine_suspect_fraction)
        ranks = [ConsumerRank(info, rank, incarnation, *about) for rank in range(info.shards.ranks)]
        return ConsumerScheduler(info, incarnation, *about, True, *limits), ranks

    def items(self, request: int, salt: int) -> tuple[Item, ...]:
        """The objects of a prompt, from its start on. `salt` is that of the process that asks, if it has one."""
        size = self.shards.block_size
        tokens = self.world.records.input_tokens[request]
        blocks = -(-tokens // size)
        whole = self.world.digest(request)
        start = self.origins.get(salt)
        if start is None:
            start = self.origins[salt] = origin(self.model, 0, self.shards.tp, salt)
        if not self.by_block:
            return (Item(chained(start, (whole,)), blocks),)
        # A name stands for all before it, so the last one of several speaks for them. A last token is always computed.
        names = self.unit_tokens // self.world.prefix_block_tokens
        named = self.world.prefixes.get(request, ())[names - 1 :: names][: (tokens - 1) // self.unit_tokens]
        each = self.unit_tokens // size
        keys = block_keys(start, ((name,) for name in named))
        last = keys[-1] if keys else start
        return (*[Item(key, each) for key in keys], Item(chained(last, (whole,)), blocks - each * len(keys)))

"""All nodes of a store, which of them has a prompt, and under which keys.

A prompt's content is the names of its prefix blocks, as far as it has any, and from there on its own digest: no other
prompt is the same. All of it is on the node of its first object.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdflow.methods.store.keys import Key, home, origin
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.methods.store.objects import most_named, objects_of
from pdflow.protocol.ids import EngineInfo
from pdflow.scenario.schema.scenario import Pool
from pdflow.wiring.endpoints import Consumer
from pdflow.wiring.stores import StoreWiring, get_name, load_name, node_name, put_name
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.store_node import SimStoreNode

INCARNATION = 0x570E_0000
"""The incarnation of the first node; those of engines are below."""


class Stores:
    """All nodes of a store.

    Args:
    pool: the one whose shape and network the nodes share.
    named: whether prompts may say what they begin with.
    incarnations: those of the nodes so named, where a record of another world is followed.
    """

    def __init__(
        self, ports: NodePorts, wiring: StoreWiring, pool: Pool, named: bool, incarnations: Mapping[str, int]
    ) -> None:
        self.ports = ports
        self.prompts = ports.prompts
        self.wiring = wiring
        self.transfer = wiring.transfer
        self.incarnations = incarnations
        self.shards = wiring.shards
        self.by_block = self.transfer.store_granularity == "block" and named
        self.unit_tokens = wiring.unit_tokens(self.prompts.block_tokens)
        self.model = wiring.engines.scenario.model.name
        self.origins: dict[int, Key] = {}
        """The key with which each process's chains begin, by its salt."""
        if self.by_block:
            self.prompts.cached = True
        self.nodes = [self.node(pool, index) for index in range(self.transfer.store_nodes)]

    def node(self, pool: Pool, index: int) -> SimStoreNode:
        transfer, wiring = self.transfer, self.wiring
        name = node_name(index)
        incarnation = self.incarnations.get(name) or INCARNATION + index
        memory = StoreMemory(wiring.blocks, transfer.store_keep, transfer.store_high_water)
        node = SimStoreNode(self.ports, name, memory, self.shards.block_size)
        ends = wiring.put_to(name, incarnation), wiring.got_from(name, incarnation)
        node.make_ends(*ends, self.shards, incarnation)
        for engine in (put_name(name), get_name(name)):
            self.ports.fabric.paths.pool_of[engine] = pool
        return node

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens of one prompt that a node can hold."""
        return self.wiring.most_tokens

    def node_of(self, items: tuple[Item, ...]) -> SimStoreNode:
        return self.nodes[home(items[0].key, len(self.nodes))]

    def loads(self, engine: EngineInfo, blocks: int, incarnation: int) -> Consumer | None:
        """Return the endpoints with which a prefill engine loads; None if it does not."""
        ends = self.wiring.loads(engine, incarnation, blocks) if self.by_block else None
        if ends is not None:
            paths = self.ports.fabric.paths
            paths.pool_of[load_name(engine.engine)] = paths.pool_of[engine.engine]
        return ends

    def items(self, request: int, salt: int) -> tuple[Item, ...]:
        """Return the objects of a prompt, from its start on. `salt` is that of the process that asks, if it has one."""
        tokens = self.ports.metrics.records.input_tokens[request] + self.prompts.given.get(request, 0)
        start = self.origins.get(salt)
        if start is None:
            start = self.origins[salt] = origin(self.model, 0, self.shards.tp, salt)
        named: tuple[int, ...] = ()
        if self.by_block:
            # A name stands for all before it, so the last one of several speaks for them.
            names = self.unit_tokens // self.prompts.block_tokens
            most = most_named(tokens, self.unit_tokens)
            named = self.prompts.prefixes.get(request, ())[names - 1 :: names][:most]
        each = [(name,) for name in named]
        rest = (self.prompts.digest(request),)
        return objects_of(start, tokens, self.shards.block_size, self.unit_tokens, each, rest)

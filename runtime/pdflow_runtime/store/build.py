"""Builds a live node of a store, and the prefill engines that put into it, from a scenario."""

from __future__ import annotations

import secrets
from typing import Final

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.store.memory import StoreMemory
from pdflow.protocol.ids import EngineInfo
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow.wiring.endpoints import Producer
from pdflow.wiring.engines import EngineWiring
from pdflow.wiring.stores import StoreWiring, node_name, put_name, store_pool
from pdflow_runtime.nodes.models import DTYPES
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.nodes.ranks import LayoutBook
from pdflow_runtime.security.secret import secret_of
from pdflow_runtime.store.backing import Backing
from pdflow_runtime.store.calls import StoreClient
from pdflow_runtime.store.keys import StoreKeys
from pdflow_runtime.store.node import LiveStoreNode
from pdflow_runtime.store.prefill_node import LiveStorePrefillNode
from pdflow_runtime.store.server import server_of
from pdflow_runtime.store.values import Cells, ValueFormat, layout_of
from pdflow_runtime.transports.base import MakeTransport

LEASES: Final = 1 << 16
"""The number of a rank's lease words. In a store any number of leases share the same blocks; so many are not open at
once for long."""
LATER_S: Final = 5.0
"""The time by which a node's answer may follow a request's deadline, which the node itself enforces."""
DEFAULT_STORE_BYTES: Final = attrs.fields(Transfer).store_bytes.default


def stores_of(scenario: ResolvedScenario) -> list[str]:
    """Return the names of all nodes of the store, in order; none if the method has none."""
    transfer = scenario.transfer
    return [node_name(number) for number in range(transfer.store_nodes)] if METHODS[transfer.method].stores else []


def wiring_of(engines: EngineWiring) -> StoreWiring:
    """Return the wiring of the store. A node's memory is the scenario's or, where the scenario names none, as much as
    all prefill engines' blocks hold: so that no laptop need give what a host in a rack has."""
    scenario = engines.scenario
    pool = store_pool(scenario)
    assert pool is not None, "a scenario without a decode pool"
    wiring = StoreWiring(engines, pool)
    if scenario.transfer.store_bytes == DEFAULT_STORE_BYTES:
        held = [kv_tokens_of(scenario.model, p) * p.replicas for p in scenario.pools if p.role == "prefill"]
        wiring.blocks = min(wiring.blocks, sum(held) // pool.block_size)
    return wiring


def store_node(engines: EngineWiring, transport: MakeTransport, name: str) -> LiveStoreNode:
    """Build one incarnation of a node, which no engine has connected to yet."""
    scenario = engines.scenario
    wiring, transfer = wiring_of(engines), scenario.transfer
    pool = store_pool(scenario)
    assert pool is not None
    incarnation, shape = secrets.randbits(63), engines.shapes[pool.name]
    config = NodeConfig(
        info=EngineInfo(put_name(name), wiring.shards),
        incarnation=incarnation,
        shape=shape,
        num_blocks=wiring.blocks,
        layouts=LayoutBook(shape, engines.initiator, engines.rule),
        weights=0,
        dtype=DTYPES.get(scenario.model.kv_dtype or "", ""),
        leases=LEASES,
    )
    memory = StoreMemory(wiring.blocks, transfer.store_keep, transfer.store_high_water)
    put, get = wiring.put_to(name, incarnation), wiring.got_from(name, incarnation)
    node = LiveStoreNode(name, config, put, get, memory, transport)
    node.backing = backing_of(scenario, node, wiring.unit_tokens(1))
    return node


def backing_of(scenario: ResolvedScenario, node: LiveStoreNode, unit_tokens: int) -> Backing | None:
    """Return the node's copy in the server that the scenario names, which need not be there now; None if it names none.
    ScenarioError, MissingBackendError."""
    server = server_of(scenario)
    if server is None:
        return None
    ranks = [(rank.view, rank.memory) for rank in node.ends[node.config.info.engine]]
    cells = Cells(ranks)
    layout = layout_of(scenario.model.name, node.config.shape, [memory for _, memory in ranks])
    form = ValueFormat(layout, cells.block_bytes, secret_of(scenario))
    return Backing(server, node.ledger, cells, form, unit_tokens, scenario.serve.store_ttl_s / 2)


def store_prefill_node(
    engines: EngineWiring, transport: MakeTransport, config: NodeConfig, ends: Producer
) -> LiveStorePrefillNode:
    """Build the node of a prefill engine that puts, without its engine."""
    wiring = wiring_of(engines)
    keys = StoreKeys.of(wiring, wiring.blocks, config.weights)
    loads = wiring.loads(config.info, config.incarnation, config.num_blocks) if keys.unit_tokens else None
    scenario = engines.scenario
    client = StoreClient(scenario.serve.engine_host, scenario.transfer.deadline_s + LATER_S)
    return LiveStorePrefillNode(config, ends, loads, transport, keys, client)

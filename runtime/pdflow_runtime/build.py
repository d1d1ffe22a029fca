"""Builds one live engine from a scenario: its endpoints, its memory, what it computes with."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.methods.lanes import lane_rules
from pdflow.methods.method import MemoryKind
from pdflow.methods.staging import Staging
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.scenario.schema.scenario import MeasuredCost, Pool, ResolvedScenario
from pdflow.scenario.schema.transfer import Transfer
from pdflow.serving.sending import ProgressiveSending, Sending
from pdflow.serving.staged_sending import StagedSending
from pdflow.wiring.engines import EngineWiring
from pdflow_runtime.engines.loop import LiveEngine
from pdflow_runtime.gpu.rules import gpu_problems
from pdflow_runtime.nodes.decode_node import LiveDecodeNode
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.layered_prefill_node import LiveLayeredPrefillNode
from pdflow_runtime.nodes.models import ServedModel, shape_of
from pdflow_runtime.nodes.prefill_node import LivePrefillNode
from pdflow_runtime.nodes.rank_memory import KvLocation, StagingFactory
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.nodes.ranks import LayoutBook
from pdflow_runtime.nodes.staged_decode_node import LiveStagedDecodeNode
from pdflow_runtime.nodes.staging_memory import make_staging
from pdflow_runtime.store.build import store_prefill_node, stores_of
from pdflow_runtime.transports.base import MakeTransport

UNMEASURED: Final = (
    "and pool {} has not been measured: serve without this key, run `pdflow calibrate FILE -o measured` against the "
    "running cluster, then set the key in measured/scenario.toml"
)


def refuse_what_is_not_served(scenario: ResolvedScenario) -> None:
    """Raise ScenarioError, in one go, for everything that a scenario may say and no live cluster does yet."""
    problems = []

    def wrong(path: str, message: str) -> None:
        problems.append(Problem(scenario.path, path, message))

    transfer, router = scenario.transfer, scenario.router
    if transfer.dialect != "strict":
        wrong("transfer.dialect", f"is {transfer.dialect}; pdflow serve supports strict only")
    if transfer.store_hidden_states:
        wrong("transfer.store_hidden_states", "is simulated only; a live D computes a prompt's last token")
    if router.disaggregate_above_tokens == "auto":
        for pool in scenario.pools:
            if pool.engine == "torch" and not isinstance(pool.cost, MeasuredCost):
                wrong(
                    "router.disaggregate_above_tokens",
                    f"auto needs measured step times, {UNMEASURED.format(pool.name)}",
                )
                break
    if scenario.faults or scenario.scales:
        wrong("", "[[fault]] and [[scale]] are simulated only; pdflow serve does not support them")
    for index, pool in enumerate(scenario.pools):
        if any(name.rpartition("-")[0] == pool.name for name in stores_of(scenario)):
            wrong(f"pool.{index}.name", f"is {pool.name}, which names of store nodes begin with; rename the pool")
        if pool.scheduling == "v0":
            wrong(f"pool.{index}.scheduling", 'is "v0", which is simulated only; remove it, or set "v1"')
        if not pool.tp_alone:
            key = "dp_attention" if pool.attention_replicas > 1 else "ep"
            wrong(f"pool.{index}.{key}", "is simulated only; expected 1")
        if pool.engine != scenario.pools[0].engine:
            wrong(f"pool.{index}.engine", "must be the same in all pools: torch or synthetic")
    for path, message in gpu_problems(scenario):
        wrong(path, message)
    if problems:
        raise ScenarioError(problems)


def engines_of(pools: Iterable[Pool]) -> list[str]:
    """Return the names of the engines of these pools, in order."""
    return [f"{pool.name}-{number}" for pool in pools for number in range(pool.replicas)]


def location_of(pool: Pool, transfer: Transfer) -> KvLocation:
    """Return where the KV of a pool's engines lies."""
    if pool.device == "cpu":
        return "region"
    if transfer.kv_buffer_device == "cuda":
        return "gpu"
    return "unshared" if pool.role == "aggregated" else "mirrored"


class LiveBuilder(EngineWiring):
    """Builds the live nodes of a scenario. Args: `transport` makes one rank's transport, and declares what endpoints
    are configured by."""

    def __init__(self, scenario: ResolvedScenario, transport: MakeTransport) -> None:
        shapes = {pool.name: shape_of(scenario, pool) for pool in scenario.pools}
        super().__init__(scenario, shapes, transport.done_means == "remote")
        self.transport = transport

    def pool_of(self, engine: str) -> Pool:
        """Return the pool of NAME-0, NAME-1, ... KeyError for a name that is neither an engine of this scenario nor one
        that may be added to it."""
        spares = self.scenario.serve.spare_engines
        for pool in self.scenario.pools:
            name, dash, number = engine.rpartition("-")
            if name == pool.name and dash and number.isdecimal() and int(number) < pool.replicas + spares:
                return pool
        raise KeyError(engine)

    def info_of(self, engine: str) -> EngineInfo:
        pool = self.pool_of(engine)
        return EngineInfo(engine, Shards(pool.tp, pool.pp, pool.block_size))

    def prefill_node(self, engine: str, model: ServedModel) -> LivePrefillNode:
        """Return a new incarnation of a prefill engine, which no peer knows yet."""
        pool = self.pool_of(engine)
        staging, staging_factory = self._staging_of(self.method.p_memory, pool)
        node = self.empty_prefill_node(self._node_config(engine, model, staging_factory), staging)
        self._add_engine(node, pool, model)
        node.engine.reports_chunks = self.pipeline_policy.early
        return node

    def decode_node(self, engine: str, model: ServedModel) -> LiveDecodeNode:
        """Return a new incarnation of a decode engine, which no peer knows yet. An aggregated engine is a decode engine
        that receives no KV."""
        pool = self.pool_of(engine)
        staging, staging_factory = self._staging_of(
            self.method.d_memory if pool.role == "decode" else MemoryKind.BLOCKS, pool
        )
        node = self.empty_decode_node(self._node_config(engine, model, staging_factory), staging)
        self._add_engine(node, pool, model)
        return node

    def _staging_of(self, memory: MemoryKind, pool: Pool) -> tuple[Staging | None, StagingFactory | None]:
        return (None, None) if memory is MemoryKind.BLOCKS else make_staging(self, memory, pool)

    def _node_config(self, engine: str, model: ServedModel, staging_factory: StagingFactory | None) -> NodeConfig:
        pool = self.pool_of(engine)
        shape = self.shapes[pool.name]
        return NodeConfig(
            info=self.info_of(engine),
            incarnation=secrets.randbits(63),
            shape=shape,
            num_blocks=self.blocks_of(pool),
            layouts=LayoutBook(shape, self.initiator, self.rule),
            weights=model.weights,
            dtype=model.dtype,
            staging_factory=staging_factory,
            location=location_of(pool, self.scenario.transfer),
        )

    def empty_prefill_node(self, config: NodeConfig, staging: Staging | None) -> LivePrefillNode:
        """Return a prefill node without its engine."""
        ends, transport = self.producer(config.info, config.incarnation), self.transport
        if self.method.stores:
            return store_prefill_node(self, transport, config, ends)
        scheduler, ranks = ends
        if staging is None and not self.pipeline_policy.early:
            return LivePrefillNode(config, scheduler, ranks, transport)
        return LiveLayeredPrefillNode(config, scheduler, ranks, transport, self.sending(config, staging), staging)

    def empty_decode_node(self, config: NodeConfig, staging: Staging | None) -> LiveDecodeNode:
        """Return a decode node without its engine."""
        scheduler, ranks = self.consumer(config.info, config.incarnation, config.num_blocks)
        if staging is None:
            return LiveDecodeNode(config, scheduler, ranks, self.transport)
        by_layer = self.pipeline_policy.loads_by_layer
        return LiveStagedDecodeNode(config, scheduler, ranks, self.transport, staging, by_layer)

    def _add_engine(self, node: LiveEngineNode, pool: Pool, model: ServedModel) -> None:
        blocks = node.config.num_blocks
        limits = attrs.evolve(self.limits_of(pool), async_scheduling=False)
        blocks_pool = CachingPool(blocks, 1) if pool.enable_prefix_caching else PagedPool(blocks)
        for rank in node.ranks.values():
            rank.transfers.adopt(lane_rules(self.method, self.pipeline_policy))
        node.engine = LiveEngine(model.runner(node), limits, blocks_pool, node.on_engine_output, model.eos)
        node.engine.stepped = node.event_log.stepped
        node.engine.settle = node.settle

    def sending(self, config: NodeConfig, staging: Staging | None) -> Sending:
        """Return how prompts are sent layer by layer, from an engine's blocks or from staging memory."""
        layers, shards = config.shape.num_layers, config.info.shards
        if staging is None:
            return ProgressiveSending(layers)
        return StagedSending(self.method, self.pipeline_policy, staging, layers, shards.tp, shards.ranks)

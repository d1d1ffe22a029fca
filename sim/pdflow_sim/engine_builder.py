"""Builds one incarnation of an engine from its slot: its batch scheduler, its endpoints, and the node that its method
needs.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pdflow.cost.capacity import extra_blocks
from pdflow.engine.engine import Engine
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.sequence import Limits
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.methods.method import MemoryKind
from pdflow.methods.posting import ReadThread
from pdflow.methods.staging import Staging, staging_of
from pdflow.protocol.ids import EngineInfo, rank_address
from pdflow.protocol.values import EngineId
from pdflow.results.steps import Steps
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import moved_shape_of
from pdflow.serving.decode import DecodeCore
from pdflow.serving.landing import Landing, StagedLanding
from pdflow.serving.pieces import ListeningLanding, PieceLanding, QueueingLanding
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import ProgressiveSending, Sending
from pdflow.serving.staged_sending import StagedSending
from pdflow.wiring.engines import EngineWiring
from pdflow_sim.engine_slot import EngineSlot, EngineSlots
from pdflow_sim.nodes.aggregated_node import AggregatedNode
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.layered_prefill_node import SimLayeredPrefillNode
from pdflow_sim.nodes.piecewise_decode_node import PiecewiseDecodeNode
from pdflow_sim.nodes.ports import EngineComponents, NodePorts
from pdflow_sim.nodes.prefill_node import WEIGHTS, SimPrefillNode
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.staged_decode_node import SimStagedDecodeNode
from pdflow_sim.nodes.store_prefill_node import SimStorePrefillNode
from pdflow_sim.nodes.stores import Stores
from pdflow_sim.noise import NoiseTables
from pdflow_sim.observe.recording import RecordedEngine, Recorder
from pdflow_sim.observe.run_metrics import RunMetrics


class EngineBuilder(EngineWiring):
    """Builds the engines of a world. Args: `exact`: engines go step by step; `incarnations`: the first ones of the
    engines that they name, so that the record of another world can be followed.
    """

    def __init__(
        self, scenario: ResolvedScenario, exact: bool, recorder: Recorder | None, incarnations: Mapping[EngineId, int]
    ) -> None:
        super().__init__(scenario, {pool.name: moved_shape_of(scenario.model, pool) for pool in scenario.pools})
        self.exact = exact
        self.incarnations = incarnations
        self.metrics = RunMetrics()
        self.noise = NoiseTables(scenario.noise, scenario.seed)
        self.recorder = recorder
        self.slots = EngineSlots()
        self.nodes = NodeRegistry(self.slots)
        self.ports: NodePorts
        """The ports that the nodes are given; set before the first engine is made."""
        self.stores: Stores
        """The store, where the method has one."""
        policy = self.pipeline_policy
        waits = self.method.staged_at_p or policy.prefill_waits or policy.decode_waits or policy.loads_by_layer
        self.reads_on: ReadThread = scenario.transfer.read_thread() or "background"
        waits = waits or self.reads_on != "background"
        self.engine_class = HostedEngine if scenario.faults or waits else Engine

    def limits_of(self, pool: Pool) -> Limits:
        """Return the limits of an engine of this pool, which keeps of windows what vLLM does."""
        return attrs.evolve(super().limits_of(pool), extra=extra_blocks(self.scenario.model, pool.block_size, pool.tp))

    def first_incarnation(self, slot: EngineSlot) -> int:
        """Return the incarnation that an engine begins with; a simulated one needs no randomness."""
        return self.incarnations.get(slot.name) or 0x5EED_0000 + slot.index

    def make(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int) -> SimEngineNode:
        """Make one incarnation of the engine of a slot, and register its node there. `generation` is the last one of
        the incarnation before.
        """
        nodes = self.nodes
        if slot.pool.role == "decode":
            decode = self.decode(slot, info, incarnation, generation)
            nodes.decodes[slot.position : slot.position + 1] = [decode]
            return decode
        prefill: SimPrefillNode | AggregatedNode
        if slot.pool.role == "prefill":
            prefill = self.prefill(slot, info, incarnation, generation)
        else:
            prefill = self.aggregated(slot, info, generation)
        nodes.prefills[slot.position : slot.position + 1] = [prefill]
        return prefill

    def logs(self, engine: EngineId) -> tuple[Steps, Steps]:
        """Return the step logs of an engine that decodes: its steps and, apart from them, as they are counted, the
        waits of preempted sequences.

        A prefill engine has none: no client waits for a token of its steps.
        """
        steps = self.metrics.steps.setdefault(engine, Steps())
        preempted = self.metrics.steps.setdefault(f"{engine} preempted", Steps())
        return steps, preempted

    def engine(self, slot: EngineSlot, info: EngineInfo, generation: int, *logs: Steps) -> Engine:
        """Return the engine of one incarnation: batch scheduler and KV blocks."""
        pool, recorder = pool_after(slot, generation), self.recorder
        stepping = (slot.limits, slot.cost, pool, self.exact)
        log, stalls = logs if logs else (None, None)
        noise = self.noise.of_steps(slot.pool, slot.index, generation, slot.cost)
        if recorder is not None:
            return RecordedEngine(recorder.kv_blocks[info.engine], *stepping, log, stalls, noise)
        return self.engine_class(*stepping, log, stalls, noise)

    def components(self, slot: EngineSlot, info: EngineInfo, engine: Engine) -> EngineComponents:
        """Return the components of one incarnation's node, whatever its role."""
        return EngineComponents(
            ports=self.ports,
            index=slot.index,
            name=info.engine,
            engine=engine,
            block_bytes=slot.block_bytes,
            reads_on=self.reads_on,
        )

    def prefill(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int = 0) -> SimPrefillNode:
        """Make the node of one incarnation of a prefill engine. `generation`: the last of the incarnation before."""
        engine = self.engine(slot, info, generation)
        node = self.prefill_node(slot, info, engine, generation)
        scheduler, ranks = self.producer(info, incarnation)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        node.make_loads(incarnation)
        return node

    def prefill_node(self, slot: EngineSlot, info: EngineInfo, engine: Engine, generation: int) -> SimPrefillNode:
        components = self.components(slot, info, engine)
        if self.method.stores:
            return SimStorePrefillNode(components, self.stores, self.pipeline_policy)
        if not self.method.staged_at_p and not self.method.in_pieces:
            return SimPrefillNode(components, PrefillCore(WEIGHTS, Sending()))
        layers, ranks = self.most_layers(slot.pool), info.shards.ranks
        if not self.method.staged_at_p:
            core = PrefillCore(WEIGHTS, ProgressiveSending(layers))
            return SimLayeredPrefillNode(components, core, self.method, layers, True, None)
        staging = self.staging(self.method.p_memory, slot.pool, generation)
        sending = StagedSending(self.method, self.pipeline_policy, staging, layers, ranks, ranks)
        core = PrefillCore(WEIGHTS, sending)
        return SimLayeredPrefillNode(components, core, self.method, layers, self.pipeline_policy.early, staging)

    def decode_node(self, slot: EngineSlot, info: EngineInfo, engine: Engine, generation: int) -> SimDecodeNode:
        components = self.components(slot, info, engine)
        waits, together = self.pipeline_policy.decode_waits, self.pipeline_policy.fails_whole_batches
        if not self.method.staged_at_d:
            return SimDecodeNode(components, DecodeCore(WEIGHTS, Landing(), waits, together))
        by_layer = self.pipeline_policy.loads_by_layer
        by_pieces = self.method.takes_in_pieces(self.pipeline_policy)
        staging = self.staging(self.method.d_memory, slot.pool, generation, not by_pieces)
        if not by_pieces:
            return SimStagedDecodeNode(
                components, DecodeCore(WEIGHTS, StagedLanding(staging, by_layer), waits), self.method, staging
            )
        landing: PieceLanding
        if self.pipeline_policy.receiving_lanes is not None:
            landing = ListeningLanding(staging, by_layer)
        else:
            landing = QueueingLanding(staging, self.most_layers(slot.pool), by_layer)
        return PiecewiseDecodeNode(components, DecodeCore(WEIGHTS, landing, waits), self.method, landing)

    def staging(self, memory: MemoryKind, pool: Pool, generation: int, reserves_whole: bool = True) -> Staging:
        """Return the staging memory of one rank of an engine of this pool: of the rank with the most layers."""
        size, transfer = self.staged_size(pool), self.scenario.transfer
        sizes = (transfer.host_buffer_bytes, transfer.kv_buffer_size, transfer.mem_pool_size_gb << 30)
        staging = staging_of(memory, size, *sizes, reserves_whole)
        staging.generation = generation
        return staging

    def aggregated(self, slot: EngineSlot, info: EngineInfo, generation: int = 0) -> AggregatedNode:
        """Make the node of one incarnation of an aggregated engine. `generation`: the last one before it."""
        engine = self.engine(slot, info, generation, *self.logs(info.engine))
        return AggregatedNode(self.components(slot, info, engine), info)

    def decode(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int = 0) -> SimDecodeNode:
        """Make the node of one incarnation of a decode engine. `generation`: the last of the incarnation before."""
        engine = self.engine(slot, info, generation, *self.logs(info.engine))
        node = self.decode_node(slot, info, engine, generation)
        scheduler, ranks = self.consumer(info, incarnation, slot.blocks)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        return node


def pool_after(slot: EngineSlot, generation: int) -> PagedPool:
    """Return a fresh pool whose generations go on where those of the former incarnation ended, so that no grant of that
    incarnation can be taken for one of this.
    """
    pool = CachingPool(slot.blocks, slot.span) if slot.span else PagedPool(slot.blocks)
    while pool.newest_generation < generation:
        unused = pool.allocate(0)
        assert unused is not None
        pool.release(unused)
    return pool

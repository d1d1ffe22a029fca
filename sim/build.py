"""From a scenario to a world: engines, endpoints, links, router."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from pdflow.cost.step import StepCost
from pdflow.engine.engine import Engine
from pdflow.engine.hosted import HostedEngine
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.methods.guards import spoil
from pdflow.methods.kv_store_geometry import HiddenStates
from pdflow.methods.method import Memory
from pdflow.methods.staging import Staging, staging_of
from pdflow.network.network import Network
from pdflow.protocol.ids import EngineInfo, Shards, rank_address
from pdflow.protocol.invariants import Oracle
from pdflow.protocol.values import MS, EngineId
from pdflow.results.steps import Steps
from pdflow.routing.hedging import HedgingRouter
from pdflow.scenario.costs import api_server_ns, step_cost
from pdflow.scenario.fields import seconds_to_ns
from pdflow.scenario.fit import HIDDEN_BYTES_PER_VALUE, kv_shape_of, stored_hidden_bytes
from pdflow.scenario.plan import plan_of
from pdflow.scenario.scale_schema import most_engines
from pdflow.scenario.schema import Pool, Scenario
from pdflow.serving.decode import DecodeCore
from pdflow.serving.landing import Landing, StagedLanding
from pdflow.serving.pieces import ListeningLanding, PieceLanding, QueueingLanding
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import ProgressiveSending, Sending
from pdflow.serving.staged_sending import StagedSending
from pdflow.wiring.engines import EngineWiring
from pdflow.wiring.router import Cluster, heartbeat_ns, router_of
from pdflow.wiring.stores import StoreWiring, beside
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, SESSION_BLOCK_TOKENS
from pdflow.workload.rng import Rng
from pdflow.workload.sessions import sessions
from sim.aggregated_node import AggregatedNode
from sim.clients import Clients
from sim.clock import Clock
from sim.decode_node import DecodeNode
from sim.engine_node import EngineNode
from sim.engine_slot import EngineSlot, EngineSlots
from sim.fabric import Fabric
from sim.faults import Faults
from sim.grouped_shipping import GroupedShipping
from sim.heartbeats import Heartbeats
from sim.hedged_router_node import HedgedRouterNode
from sim.hindrances import Hindrances
from sim.layered_prefill_node import LayeredPrefillNode
from sim.lives import Lives
from sim.node_ports import EngineParts, NodePorts
from sim.node_registry import NodeRegistry
from sim.paths import Paths
from sim.patience import Patience
from sim.piecewise_decode_node import PiecewiseDecodeNode
from sim.prefill_node import WEIGHTS, PrefillNode
from sim.prompt_content import PromptContent
from sim.recording import RecordedEngine, Recorder
from sim.router_link import RouterLink
from sim.router_node import RouterNode
from sim.routing import cluster_of
from sim.run_metrics import RunMetrics
from sim.scaling import Scaling
from sim.sessions import Sessions
from sim.shipping import Shipping
from sim.staged_decode_node import StagedDecodeNode
from sim.store_prefill_node import StorePrefillNode
from sim.stores import Stores
from sim.witness import Witness
from sim.world import World


def incarnation_of(index: int, life: int = 0) -> int:
    """Each engine's life has a number of its own; a simulated one needs no randomness."""
    return 0x5EED_0000 + index + (life << 32)


class Builder(EngineWiring):
    """Puts one world together. `costs` are step times instead of those of the pools so named; `incarnations` are those
    of the engines so named, where a record of another world is followed."""

    def __init__(
        self,
        scenario: Scenario,
        exact: bool = False,
        recorder: Recorder | None = None,
        costs: Mapping[str, StepCost] | None = None,
        incarnations: Mapping[EngineId, int] | None = None,
    ) -> None:
        super().__init__(scenario, {pool.name: kv_shape_of(scenario.model, pool) for pool in scenario.pools})
        self.exact = exact
        self.costs = costs or {}
        self.incarnations = incarnations or {}
        self.env = Clock()
        self.metrics = RunMetrics()
        self.recorder = recorder
        self.step_costs: dict[str, StepCost] = {}
        """What a step takes, by pool."""
        self.hidden_bytes = scenario.model.hidden_size * HIDDEN_BYTES_PER_VALUE
        self.stored_hidden_bytes = stored_hidden_bytes(scenario.transfer, scenario.model)
        if self.stored_hidden_bytes:
            self.geometry = HiddenStates(self.geometry, self.stored_hidden_bytes)
        workload = scenario.workload
        self.named = any(source is not None for source in (workload.trace, workload.like, workload.sessions))
        """Whether prompts may say what they begin with: those that are drawn share nothing."""
        self.prompts = PromptContent(PREFIX_BLOCK_TOKENS if workload.sessions is None else SESSION_BLOCK_TOKENS)
        self.slots = EngineSlots()
        self.nodes = NodeRegistry(self.slots)
        self.ports: NodePorts
        waits = self.method.staged_at_p or self.conduct.prefill_waits or self.conduct.decode_waits
        self.engine_class = HostedEngine if scenario.faults or waits else Engine
        self.cuts: dict[Shards, Shards] = {}

    def build(self) -> World:
        """A world in which nothing has happened yet."""
        scenario = self.scenario
        fabric = self.fabric()
        shipping = self.shipping(fabric)
        self.ports = self.node_ports(fabric, shipping)
        if spoil(self.conduct.guards):
            self.metrics.records.wrong_kv = set()
        if self.method.stores:
            self.add_stores()
        for pool in scenario.pools:
            self.add_pool(pool)
        router = self.router()
        clients = Clients(self.ports, router)
        scaling = Scaling(clients, self.nodes, scenario) if scenario.scales else None
        every_ns = heartbeat_ns(scenario)
        heartbeats = None if every_ns is None else Heartbeats(clients, self.nodes, scaling, every_ns)
        world = World(
            env=self.env,
            metrics=self.metrics,
            fabric=fabric,
            shipping=shipping,
            nodes=self.nodes,
            router=router,
            clients=clients,
            costs=self.step_costs,
            recorder=self.recorder,
            scaling=scaling,
            heartbeats=heartbeats,
        )
        if scenario.faults:
            self.add_faults(world)
        self.add_clients(world)
        return world

    def fabric(self) -> Fabric:
        """The network between the engines."""
        scenario, table = self.scenario, self.scenario.network
        network = Network() if self.recorder is None else self.recorder.network()
        pool_of = {f"{pool.name}-{i}": pool for pool in scenario.pools for i in range(self.engines(pool))}
        paths = Paths(network, table, pool_of, self.shapes, self.initiator, self.rule)
        latencies = (seconds_to_ns(table.control_latency_s), seconds_to_ns(table.handshake_s))
        fabric = Fabric(self.env, self.metrics, paths, *latencies, self.conduct.speech, self.pulls)
        fabric.checks_words = self.conduct.guards.invalidates_lost
        return fabric

    def shipping(self, fabric: Fabric) -> Shipping | None:
        """What carries operations in pieces, where the method sends any."""
        if not self.method.is_carried(self.conduct):
            return None
        hidden_bytes, says = 0 if self.method.stores else self.hidden_bytes, self.scenario.transfer
        most = says.nccl_max_groups if self.method.groups else None
        if most is None:
            return Shipping(fabric, self.method, self.conduct, hidden_bytes, says.pickle_bytes_per_s)
        return GroupedShipping(fabric, self.method, self.conduct, hidden_bytes, says.pickle_bytes_per_s, most)

    def node_ports(self, fabric: Fabric, shipping: Shipping | None) -> NodePorts:
        """What all nodes share."""
        says, table = self.scenario, self.scenario.network
        poll_ns = MS if self.dialect.polls_at_steps and table.poll else 0
        writes = poll_ns > 0 and not self.pulls
        return NodePorts(
            env=self.env,
            metrics=self.metrics,
            fabric=fabric,
            shipping=shipping,
            router=RouterLink(self.env, seconds_to_ns(table.http_latency_s)),
            prompts=self.prompts,
            poll_ns=poll_ns,
            writer_ns=seconds_to_ns(says.transfer.writer_poll_s) if writes else 0,
            prefill_tokens=1 if says.router.first_token == "prefill" else 0,
        )

    def add_stores(self) -> None:
        pool = beside(self.scenario)
        if pool is not None:
            wiring = StoreWiring(self, pool, self.stored_hidden_bytes)
            wiring.shards = self.alike(wiring.shards)
            self.stores = Stores(self.ports, wiring, pool, self.named, self.incarnations)
            self.nodes.stores = self.stores.nodes

    def add_faults(self, world: World) -> None:
        """What goes wrong, by the scenario's plan."""
        scenario, heartbeats = self.scenario, world.heartbeats
        plan, streams = plan_of(scenario), Rng(scenario.seed).stream
        timeout_ns = seconds_to_ns(scenario.transfer.handshake_timeout_s)
        witness = Witness(self.env, self.nodes)
        hindrances = Hindrances(world.fabric, self.nodes, witness, plan, streams, timeout_ns)
        if heartbeats is not None:
            heartbeats.is_lost = hindrances.loses_report
        lives = Lives(self.ports, self.nodes, world.router, heartbeats, self.recorder, hindrances, self.make)
        world.faults = Faults(plan, streams, world.clients, self.nodes, hindrances, lives)

    def add_clients(self, world: World) -> None:
        """Whoever sends requests, where that is more than a row of them."""
        workload, clients = self.scenario.workload, world.clients
        if workload.sessions is not None:
            assert workload.requests is not None
            world.sessions = Sessions(clients, sessions(workload, self.scenario.seed), workload.requests)
            clients.on_end.append(world.sessions.ended)
        client = workload.client
        if client is not None:
            timeouts = (client.timeout_s, client.first_token_timeout_s)
            world.patience = Patience(clients, *(None if s is None else seconds_to_ns(s) for s in timeouts))
            clients.on_arrival.append(world.patience.arrived)

    def oracle(self) -> Oracle:
        """Who watches over this world's every event."""
        return Oracle(self.geometry)

    def engines(self, pool: Pool) -> int:
        """How many engines of the pool there ever are."""
        return most_engines(pool.name, pool.replicas, self.scenario.scales)

    def add_pool(self, pool: Pool) -> None:
        """All engines of a pool; what they share is worked out once."""
        model = self.scenario.model
        limits = self.limits_of(pool)
        cost = self.costs.get(pool.name) or step_cost(model, pool, self.scenario.base_dir)
        self.step_costs[pool.name] = cost
        blocks = self.blocks_of(pool)
        block_bytes = self.shapes[pool.name].engine_bytes_per_token(pool.tp) * pool.block_size
        span = self.span(pool)
        if span:
            self.prompts.cached = True
        shards = self.alike(Shards(pool.tp, pool.pp, pool.block_size))
        for replica in range(self.engines(pool)):
            info = EngineInfo(f"{pool.name}-{replica}", shards)
            slot = EngineSlot(
                index=len(self.slots.by_name),
                pool=pool,
                position=len(self.nodes.decodes if pool.leg == "decode" else self.nodes.prefills),
                info=info,
                limits=limits,
                cost=cost,
                blocks=blocks,
                block_bytes=block_bytes,
                span=span,
            )
            self.slots.add(slot)
            self.make(slot, info, self.first_life(slot), 0)

    def make(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int) -> EngineNode:
        """One incarnation of the engine of a slot, which stands there from then on. `generation` is the last of the
        one before."""
        nodes = self.nodes
        if slot.pool.role == "decode":
            decode = self.decode(slot, info, incarnation, generation)
            nodes.decodes[slot.position : slot.position + 1] = [decode]
            return decode
        prefill: PrefillNode | AggregatedNode
        if slot.pool.role == "prefill":
            prefill = self.prefill(slot, info, incarnation, generation)
        else:
            prefill = self.aggregated(slot, info, generation)
        nodes.prefills[slot.position : slot.position + 1] = [prefill]
        return prefill

    def router(self) -> RouterNode:
        """The router's node, for the engines that have been built."""
        router = router_of(self.cluster())
        doors = {leg: [api_server_ns(slot.pool) for slot in self.slots.of_leg(leg)] for leg in ("prefill", "decode")}
        if isinstance(router, HedgingRouter):
            return HedgedRouterNode(self.ports, self.nodes, router, doors)
        return RouterNode(self.ports, self.nodes, router, doors)

    def cluster(self) -> Cluster:
        """What the router knows of the engines that have been built."""
        return cluster_of(self, self.slots, self.step_costs, self.prompts.block_tokens)

    def alike(self, shards: Shards) -> Shards:
        """One value for all that are cut alike: layouts know by identity whom they were last asked about."""
        return self.cuts.setdefault(shards, shards)

    def first_life(self, slot: EngineSlot) -> int:
        """The incarnation that an engine begins with."""
        return self.incarnations.get(slot.name) or incarnation_of(slot.index)

    def span(self, pool: Pool) -> int:
        """How many KV blocks an engine of the pool remembers together: what the workload has one name for."""
        if not pool.enable_prefix_caching or not self.named:
            return 0
        # What D has already ends on a border of P's blocks, too.
        return lcm(self.prompts.block_tokens, *(other.block_size for other in self.scenario.pools)) // pool.block_size

    def logs(self, engine: EngineId) -> tuple[Steps, Steps]:
        """Of an engine that decodes: its steps, and apart from them, as they are counted, the waits of the preempted.

        A prefill engine has none: nobody waits for a token of its steps.
        """
        steps = self.metrics.steps.setdefault(engine, Steps())
        preempted = self.metrics.steps.setdefault(f"{engine} preempted", Steps())
        return steps, preempted

    def engine(self, slot: EngineSlot, info: EngineInfo, generation: int, *logs: Steps) -> Engine:
        """What computes in one life of an engine."""
        pool, recorder = pool_after(slot, generation), self.recorder
        if recorder is not None:
            return RecordedEngine(recorder.kv_blocks[info.engine], slot.limits, slot.cost, pool, self.exact, *logs)
        return self.engine_class(slot.limits, slot.cost, pool, self.exact, *logs)

    def parts(self, slot: EngineSlot, info: EngineInfo, engine: Engine) -> EngineParts:
        """What one life's node is made of, whatever its role."""
        return EngineParts(
            ports=self.ports, index=slot.index, name=info.engine, engine=engine, block_bytes=slot.block_bytes
        )

    def prefill(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int = 0) -> PrefillNode:
        """One life of a prefill engine. `generation` is the last of its former life's."""
        engine = self.engine(slot, info, generation)
        node = self.prefill_node(slot, info, engine, generation)
        scheduler, ranks = self.producer(info, incarnation)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        node.make_loads(incarnation)
        return node

    def prefill_node(self, slot: EngineSlot, info: EngineInfo, engine: Engine, generation: int) -> PrefillNode:
        parts = self.parts(slot, info, engine)
        if self.method.stores:
            return StorePrefillNode(parts, self.stores, self.conduct)
        if not self.method.staged_at_p and not self.method.in_pieces:
            return PrefillNode(parts, PrefillCore(WEIGHTS, Sending()))
        layers, ranks = self.most_layers(slot.pool), info.shards.ranks
        if not self.method.staged_at_p:
            core = PrefillCore(WEIGHTS, ProgressiveSending(layers))
            return LayeredPrefillNode(parts, core, self.method, layers, True, None)
        staging = self.staging(self.method.p_memory, slot.pool, generation)
        sending = StagedSending(self.method, self.conduct, staging, layers, ranks, ranks)
        core = PrefillCore(WEIGHTS, sending)
        return LayeredPrefillNode(parts, core, self.method, layers, self.conduct.early, staging)

    def decode_node(self, slot: EngineSlot, info: EngineInfo, engine: Engine, generation: int) -> DecodeNode:
        parts = self.parts(slot, info, engine)
        waits, together = self.conduct.decode_waits, self.conduct.fails_whole_batches
        if not self.method.staged_at_d:
            return DecodeNode(parts, DecodeCore(WEIGHTS, Landing(), waits, together))
        by_pieces = self.method.takes_in_pieces(self.conduct)
        staging = self.staging(self.method.d_memory, slot.pool, generation, not by_pieces)
        if not by_pieces:
            return StagedDecodeNode(parts, DecodeCore(WEIGHTS, StagedLanding(staging), waits), self.method, staging)
        landing: PieceLanding
        if self.conduct.receiving_lanes is not None:
            landing = ListeningLanding(staging)
        else:
            landing = QueueingLanding(staging, self.most_layers(slot.pool))
        return PiecewiseDecodeNode(parts, DecodeCore(WEIGHTS, landing, waits), self.method, landing)

    def staging(self, memory: Memory, pool: Pool, generation: int, reserves_whole: bool = True) -> Staging:
        """Memory beside the blocks of an engine of this pool; of its ranks that with the most layers."""
        size, transfer = self.staged_size(pool), self.scenario.transfer
        sizes = (transfer.host_buffer_bytes, transfer.kv_buffer_size, transfer.mem_pool_size_gb << 30)
        staging = staging_of(memory, size, *sizes, reserves_whole)
        staging.generation = generation
        return staging

    def aggregated(self, slot: EngineSlot, info: EngineInfo, generation: int = 0) -> AggregatedNode:
        """One life of an engine that serves requests alone. `generation` is the last of its former life's."""
        engine = self.engine(slot, info, generation, *self.logs(info.engine))
        return AggregatedNode(self.parts(slot, info, engine), info)

    def decode(self, slot: EngineSlot, info: EngineInfo, incarnation: int, generation: int = 0) -> DecodeNode:
        """One life of a decode engine. `generation` is the last of its former life's."""
        engine = self.engine(slot, info, generation, *self.logs(info.engine))
        node = self.decode_node(slot, info, engine, generation)
        scheduler, ranks = self.consumer(info, incarnation, slot.blocks)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        return node


def pool_after(slot: EngineSlot, generation: int) -> PagedPool:
    """A fresh pool whose generations go on where a former life's ended, so that no grant of that life can be taken for
    one of this."""
    pool = CachingPool(slot.blocks, slot.span) if slot.span else PagedPool(slot.blocks)
    while pool.newest_generation < generation:
        unused = pool.allocate(0)
        assert unused is not None
        pool.release(unused)
    return pool


def build(scenario: Scenario, *, exact: bool = False) -> World:
    """A world in which nothing has happened yet."""
    return Builder(scenario, exact).build()

"""From a scenario to a world: engines, endpoints, links, router."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

import attrs

from pdflow.cost.step import StepCost
from pdflow.engine.engine import Engine
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.sequence import Limits
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
from pdflow.wiring.router import heartbeat_ns
from pdflow.wiring.stores import beside
from pdflow.workload.request import SESSION_BLOCK_TOKENS
from pdflow.workload.rng import Rng
from pdflow.workload.sessions import sessions
from sim.aggregated_node import AggregatedNode
from sim.decode_node import DecodeNode
from sim.fabric import Fabric
from sim.faults import Faults
from sim.grouped_shipping import GroupedShipping
from sim.heartbeats import Heartbeats
from sim.layered_prefill_node import LayeredPrefillNode
from sim.paths import Paths
from sim.patience import Patience
from sim.piecewise_decode_node import PiecewiseDecodeNode
from sim.prefill_node import WEIGHTS, PrefillNode
from sim.recording import RecordedEngine, Recorder
from sim.routing import router_node
from sim.scaling import Scaling
from sim.sessions import Sessions
from sim.shipping import Shipping
from sim.staged_decode_node import StagedDecodeNode
from sim.store_prefill_node import StorePrefillNode
from sim.stores import Stores
from sim.world import World


def incarnation_of(index: int, life: int = 0) -> int:
    """Each engine's life has a number of its own; a simulated one needs no randomness."""
    return 0x5EED_0000 + index + (life << 32)


@attrs.frozen
class Place:
    """Where an engine stands, whatever its life: all that a new life is made from."""

    index: int
    pool: Pool
    position: int
    """Among the engines that get legs as it does."""
    name: EngineId
    """The id of its first life: what the scenario calls it."""
    limits: Limits
    cost: StepCost
    blocks: int
    block_bytes: int
    span: int
    """KV blocks in one of the prefix blocks that its engines remember; 0 if they remember none."""


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
        self.world = World()
        self.world.recorder = recorder
        self.hidden_bytes = scenario.model.hidden_size * HIDDEN_BYTES_PER_VALUE
        self.stored_hidden_bytes = stored_hidden_bytes(scenario.transfer, scenario.model)
        if self.stored_hidden_bytes:
            self.geometry = HiddenStates(self.geometry, self.stored_hidden_bytes)
        workload = scenario.workload
        self.named = any(source is not None for source in (workload.trace, workload.like, workload.sessions))
        """Whether prompts may say what they begin with: those that are drawn share nothing."""
        if workload.sessions is not None:
            self.world.prefix_block_tokens = SESSION_BLOCK_TOKENS
        self.places: dict[EngineId, Place] = {}
        waits = self.method.staged_at_p or self.conduct.prefill_waits or self.conduct.decode_waits
        self.engine_class = HostedEngine if scenario.faults or waits else Engine
        self.cuts: dict[Shards, Shards] = {}
        self.infos: dict[str, list[EngineInfo]] = {"prefill": [], "decode": []}
        self.doors: dict[str, list[int]] = {"prefill": [], "decode": []}
        """What each engine's API server takes."""

    def build(self) -> World:
        scenario, world = self.scenario, self.world
        table = scenario.network
        world.pulls = self.pulls
        world.poll_ns = MS if self.dialect.polls_at_steps and table.poll else 0
        if world.poll_ns and not self.pulls:
            world.writer_ns = seconds_to_ns(scenario.transfer.writer_poll_s)
        world.prefill_tokens = 1 if scenario.router.first_token == "prefill" else 0
        network = Network() if world.recorder is None else world.recorder.network()
        pool_of = {f"{pool.name}-{i}": pool for pool in scenario.pools for i in range(self.engines(pool))}
        paths = Paths(network, table, pool_of, self.shapes, self.initiator, self.rule)
        latencies = (seconds_to_ns(table.control_latency_s), seconds_to_ns(table.handshake_s))
        world.fabric = Fabric(world, network, paths, *latencies, self.conduct.speech)
        if self.method.is_carried(self.conduct):
            hidden_bytes = 0 if self.method.stores else self.hidden_bytes
            pickled = scenario.transfer.pickle_bytes_per_s
            about = (world, self.method, self.conduct, hidden_bytes, pickled)
            most = scenario.transfer.nccl_max_groups if self.method.groups else None
            world.shipping = Shipping(*about) if most is None else GroupedShipping(*about, most)
        world.fabric.checks_words = self.conduct.guards.invalidates_lost
        if spoil(self.conduct.guards):
            world.records.wrong_kv = set()
        if self.method.stores:
            self.add_stores()
        for pool in scenario.pools:
            self.add_pool(pool)
        world.router = router_node(self)
        if scenario.scales:
            world.scaling = Scaling(self)
        every_ns = heartbeat_ns(scenario)
        if every_ns is not None:
            world.heartbeats = Heartbeats(self, every_ns)
        self.add_clients()
        if scenario.faults:
            world.faults = Faults(self, plan_of(scenario), Rng(scenario.seed).stream)
        return world

    def add_stores(self) -> None:
        pool = beside(self.scenario)
        if pool is not None:
            self.stores = Stores(self, pool)
            self.world.stores = self.stores.nodes

    def add_clients(self) -> None:
        """Whoever sends requests, where that is more than a row of them."""
        workload, world = self.scenario.workload, self.world
        if workload.sessions is not None:
            assert workload.requests is not None
            world.sessions = Sessions(world, sessions(workload, self.scenario.seed), workload.requests)
        client = workload.client
        if client is not None:
            timeouts = (client.timeout_s, client.first_token_timeout_s)
            world.patience = Patience(world, *(None if s is None else seconds_to_ns(s) for s in timeouts))

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
        self.world.costs[pool.name] = cost
        blocks = self.blocks_of(pool)
        block_bytes = self.shapes[pool.name].engine_bytes_per_token(pool.tp) * pool.block_size
        span = self.span(pool)
        if span:
            self.world.caches = True
        shards = self.alike(Shards(pool.tp, pool.pp, pool.block_size))
        for replica in range(self.engines(pool)):
            info = EngineInfo(f"{pool.name}-{replica}", shards)
            infos = self.infos[pool.leg]
            place = Place(len(self.places), pool, len(infos), info.engine, limits, cost, blocks, block_bytes, span)
            self.places[place.name] = place
            infos.append(info)
            self.doors[pool.leg].append(api_server_ns(pool))
            if pool.role == "decode":
                self.world.decodes.append(self.decode(place, info, self.first_life(place)))
            elif pool.role == "prefill":
                self.world.prefills.append(self.prefill(place, info, self.first_life(place)))
            else:
                self.world.prefills.append(self.aggregated(place, info))

    def alike(self, shards: Shards) -> Shards:
        """One value for all that are cut alike: layouts know by identity whom they were last asked about."""
        return self.cuts.setdefault(shards, shards)

    def first_life(self, place: Place) -> int:
        """The incarnation that an engine begins with."""
        return self.incarnations.get(place.name) or incarnation_of(place.index)

    def span(self, pool: Pool) -> int:
        """How many KV blocks an engine of the pool remembers together: what the workload has one name for."""
        if not pool.enable_prefix_caching or not self.named:
            return 0
        # What D has already ends on a border of P's blocks, too.
        return (
            lcm(self.world.prefix_block_tokens, *(other.block_size for other in self.scenario.pools)) // pool.block_size
        )

    def logs(self, engine: EngineId) -> tuple[Steps, Steps]:
        """Of an engine that decodes: its steps, and apart from them, as they are counted, the waits of the preempted.

        A prefill engine has none: nobody waits for a token of its steps.
        """
        steps = self.world.steps.setdefault(engine, Steps())
        preempted = self.world.steps.setdefault(f"{engine} preempted", Steps())
        return steps, preempted

    def engine(self, place: Place, info: EngineInfo, generation: int, *logs: Steps) -> Engine:
        """What computes in one life of an engine."""
        pool, recorder = pool_after(place, generation), self.world.recorder
        if recorder is not None:
            return RecordedEngine(recorder.kv_blocks[info.engine], place.limits, place.cost, pool, self.exact, *logs)
        return self.engine_class(place.limits, place.cost, pool, self.exact, *logs)

    def prefill(self, place: Place, info: EngineInfo, incarnation: int, generation: int = 0) -> PrefillNode:
        """One life of a prefill engine. `generation` is the last of its former life's."""
        engine = self.engine(place, info, generation)
        node = self.prefill_node(place, info, engine, generation)
        scheduler, ranks = self.producer(info, incarnation)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        if isinstance(node, StorePrefillNode):
            node.make_loads(incarnation)
        return node

    def prefill_node(self, place: Place, info: EngineInfo, engine: Engine, generation: int) -> PrefillNode:
        about = (self.world, place.index, info.engine, engine, place.block_bytes)
        if self.method.stores:
            return StorePrefillNode(*about, self.stores, self.conduct)
        if not self.method.staged_at_p and not self.method.in_pieces:
            return PrefillNode(*about, PrefillCore(WEIGHTS, Sending()))
        layers, ranks = self.most_layers(place.pool), info.shards.ranks
        if not self.method.staged_at_p:
            core = PrefillCore(WEIGHTS, ProgressiveSending(layers))
            return LayeredPrefillNode(*about, core, self.method, layers, True, None)
        staging = self.staging(self.method.p_memory, place.pool, generation)
        sending = StagedSending(self.method, self.conduct, staging, layers, ranks, ranks)
        core = PrefillCore(WEIGHTS, sending)
        return LayeredPrefillNode(*about, core, self.method, layers, self.conduct.early, staging)

    def decode_node(self, place: Place, info: EngineInfo, engine: Engine, generation: int) -> DecodeNode:
        about = (self.world, place.index, info.engine, engine, place.block_bytes)
        waits, together = self.conduct.decode_waits, self.conduct.fails_whole_batches
        if not self.method.staged_at_d:
            return DecodeNode(*about, DecodeCore(WEIGHTS, Landing(), waits, together))
        by_pieces = self.method.takes_in_pieces(self.conduct)
        staging = self.staging(self.method.d_memory, place.pool, generation, not by_pieces)
        if not by_pieces:
            return StagedDecodeNode(*about, DecodeCore(WEIGHTS, StagedLanding(staging), waits), self.method, staging)
        landing: PieceLanding
        if self.conduct.receiving_lanes is not None:
            landing = ListeningLanding(staging)
        else:
            landing = QueueingLanding(staging, self.most_layers(place.pool))
        return PiecewiseDecodeNode(*about, DecodeCore(WEIGHTS, landing, waits), self.method, landing)

    def staging(self, memory: Memory, pool: Pool, generation: int, reserves_whole: bool = True) -> Staging:
        """Memory beside the blocks of an engine of this pool; of its ranks that with the most layers."""
        size, transfer = self.staged_size(pool), self.scenario.transfer
        sizes = (transfer.host_buffer_bytes, transfer.kv_buffer_size, transfer.mem_pool_size_gb << 30)
        staging = staging_of(memory, size, *sizes, reserves_whole)
        staging.generation = generation
        return staging

    def aggregated(self, place: Place, info: EngineInfo, generation: int = 0) -> AggregatedNode:
        """One life of an engine that serves requests alone. `generation` is the last of its former life's."""
        engine = self.engine(place, info, generation, *self.logs(info.engine))
        return AggregatedNode(self.world, place.index, info, engine, place.block_bytes)

    def decode(self, place: Place, info: EngineInfo, incarnation: int, generation: int = 0) -> DecodeNode:
        """One life of a decode engine. `generation` is the last of its former life's."""
        engine = self.engine(place, info, generation, *self.logs(info.engine))
        node = self.decode_node(place, info, engine, generation)
        scheduler, ranks = self.consumer(info, incarnation, place.blocks)
        node.make_scheduler(scheduler, incarnation)
        for rank, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        return node


def pool_after(place: Place, generation: int) -> PagedPool:
    """A fresh pool whose generations go on where a former life's ended, so that no grant of that life can be taken for
    one of this."""
    pool = CachingPool(place.blocks, place.span) if place.span else PagedPool(place.blocks)
    while pool.newest_generation < generation:
        unused = pool.allocate(0)
        assert unused is not None
        pool.release(unused)
    return pool


def build(scenario: Scenario, *, exact: bool = False) -> World:
    """A world in which nothing has happened yet."""
    return Builder(scenario, exact).build()

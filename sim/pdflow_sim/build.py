"""Builds a world from a scenario: engines, endpoints, links, router."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from pdflow.cost.step import StepCost
from pdflow.methods.guards import may_corrupt
from pdflow.methods.store.geometry import HiddenStates
from pdflow.network.network import FlowNetwork
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import MS, EngineId
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.watching import WatchingRouter
from pdflow.scenario.costs.step_costs import api_server_time, step_cost
from pdflow.scenario.plan import plan_of
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scale import most_engines
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import HIDDEN_BYTES_PER_VALUE, stored_hidden_bytes
from pdflow.wiring.router import RoutedEngines, heartbeat_ns, router_of
from pdflow.wiring.stores import StoreWiring, store_pool
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, SESSION_BLOCK_TOKENS
from pdflow.workload.rng import Rng
from pdflow.workload.sessions import sessions
from pdflow_sim.clients.client_timeouts import ClientTimeouts
from pdflow_sim.clients.clients import Clients
from pdflow_sim.clients.prompt_content import PromptContent
from pdflow_sim.clients.sessions import SessionClients
from pdflow_sim.clock import Clock
from pdflow_sim.engine_builder import EngineBuilder
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.environment import ClockEnvironment
from pdflow_sim.faults.active_faults import ActiveFaults
from pdflow_sim.faults.faults import FaultInjector
from pdflow_sim.faults.faulty_fabric import FaultyFabric
from pdflow_sim.faults.restarts import EngineLifecycle
from pdflow_sim.faults.witness import Witness
from pdflow_sim.membership.engine_checks import SimEngineChecks
from pdflow_sim.membership.heartbeats import Heartbeats
from pdflow_sim.membership.scaling import Scaling
from pdflow_sim.network.fabric import Fabric, FabricSettings
from pdflow_sim.network.grouped_shipping import GroupedShipping
from pdflow_sim.network.paths import Paths
from pdflow_sim.network.shipping import Shipping
from pdflow_sim.nodes.api_servers import ApiServers
from pdflow_sim.nodes.hedged_router_node import HedgedRouterNode
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.router_link import RouterLink
from pdflow_sim.nodes.router_node import SimRouterNode
from pdflow_sim.nodes.stores import Stores
from pdflow_sim.observe.recording import Recorder
from pdflow_sim.routing import cluster_of
from pdflow_sim.world import World


class SimulationBuilder(EngineBuilder):
    """Builds one world. `costs` replace the step costs of the pools that they name; `incarnations` set those of the
    engines that they name, so that the record of another world can be followed.
    """

    def __init__(
        self,
        scenario: ResolvedScenario,
        exact: bool = False,
        recorder: Recorder | None = None,
        costs: Mapping[str, StepCost] | None = None,
        incarnations: Mapping[EngineId, int] | None = None,
    ) -> None:
        super().__init__(scenario, exact, recorder, incarnations or {})
        self.costs = costs or {}
        self.clock = Clock()
        self.env = ClockEnvironment(self.clock)
        self.step_costs: dict[str, StepCost] = {}
        """The cost of a step, by pool."""
        self.hidden_bytes = scenario.model.hidden_size * HIDDEN_BYTES_PER_VALUE
        self.stored_hidden_bytes = stored_hidden_bytes(scenario.transfer, scenario.model)
        if self.stored_hidden_bytes:
            self.geometry = HiddenStates(self.geometry, self.stored_hidden_bytes)
        workload = scenario.workload
        self.named = any(source is not None for source in (workload.trace, workload.like, workload.sessions))
        """True if prompts may name the prefix blocks that they begin with; prompts that are drawn share nothing."""
        self.prompts = PromptContent(PREFIX_BLOCK_TOKENS if workload.sessions is None else SESSION_BLOCK_TOKENS)
        self.shardings: dict[Shards, Shards] = {}
        self.streams = Rng(scenario.seed).stream

    def build(self) -> World:
        """Return a world in which nothing has happened yet."""
        scenario = self.scenario
        faulty = self.faulty_fabric() if scenario.faults else None
        fabric = self.fabric() if faulty is None else faulty
        shipping = self.shipping(fabric)
        self.ports = self.node_ports(fabric, shipping)
        if may_corrupt(self.pipeline_policy.guards):
            self.metrics.records.wrong_kv = set()
        if self.method.stores:
            self.add_stores()
        for pool in scenario.pools:
            self.add_pool(pool)
        router = self.router()
        clients = Clients(self.ports, router)
        scaling = Scaling(self.env, clients, self.nodes, scenario) if scenario.scales else None
        every_ns = heartbeat_ns(scenario)
        heartbeats = None if every_ns is None else Heartbeats(self.env, clients, self.nodes, scaling, every_ns)
        watching = router.endpoint
        if isinstance(watching, WatchingRouter) and watching.rules.stall is not None:
            SimEngineChecks(self.env, clients, watching, watching.rules.stall.check_ns)
        world = World(
            clock=self.clock,
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
        if faulty is not None:
            self.add_faults(world, faulty)
        self.add_clients(world)
        return world

    def paths(self) -> Paths:
        """Return the routes between the engines."""
        scenario = self.scenario
        network = FlowNetwork() if self.recorder is None else self.recorder.network()
        pool_of = {f"{pool.name}-{i}": pool for pool in scenario.pools for i in range(self.engines(pool))}
        connector = scenario.transfer.posting()
        return Paths(network, scenario.network, pool_of, self.shapes, self.initiator, self.rule, connector)

    def fabric(self) -> Fabric:
        """Return the network between the engines."""
        return Fabric(self.clock, self.metrics, self.paths(), self.fabric_settings())

    def faulty_fabric(self) -> FaultyFabric:
        """Return the network of a run with faults."""
        active = ActiveFaults(plan_of(self.scenario), self.streams, self.slots, self.metrics)
        witness = Witness(self.clock, self.nodes)
        timeout_ns = seconds_to_ns(self.scenario.transfer.handshake_timeout_s)
        return FaultyFabric(self.clock, self.metrics, self.paths(), self.fabric_settings(), active, witness, timeout_ns)

    def fabric_settings(self) -> FabricSettings:
        table = self.scenario.network
        return FabricSettings(
            control_ns=seconds_to_ns(table.control_latency_s),
            handshake_ns=seconds_to_ns(table.handshake_s),
            warm=table.warm,
            wire_profile=self.pipeline_policy.wire_profile,
            pulls=self.pulls,
            checks_words=self.pipeline_policy.guards.invalidates_lost,
            noise_ppm=self.noise.of_links(),
        )

    def shipping(self, fabric: Fabric) -> Shipping | None:
        """Return the carrier of operations that go in pieces or a few at a time; None if the method needs none."""
        if not self.method.is_carried(self.pipeline_policy):
            return None
        hidden_bytes, transfer = 0 if self.method.stores else self.hidden_bytes, self.scenario.transfer
        most = transfer.nccl_max_groups if self.method.groups else None
        if most is None:
            return Shipping(fabric, self.method, self.pipeline_policy, hidden_bytes, transfer.pickle_bytes_per_s)
        return GroupedShipping(
            fabric, self.method, self.pipeline_policy, hidden_bytes, transfer.pickle_bytes_per_s, most
        )

    def node_ports(self, fabric: Fabric, shipping: Shipping | None) -> NodePorts:
        """Return the ports that all nodes share."""
        scenario, table = self.scenario, self.scenario.network
        poll_ns = MS if self.dialect.polls_at_steps and table.poll else 0
        writes = poll_ns > 0 and not self.pulls
        return NodePorts(
            clock=self.clock,
            metrics=self.metrics,
            fabric=fabric,
            shipping=shipping,
            router=RouterLink(self.clock, seconds_to_ns(table.http_latency_s)),
            prompts=self.prompts,
            poll_ns=poll_ns,
            writer_ns=seconds_to_ns(scenario.transfer.writer_poll_s) if writes else 0,
            prefill_tokens=1 if scenario.router.first_token == "prefill" else 0,
        )

    def add_stores(self) -> None:
        pool = store_pool(self.scenario)
        if pool is not None:
            wiring = StoreWiring(self, pool, self.stored_hidden_bytes)
            wiring.shards = self.alike(wiring.shards)
            self.stores = Stores(self.ports, wiring, pool, self.named, self.incarnations)
            self.nodes.stores = self.stores.nodes

    def add_faults(self, world: World, fabric: FaultyFabric) -> None:
        """Add the fault injector for the scenario's plan, and let faults lose heartbeats."""
        heartbeats, router = world.heartbeats, world.router
        if heartbeats is not None:
            heartbeats.is_lost = fabric.faults.loses_report
        lifecycle = EngineLifecycle(
            self.env, self.ports, self.nodes, router, heartbeats, self.recorder, fabric, self.make
        )
        world.faults = FaultInjector(self.env, self.streams, world.clients, self.nodes, fabric, lifecycle)

    def add_clients(self, world: World) -> None:
        """Add the clients that send sessions and those that give up, where the workload has any."""
        workload, clients = self.scenario.workload, world.clients
        if workload.sessions is not None:
            assert workload.requests is not None
            world.sessions = SessionClients(
                self.env, clients, sessions(workload, self.scenario.seed), workload.requests
            )
            clients.on_end.append(world.sessions.ended)
        client = workload.client
        if client is not None:
            whole, first = client.timeout_s, client.first_token_timeout_s
            world.client_timeouts = ClientTimeouts(
                clients,
                timeout_ns=None if whole is None else seconds_to_ns(whole),
                first_token_ns=None if first is None else seconds_to_ns(first),
            )
            clients.on_arrival.append(world.client_timeouts.arrived)

    def oracle(self) -> Oracle:
        """Return the oracle, which checks every event of this world."""
        return Oracle(self.geometry)

    def engines(self, pool: Pool) -> int:
        """Return the largest number of engines that the pool has during the run."""
        return most_engines(pool.name, pool.replicas, self.scenario.scales)

    def add_pool(self, pool: Pool) -> None:
        """Make all engines of a pool; what they share is computed once."""
        model = self.scenario.model
        limits = self.limits_of(pool)
        cost = self.costs.get(pool.name) or step_cost(model, pool, self.scenario.base_dir)
        self.step_costs[pool.name] = cost
        blocks = self.blocks_of(pool)
        block_bytes = self.shapes[pool.name].engine_bytes_per_token(pool.tp) * pool.block_size
        block_bytes = block_bytes * model.block_layers // model.attention_layers
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
            self.make(slot, info, self.first_incarnation(slot), 0)

    def router(self) -> SimRouterNode:
        """Return the router's node, for the engines that have been built."""
        router = router_of(self.cluster())
        of_legs = {
            leg: [api_server_time(slot.pool) for slot in self.slots.of_leg(leg)] for leg in ("prefill", "decode")
        }
        api_servers = ApiServers(self.ports.router.http_ns, of_legs, self.noise.of_api_servers())
        if isinstance(router, HedgingRouter):
            return HedgedRouterNode(self.ports, self.nodes, router, api_servers)
        return SimRouterNode(self.ports, self.nodes, router, api_servers)

    def cluster(self) -> RoutedEngines:
        """Return the router's description of the engines that have been built."""
        return cluster_of(self, self.slots, self.step_costs, self.prompts.block_tokens)

    def alike(self, shards: Shards) -> Shards:
        """Return one instance for all equal `shards`: layouts compare them by identity with the last ones that they
        were asked about.
        """
        return self.shardings.setdefault(shards, shards)

    def span(self, pool: Pool) -> int:
        """Return the number of KV blocks that the prefix cache of an engine of the pool remembers as one unit; 0 if it
        remembers none. The unit is a whole number of the workload's named prefix blocks.
        """
        if not pool.enable_prefix_caching or not self.named:
            return 0
        # What D has already ends on a border of P's blocks, too.
        return lcm(self.prompts.block_tokens, *(other.block_size for other in self.scenario.pools)) // pool.block_size


def build(scenario: ResolvedScenario, *, exact: bool = False) -> World:
    """Return a world of this scenario in which nothing has happened yet."""
    return SimulationBuilder(scenario, exact).build()

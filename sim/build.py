"""From a scenario to a world: engines, endpoints, links, router."""

from __future__ import annotations

from pdflow.cost.roofline import roofline
from pdflow.cost.specs import ModelSpec
from pdflow.cost.step import StepCost, constant
from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Limits
from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.ranks import Initiator, Rule
from pdflow.memory.paged import PagedPool
from pdflow.network.network import Network
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.dialect import DIALECTS
from pdflow.protocol.ids import EngineInfo, Shards, rank_address
from pdflow.protocol.invariants import Oracle
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import MS
from pdflow.results.steps import Steps
from pdflow.routing.router import Router
from pdflow.scenario.fit import kv_shape_of, kv_tokens_of
from pdflow.scenario.schema import ConstantCost, Pool, Scenario, seconds_to_ns
from sim.decode_node import DecodeNode
from sim.fabric import Fabric
from sim.paths import Paths
from sim.prefill_node import PrefillNode
from sim.router_node import RouterNode
from sim.world import World


def cost_of(model: ModelSpec, pool: Pool) -> StepCost:
    """The step cost of one engine of a pool."""
    if isinstance(pool.cost, ConstantCost):
        return constant(pool.cost.prefill_s, pool.cost.decode_step_s)
    return roofline(model, pool.gpu, pool.tp, pool.pp)


def incarnation_of(index: int) -> int:
    """Each engine's life has a number of its own; a simulated one needs no randomness."""
    return 0x5EED_0000 + index


class Builder:
    """Puts one world together."""

    def __init__(self, scenario: Scenario, exact: bool = False) -> None:
        self.scenario = scenario
        self.exact = exact
        self.world = World()
        self.dialect = DIALECTS[scenario.transfer.dialect]
        self.pulls = scenario.transfer.method == "nixl-pull"
        self.timers = scenario.transfer.timers()
        self.initiator: Initiator = "pull" if self.pulls else "push"
        self.rule: Rule = "exactly-once" if self.dialect.control_frames else "vllm"
        self.shapes = {pool.name: kv_shape_of(scenario.model, pool) for pool in scenario.pools}
        shape = self.shapes[scenario.pools[0].name]
        self.geometry = TransferGeometry(shape, initiator=self.initiator, rule=self.rule)
        self.index = 0
        self.infos: dict[str, list[EngineInfo]] = {"prefill": [], "decode": []}

    def build(self) -> World:
        scenario, world = self.scenario, self.world
        table = scenario.network
        world.pulls = self.pulls
        world.poll_ns = MS if self.dialect.polls_at_steps and table.poll else 0
        if world.poll_ns and not self.pulls:
            world.writer_ns = seconds_to_ns(scenario.transfer.writer_poll_s)
        world.prefill_tokens = 1 if scenario.router.first_token == "prefill" else 0
        network = Network()
        pool_of = {f"{pool.name}-{i}": pool for pool in scenario.pools for i in range(pool.replicas)}
        paths = Paths(network, table, pool_of, self.shapes, self.initiator, self.rule)
        world.fabric = Fabric(
            world, network, paths, seconds_to_ns(table.control_latency_s), seconds_to_ns(table.handshake_s)
        )
        for pool in scenario.pools:
            self.add_pool(pool)
        router = Router(
            tuple(self.infos["prefill"]),
            tuple(self.infos["decode"]),
            scenario.router.policy,
            # A pull cannot begin before P's answer names its blocks, so its decode leg waits whatever the dispatch.
            "sequential" if self.pulls else scenario.router.dispatch,
            scenario.router.max_attempts,
            reports_prefill=not self.dialect.control_frames and not self.pulls,
        )
        world.router = RouterNode(world, router, seconds_to_ns(table.http_latency_s))
        return world

    def oracle(self) -> Oracle:
        """Who watches over this world's every event."""
        return Oracle(self.geometry)

    def add_pool(self, pool: Pool) -> None:
        """All engines of a pool; what they share is worked out once."""
        model = self.scenario.model
        blocks = kv_tokens_of(model, pool) // pool.block_size
        limits = Limits(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=max(pool.max_num_batched_tokens, pool.max_num_seqs),
            block_size=pool.block_size,
        )
        cost = cost_of(model, pool)
        block_bytes = self.shapes[pool.name].engine_bytes_per_token(pool.tp) * pool.block_size
        shards = Shards(pool.tp, pool.pp, pool.block_size)
        for replica in range(pool.replicas):
            info = EngineInfo(f"{pool.name}-{replica}", shards)
            self.infos[pool.role].append(info)
            logs = self.logs(info.engine) if pool.role == "decode" else (None, None)
            engine = Engine(limits, cost, PagedPool(blocks), self.exact, *logs)
            incarnation = incarnation_of(self.index)
            node_args = (self.world, self.index, info.engine, engine, block_bytes)
            if pool.role == "prefill":
                self.add_prefill(PrefillNode(*node_args), info, incarnation)
            else:
                self.add_decode(DecodeNode(*node_args), info, incarnation, blocks)
            self.index += 1

    def logs(self, engine: str) -> tuple[Steps, Steps]:
        """Of a decode engine: its steps, and, apart from them since they are counted, the waits of the preempted.

        A prefill engine has none: nobody waits for a token of its steps.
        """
        steps = self.world.steps[engine] = Steps()
        preempted = self.world.steps[f"{engine} preempted"] = Steps()
        return steps, preempted

    def add_prefill(self, node: PrefillNode, info: EngineInfo, incarnation: int) -> None:
        node.make_scheduler(ProducerScheduler(info, incarnation, self.dialect, self.pulls), incarnation)
        for rank in range(info.shards.ranks):
            endpoint = ProducerRank(info, rank, incarnation, self.dialect, self.timers, self.geometry)
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        self.world.prefills.append(node)

    def add_decode(self, node: DecodeNode, info: EngineInfo, incarnation: int, blocks: int) -> None:
        scheduler = ConsumerScheduler(
            info,
            incarnation,
            self.dialect,
            self.timers,
            self.geometry,
            self.pulls,
            blocks,
            self.scenario.transfer.quarantine_fraction,
            self.scenario.transfer.quarantine_suspect_fraction,
        )
        node.make_scheduler(scheduler, incarnation)
        for rank in range(info.shards.ranks):
            endpoint = ConsumerRank(info, rank, incarnation, self.dialect, self.timers, self.geometry)
            node.add(rank_address(info.engine, rank), endpoint, incarnation)
        self.world.decodes.append(node)


def build(scenario: Scenario, *, exact: bool = False) -> World:
    """A world in which nothing has happened yet."""
    return Builder(scenario, exact).build()

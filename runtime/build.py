"""From a scenario to one live engine: its endpoints, its memory, what it computes with."""

from __future__ import annotations

import secrets
from typing import Final

from pdflow.engine.sequence import Limits
from pdflow.errors import Problem, ScenarioError
from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.ranks import Initiator
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Method
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.scenario.fit import kv_tokens_of
from pdflow.scenario.schema import Pool, Scenario
from runtime.decode_node import DecodeNode
from runtime.engine_node import EngineNode, MakeTransport, Place
from runtime.engines.loop import LiveEngine
from runtime.models import Model, shape_of
from runtime.prefill_node import PrefillNode
from runtime.ranks import LayoutBook

SERVED: Final = ("nixl-push", "nixl-pull", "mooncake-v1")
"""The methods that have a live carrier so far."""


def refuse_what_is_not_served(scenario: Scenario) -> None:
    """ScenarioError, in one go, for what a scenario may say and no live cluster does yet."""
    problems = []

    def wrong(path: str, message: str) -> None:
        problems.append(Problem(scenario.path, path, message))

    transfer, router = scenario.transfer, scenario.router
    if transfer.method not in SERVED:
        wrong("transfer.method", f"{transfer.method} is simulated only, so far; serve has {', '.join(SERVED)}")
    if transfer.dialect != "strict":
        wrong("transfer.dialect", f"{transfer.dialect} is not served; strict is")
    if transfer.progressive or transfer.kv_buffer_device != "cuda":
        wrong("transfer", "progressive and kv_buffer_device are simulated only, so far")
    if router.disaggregate_above_tokens == "auto" or router.hedge_after_s is not None:
        wrong("router", "hedging and disaggregate_above_tokens = auto are simulated only, so far")
    if router.heartbeat_s is not None:
        wrong("router.heartbeat_s", "is simulated only, so far; serve sees processes start and end")
    if router.first_token == "prefill":
        wrong("router.first_token", "P's token is simulated only, so far; serve has decode")
    if scenario.faults or scenario.scales:
        wrong("", "[[fault]] and [[scale]] are simulated only, so far")
    for index, pool in enumerate(scenario.pools):
        if pool.role == "aggregated":
            wrong(f"pool.{index}.role", "aggregated engines are simulated only, so far")
        if pool.engine != scenario.pools[0].engine:
            wrong(f"pool.{index}.engine", "engines are all torch, or all synthetic")
    if problems:
        raise ScenarioError(problems)


def engines_of(scenario: Scenario, role: str = "") -> list[str]:
    """The names of all engines, or of those of one role, in order."""
    pools = [pool for pool in scenario.pools if role in ("", pool.role)]
    return [f"{pool.name}-{number}" for pool in pools for number in range(pool.replicas)]


class Builder:
    """Args: `transport` makes one rank's."""

    def __init__(self, scenario: Scenario, transport: MakeTransport) -> None:
        self.scenario = scenario
        self.transport = transport
        says = scenario.transfer
        self.method: Method = METHODS[says.method].adapted(False, False, says.num_workers)
        self.pulls = self.method.pulls
        self.initiator: Initiator = "pull" if self.pulls else "push"
        self.timers = scenario.transfer.timers()
        shape = shape_of(scenario, scenario.pools[0])
        self.geometry = TransferGeometry(shape, initiator=self.initiator, rule="exactly-once")

    def pool_of(self, engine: str) -> Pool:
        """The pool of NAME-0, NAME-1, ... KeyError for no engine of this scenario."""
        for pool in self.scenario.pools:
            name, dash, number = engine.rpartition("-")
            if name == pool.name and dash and number.isdecimal() and int(number) < pool.replicas:
                return pool
        raise KeyError(engine)

    def info_of(self, engine: str) -> EngineInfo:
        pool = self.pool_of(engine)
        return EngineInfo(engine, Shards(pool.tp, pool.pp, pool.block_size))

    def node(self, engine: str, model: Model) -> EngineNode:
        """One life of an engine, which nobody has heard of yet."""
        scenario, pool = self.scenario, self.pool_of(engine)
        info = self.info_of(engine)
        shape = shape_of(scenario, pool)
        blocks = kv_tokens_of(scenario.model, pool) // pool.block_size
        incarnation = secrets.randbits(63)
        place = Place(
            info=info,
            incarnation=incarnation,
            shape=shape,
            num_blocks=blocks,
            layouts=LayoutBook(shape, self.initiator, "exactly-once"),
            weights=model.weights,
        )
        about = (STRICT, self.timers, self.geometry)
        node: EngineNode
        if pool.role == "prefill":
            node = PrefillNode(
                place,
                ProducerScheduler(info, incarnation, STRICT, self.pulls),
                [ProducerRank(info, rank, incarnation, *about) for rank in range(info.shards.ranks)],
                self.transport,
            )
        else:
            scheduler = ConsumerScheduler(
                info,
                incarnation,
                STRICT,
                self.timers,
                self.geometry,
                self.pulls,
                blocks,
                scenario.transfer.quarantine_fraction,
                scenario.transfer.quarantine_suspect_fraction,
            )
            ranks = [ConsumerRank(info, rank, incarnation, *about) for rank in range(info.shards.ranks)]
            node = DecodeNode(place, scheduler, ranks, self.transport)
        limits = Limits(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.step_tokens,
            block_size=pool.block_size,
        )
        blocks_pool = CachingPool(blocks, 1) if pool.enable_prefix_caching else PagedPool(blocks)
        for live in node.ranks.values():
            live.lanes = self.method.strict.sending_lanes
        node.engine = LiveEngine(model.runner(node), limits, blocks_pool, node.came, model.eos)
        return node

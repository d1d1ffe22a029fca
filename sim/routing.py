"""From a world's engines to its router: the endpoint, which is made as everywhere, and its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.routing.hedging import HedgingRouter
from pdflow.scenario.fields import seconds_to_ns
from pdflow.scenario.ways import Crossover
from pdflow.wiring.router import Cluster, Target, dispatch_of, router_of
from sim.hedged_router_node import HedgedRouterNode
from sim.router_node import RouterNode

if TYPE_CHECKING:
    from sim.build import Builder, Place


def router_node(builder: Builder) -> RouterNode:
    """The router for the engines that have been built."""
    router = router_of(cluster_of(builder))
    about = seconds_to_ns(builder.scenario.network.http_latency_s), builder.doors
    if isinstance(router, HedgingRouter):
        return HedgedRouterNode(builder.world, router, *about)
    return RouterNode(builder.world, router, *about)


def cluster_of(builder: Builder) -> Cluster:
    decodes = places(builder, "decode")
    crossover = Crossover(
        scenario=builder.scenario,
        costs=builder.world.costs,
        initiator=builder.initiator,
        rule=builder.rule,
        sequential=dispatch_of(builder.scenario, builder.method) == "sequential",
    )
    return Cluster(
        scenario=builder.scenario,
        method=builder.method,
        prefill=targets(builder, "prefill"),
        decode=targets(builder, "decode"),
        prefix_block_tokens=builder.world.prefix_block_tokens,
        crossover=lambda position: crossover.thresholds(decodes[position].pool),
    )


def targets(builder: Builder, leg: str) -> tuple[Target, ...]:
    infos = builder.infos[leg]
    return tuple(Target(infos[place.position], place.pool) for place in places(builder, leg))


def places(builder: Builder, leg: str) -> list[Place]:
    """Of the engines that get such legs, by their position."""
    return [place for place in builder.places.values() if place.pool.leg == leg]

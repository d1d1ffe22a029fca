"""From a world's engines to its router: the endpoint, which is made as everywhere, its node, and what paths cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.cost.crossover import Stage, Way, thresholds
from pdflow.protocol.ids import rank_address
from pdflow.protocol.values import S
from pdflow.routing.hedging import HedgingRouter
from pdflow.scenario.fields import seconds_to_ns
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
    return Cluster(
        scenario=builder.scenario,
        method=builder.method,
        prefill=targets(builder, "prefill"),
        decode=targets(builder, "decode"),
        prefix_block_tokens=builder.world.prefix_block_tokens,
        crossover=lambda position: crossover(builder, decodes[position]),
    )


def targets(builder: Builder, leg: str) -> tuple[Target, ...]:
    infos = builder.infos[leg]
    return tuple(Target(infos[place.position], place.pool) for place in places(builder, leg))


def crossover(builder: Builder, d: Place) -> tuple[int, ...]:
    """The longest prompts that stay at a decode engine, by the legs that are open there."""
    of_pool = {place.pool.name: place for place in places(builder, "prefill")}
    ways = [way(builder, p, d) for p in of_pool.values() if p.pool.role == "prefill"]
    stage = Stage(d.cost, d.limits.max_num_batched_tokens)
    return thresholds(stage, ways, d.limits.max_num_seqs, d.blocks * d.pool.block_size)


def way(builder: Builder, p: Place, d: Place) -> Way:
    """Through a prefill engine: its steps, and its KV's way with nobody else on it."""
    scenario, paths = builder.scenario, builder.world.fabric.paths
    route = paths.route(rank_address(p.name, 0), rank_address(d.name, 0))
    lanes = min(p.pool.tp * p.pool.pp, d.pool.tp) * scenario.network.nics_per_rank
    nic = scenario.network.bandwidth_bytes_per_s
    rates = [] if nic is None else [nic * lanes]
    via = paths.via.get((p.pool.name, d.pool.name), ())
    rates += [
        link.bandwidth_bytes_per_s for link in scenario.network.links if link.name in via and link.bandwidth_bytes_per_s
    ]
    fixed_ns = route.latency_ns + builder.world.fabric.control_ns
    if dispatch_of(scenario, builder.method) == "sequential":
        # P's answer to the router, and the decode leg to D, which D's own prompts do not wait for.
        fixed_ns += 2 * seconds_to_ns(scenario.network.http_latency_s) + builder.doors["decode"][d.position]

    def transfer_ns(tokens: int) -> int:
        nbytes = scenario.model.kv_bytes_per_token * tokens
        flow_ns = -(-nbytes * S // min(rates)) if rates else 0
        return fixed_ns + route.post_ns(tokens) + flow_ns

    return Way(Stage(p.cost, p.limits.max_num_batched_tokens), transfer_ns)


def places(builder: Builder, leg: str) -> list[Place]:
    """Of the engines that get such legs, by their position."""
    return [place for place in builder.places.values() if place.pool.leg == leg]

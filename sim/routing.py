"""From [router] to the router: the least endpoint that does what the table says, and its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.cost.crossover import Stage, Way, thresholds
from pdflow.protocol.ids import rank_address
from pdflow.protocol.values import S
from pdflow.routing.admission import Admission
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.heartbeats import silence_ns
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Dispatch, Router
from pdflow.routing.two_choices import TwoChoices
from pdflow.scenario.fields import seconds_to_ns
from sim.aggregated_node import AggregatedNode
from sim.hedged_router_node import HedgedRouterNode
from sim.router_node import RouterNode

if TYPE_CHECKING:
    from pdflow.scenario.router_schema import Policy
    from sim.build import Builder, Place


def router_node(builder: Builder) -> RouterNode:
    """The router for the engines that have been built."""
    router = router_of(builder)
    about = seconds_to_ns(builder.scenario.network.http_latency_s), builder.doors
    if isinstance(router, HedgingRouter):
        return HedgedRouterNode(builder.world, router, *about)
    return RouterNode(builder.world, router, *about)


def router_of(builder: Builder) -> Router:
    says = builder.scenario.router
    prefill, decode = tuple(builder.infos["prefill"]), tuple(builder.infos["decode"])
    dispatch = dispatch_of(builder)
    choices = choice_of(builder, "prefill"), choice_of(builder, "decode")
    reports = not builder.dialect.control_frames and not builder.pulls
    alone = frozenset(i for i, node in enumerate(builder.world.prefills) if isinstance(node, AggregatedNode))
    also = says.attempts, reports, alone
    rules = rules_of(builder)
    if says.hedge_after_s is not None:
        after_ns = seconds_to_ns(says.hedge_after_s)
        return HedgingRouter(prefill, decode, dispatch, choices, rules, *also, hedge_after_ns=after_ns)
    if rules != Rules() or builder.scenario.scales:
        return GovernedRouter(prefill, decode, dispatch, choices, rules, *also)
    return Router(prefill, decode, says.policy, dispatch, *also, choices=choices)


def dispatch_of(builder: Builder) -> Dispatch:
    """A pull cannot begin before P's answer names its blocks, so its decode leg waits whatever the dispatch. Where D is
    named when P begins, it is chosen then."""
    if builder.pulls:
        return "sequential"
    if builder.method.names_decode and not builder.conduct.answer_first:
        return "concurrent"
    return "sequential" if builder.conduct.answer_first else builder.scenario.router.dispatch


def choice_of(builder: Builder, leg: str) -> Choice:
    """Who chooses the engine of a request's prefill or decode leg."""
    says, engines = builder.scenario.router, len(builder.infos[leg])
    policy: Policy = says.policies[leg == "decode"]
    if policy == "two-choices":
        return TwoChoices(engines, 2 * builder.scenario.seed + (leg == "decode"))
    if policy == "prefix-aware":
        names = tuple(
            (says.prefix_memory_tokens or place.blocks * place.pool.block_size) // builder.world.prefix_block_tokens
            for place in places(builder, leg)
        )
        weight = 1.0 if says.prefix_weight is None else says.prefix_weight
        return PrefixAware(names, builder.world.prefix_block_tokens, weight, stays=leg == "decode")
    if policy == "session-affinity":
        return SessionAffinity(engines, says.affinity_most_load or 1.25)
    return Choice(policy, engines)


def rules_of(builder: Builder) -> Rules:
    says = builder.scenario.router
    above = says.disaggregate_above_tokens
    table: tuple[tuple[int, ...], ...] = ()
    if above == "auto":
        known: dict[str, tuple[int, ...]] = {}
        for place in places(builder, "decode"):
            if place.pool.name not in known:
                known[place.pool.name] = crossover(builder, place)
        table = tuple(known[place.pool.name] for place in places(builder, "decode"))
    elif above is not None:
        table = ((above,),) * len(builder.infos["decode"])
    return Rules(
        admission=Admission(says.max_inflight, says.max_queue_tokens),
        disaggregation=Disaggregation(table) if table else None,
        recomputes=says.on_failure == "recompute",
        silence_ns=silence_after_ns(builder),
    )


def heartbeat_ns(builder: Builder) -> int | None:
    """How often engines report to the router; None if they do not."""
    every_s = builder.scenario.router.reports_every_s(builder.scenario.transfer)
    return None if every_s is None else seconds_to_ns(every_s)


def silence_after_ns(builder: Builder) -> int | None:
    every_ns, says = heartbeat_ns(builder), builder.scenario.router
    if says.silent_after_s is not None:
        return seconds_to_ns(says.silent_after_s)
    return None if every_ns is None else silence_ns(every_ns)


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
    if dispatch_of(builder) == "sequential":
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

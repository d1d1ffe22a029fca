"""From [router] to the router's endpoint: the least one that does what the table says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Router
from pdflow.routing.two_choices import TwoChoices
from sim.aggregated_node import AggregatedNode

if TYPE_CHECKING:
    from pdflow.scenario.router_schema import Policy
    from sim.build import Builder


def router_of(builder: Builder) -> Router:
    """The endpoint for the engines that have been built."""
    says, infos = builder.scenario.router, builder.infos
    return Router(
        tuple(infos["prefill"]),
        tuple(infos["decode"]),
        says.policy,
        # A pull cannot begin before P's answer names its blocks, so its decode leg waits whatever the dispatch.
        "sequential" if builder.pulls else "concurrent" if builder.method.names_decode else says.dispatch,
        says.max_attempts,
        reports_prefill=not builder.dialect.control_frames and not builder.pulls,
        aggregated=frozenset(i for i, node in enumerate(builder.world.prefills) if isinstance(node, AggregatedNode)),
        choices=(choice_of(builder, "prefill"), choice_of(builder, "decode")),
    )


def choice_of(builder: Builder, leg: str) -> Choice:
    """Who chooses the engine of a request's prefill or decode leg."""
    says, engines = builder.scenario.router, len(builder.infos[leg])
    policy: Policy = says.policies[leg == "decode"]
    if policy == "two-choices":
        return TwoChoices(engines, 2 * builder.scenario.seed + (leg == "decode"))
    if policy == "prefix-aware":
        names = tuple(
            (says.prefix_memory_tokens or place.blocks * place.pool.block_size) // builder.world.prefix_block_tokens
            for place in builder.places.values()
            if place.pool.leg == leg
        )
        weight = 1.0 if says.prefix_weight is None else says.prefix_weight
        return PrefixAware(names, builder.world.prefix_block_tokens, weight, stays=leg == "decode")
    if policy == "session-affinity":
        return SessionAffinity(engines, says.affinity_most_load or 1.25)
    return Choice(policy, engines)


def asks(router: Router) -> bool:
    """Whether the endpoint looks at what a request is."""
    return type(router.prefill_choice) is not Choice or type(router.decode_choice) is not Choice

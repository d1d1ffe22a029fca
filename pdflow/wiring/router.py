"""Builds the router's endpoint from [router]: the smallest class that does what the table says.

The caller passes in what only its driver knows: the engines, how many tokens one name of a prompt's prefix stands for,
and from which length on a prompt is better computed elsewhere. How events reach the endpoint is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import attrs

from pdflow.protocol.values import S
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.heartbeats import silence_ns
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Dispatch, Router
from pdflow.routing.stalls import LEAST, StallRule
from pdflow.routing.two_choices import TwoChoices
from pdflow.routing.watching import WatchingRouter
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.validation.fit import kv_tokens_of

if TYPE_CHECKING:
    from pdflow.methods.method import Method
    from pdflow.protocol.ids import EngineInfo
    from pdflow.scenario.schema.router import Policy
    from pdflow.scenario.schema.scenario import Pool, ResolvedScenario

Crossover: TypeAlias = Callable[[int], tuple[int, ...]]
"""Maps the position of a decode engine to the longest prompts that stay there, by how many legs it has open."""


USUAL_LEAST_NS: Final = 5 * S
"""The shortest silence of a stalled engine, where the limit follows from what is usual."""


class Target(NamedTuple):
    """An engine that the router dispatches legs to."""

    info: EngineInfo
    pool: Pool


@attrs.frozen(kw_only=True)
class RoutedEngines:
    """The engines that a router dispatches to, for each leg and by position, and how KV goes between them."""

    scenario: ResolvedScenario
    method: Method
    prefill: tuple[Target, ...]
    decode: tuple[Target, ...]
    prefix_block_tokens: int
    """Tokens that one name of a prompt's prefix stands for."""
    crossover: Crossover | None = None
    """None where `disaggregate_above_tokens = "auto"` is refused."""
    changes: bool = False
    """Whether engines may leave and join, whatever the scenario has."""
    may_stall: bool = False
    """Whether engines may stall, as real ones may and simulated ones only by a fault."""


def router_of(cluster: RoutedEngines) -> Router:
    scenario, method = cluster.scenario, cluster.method
    router_config = scenario.router
    prefill, decode = (tuple(target.info for target in leg) for leg in (cluster.prefill, cluster.decode))
    dispatch = dispatch_of(scenario, method)
    choices = choice_of(cluster, "prefill"), choice_of(cluster, "decode")
    reports = not method.dialect(scenario.transfer.dialect).control_frames and not method.pulls
    alone = frozenset(i for i, target in enumerate(cluster.prefill) if target.pool.role == "aggregated")
    rules = rules_of(cluster)
    limits = rules, router_config.attempts, reports, alone, router_config.resumes
    if router_config.hedge_after_s is not None:
        hedge_after_ns = seconds_to_ns(router_config.hedge_after_s)
        return HedgingRouter(prefill, decode, dispatch, choices, *limits, hedge_after_ns=hedge_after_ns)
    if rules.stall is not None:
        return WatchingRouter(prefill, decode, dispatch, choices, *limits)
    if rules != Rules() or scenario.scales or cluster.changes:
        return GovernedRouter(prefill, decode, dispatch, choices, *limits)
    return Router(
        prefill,
        decode,
        router_config.policy,
        dispatch,
        max_attempts=router_config.attempts,
        reports_prefill=reports,
        aggregated=alone,
        choices=choices,
        resumes=router_config.resumes,
    )


def dispatch_of(scenario: ResolvedScenario, method: Method) -> Dispatch:
    """Return whether the legs of a request are dispatched concurrently or in sequence. A pull cannot begin before P's
    answer names its blocks, so its decode leg waits whatever the dispatch. Where D is named when P begins, it is chosen
    then."""
    answer_first = method.pipeline_policy(scenario.transfer.dialect).answer_first
    if method.pulls:
        return "sequential"
    if method.names_decode and not answer_first:
        return "concurrent"
    return "sequential" if answer_first else scenario.router.dispatch


def choice_of(cluster: RoutedEngines, leg: str) -> Choice:
    """Create the policy that chooses the engine of a request's prefill or decode leg."""
    scenario, router_config = cluster.scenario, cluster.scenario.router
    targets = cluster.decode if leg == "decode" else cluster.prefill
    policy: Policy = router_config.policies[leg == "decode"]
    if policy == "two-choices":
        return TwoChoices(len(targets), 2 * scenario.seed + (leg == "decode"))
    if policy == "prefix-aware":
        names = tuple(
            (router_config.prefix_memory_tokens or kv_tokens_of(scenario.model, target.pool))
            // cluster.prefix_block_tokens
            for target in targets
        )
        weight = 1.0 if router_config.prefix_weight is None else router_config.prefix_weight
        return PrefixAware(names, cluster.prefix_block_tokens, weight, stays=leg == "decode")
    if policy == "session-affinity":
        return SessionAffinity(len(targets), router_config.affinity_most_load or 1.25)
    return Choice(policy, len(targets))


def rules_of(cluster: RoutedEngines) -> Rules:
    router_config = cluster.scenario.router
    table = stays_of(cluster)
    return Rules(
        admission=AdmissionLimits(router_config.max_inflight, router_config.max_queue_tokens),
        disaggregation=Disaggregation(table) if table else None,
        recomputes=router_config.on_failure == "recompute",
        recomputes_last=cluster.method.stores and router_config.attempts > 1,
        silence_ns=silence_after_ns(cluster.scenario),
        abandons_silent=abandons_silent(cluster.scenario),
        stall=stall_rule_of(cluster),
    )


def stall_rule_of(cluster: RoutedEngines) -> StallRule | None:
    """Return when an engine counts as stalled; None if requests stay at stalled engines, or could not leave them."""
    scenario, router_config = cluster.scenario, cluster.scenario.router
    abandons, after_s = router_config.abandon_stalled, router_config.stalled_after_s
    if abandons is None:
        published = scenario.transfer.dialect == "as-published"
        abandons = after_s is not None or (cluster.may_stall and not published)
    if not abandons or (router_config.attempts == 1 and router_config.hedge_after_s is None):
        return None
    if after_s is None:
        return StallRule(USUAL_LEAST_NS // LEAST, learns=True)
    return StallRule(max(1, seconds_to_ns(after_s) // LEAST))


def stays_of(cluster: RoutedEngines) -> tuple[tuple[int, ...], ...]:
    """Return, for each decode engine, the longest prompts that it computes itself. Engines of a pool are alike."""
    above = cluster.scenario.router.disaggregate_above_tokens
    if above is None:
        return ()
    if above != "auto":
        return ((above,),) * len(cluster.decode)
    assert cluster.crossover is not None, "refused"
    known: dict[str, tuple[int, ...]] = {}
    for position, target in enumerate(cluster.decode):
        if target.pool.name not in known:
            known[target.pool.name] = cluster.crossover(position)
    return tuple(known[target.pool.name] for target in cluster.decode)


def heartbeat_ns(scenario: ResolvedScenario) -> int | None:
    """Return the interval at which engines report to the router; None if they do not."""
    every_s = scenario.router.reports_every_s(scenario.transfer)
    return None if every_s is None else seconds_to_ns(every_s)


def abandons_silent(scenario: ResolvedScenario) -> bool:
    """Return whether requests at an engine that falls silent are taken back; false where no engine reports."""
    if silence_after_ns(scenario) is None:
        return False
    abandons = scenario.router.abandon_silent
    return scenario.transfer.dialect != "as-published" if abandons is None else abandons


def silence_after_ns(scenario: ResolvedScenario) -> int | None:
    every_ns, router_config = heartbeat_ns(scenario), scenario.router
    if router_config.silent_after_s is not None:
        return seconds_to_ns(router_config.silent_after_s)
    return None if every_ns is None else silence_ns(every_ns)

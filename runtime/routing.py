"""From [router] to the router's endpoint."""

from __future__ import annotations

from pdflow.protocol.ids import EngineInfo
from pdflow.routing.admission import Admission
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.policy import Choice
from pdflow.routing.router import Router
from pdflow.routing.two_choices import TwoChoices
from pdflow.scenario.schema import Scenario


def router_of(scenario: Scenario, prefill: list[EngineInfo], decode: list[EngineInfo], pulls: bool) -> Router:
    """The least endpoint that does what the table says. All engines are down until they report."""
    says = scenario.router
    choices = (
        choice_of(scenario, says.policies[0], len(prefill), 0),
        choice_of(scenario, says.policies[1], len(decode), 1),
    )
    above = says.disaggregate_above_tokens
    table = ((above,),) * len(decode) if isinstance(above, int) else ()
    rules = Rules(
        admission=Admission(says.max_inflight, says.max_queue_tokens),
        disaggregation=Disaggregation(table) if table else None,
        recomputes=says.on_failure == "recompute",
    )
    dispatch = "sequential" if pulls else says.dispatch
    engines = tuple(prefill), tuple(decode)
    if rules == Rules():
        router = Router(*engines, says.policy, dispatch, says.attempts, choices=choices)
    else:
        router = GovernedRouter(*engines, dispatch, choices, rules, says.attempts)
    for choice in choices:
        choice.up = [False] * len(choice.up)
    return router


def choice_of(scenario: Scenario, policy: str, engines: int, place: int) -> Choice:
    says = scenario.router
    if policy == "two-choices":
        return TwoChoices(engines, 2 * scenario.seed + place)
    if policy == "session-affinity":
        return SessionAffinity(engines, says.affinity_most_load or 1.25)
    assert policy in ("round-robin", "least-loaded"), policy
    return Choice(policy, engines)  # type: ignore[arg-type]

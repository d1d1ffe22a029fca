"""The settings that `pdflow check routers` explores."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.events import RequestArrived
from pdflow.routing.governed import Rules
from pdflow.routing.stalls import StallRule
from pdflow_sim.check.routers.setting import RouterSetting

ONE: Final = (RequestArrived(0, prompt_tokens=40, prefix=(1, 2), session=7),)
TWO: Final = (RequestArrived(0, prompt_tokens=10), RequestArrived(1, prompt_tokens=90))
CHAT: Final = (
    RequestArrived(0, prompt_tokens=40, prefix=(1, 2), session=7),
    RequestArrived(1, prompt_tokens=33, prefix=(3, 4)),
    RequestArrived(2, prompt_tokens=70, prefix=(1, 2, 5, 6), session=7),
)
"""The third continues the first."""
TURNS: Final = (
    RequestArrived(0, prompt_tokens=33, prefix=(3, 4)),
    RequestArrived(1, prompt_tokens=40, prefix=(1, 2), session=7),
    RequestArrived(2, prompt_tokens=70, prefix=(1, 2, 5, 6), session=7),
)
"""The third continues the second, which goes to another engine while the first is under way."""
ONE_TOKEN: Final = (RequestArrived(0, prefill_only=True, prompt_tokens=10), RequestArrived(1, prompt_tokens=90))
MIXED: Final = (RequestArrived(0, prompt_tokens=10), RequestArrived(1, prompt_tokens=90, streams=False))
SESSION: Final = (
    RequestArrived(0, prompt_tokens=40, session=7),
    RequestArrived(1, prompt_tokens=20, session=7),
)
"""They go to the same engines while these are up."""
SHORT: Final = Disaggregation(((10, 100), (10, 100)))
"""D computes prompts of up to 10 tokens itself, and of up to 100 if it decodes already."""


def as_a_whole(requests: tuple[RequestArrived, ...]) -> tuple[RequestArrived, ...]:
    """Return the requests of clients that do not stream."""
    return tuple(replace(request, streams=False) for request in requests)


SETTINGS: Final = (
    RouterSetting(name="retries", states=10009, requests=TWO, attempts=2, failures=2, refusals=1, late=1),
    RouterSetting(name="retries in sequence", states=1569, requests=TWO, attempts=2, dispatch="sequential", failures=2),
    RouterSetting(
        name="three attempts, engines that die",
        states=1634,
        requests=ONE,
        attempts=3,
        deaths=2,
        failures=1,
        reports=True,
    ),
    RouterSetting(
        name="reports to D", states=541, requests=as_a_whole(TWO), attempts=2, deaths=1, disconnects=1, reports=True
    ),
    RouterSetting(name="round robin", states=3481, requests=CHAT, p=3, policy="round-robin", failures=1, attempts=2),
    RouterSetting(name="two choices", states=5806, requests=CHAT, p=3, policy="two-choices", failures=1, attempts=2),
    RouterSetting(name="session affinity", states=805, requests=CHAT, policy="session-affinity"),
    RouterSetting(
        name="session affinity, engines that die",
        states=1868,
        requests=as_a_whole(TURNS),
        policy="session-affinity",
        deaths=1,
        dispatch="sequential",
    ),
    RouterSetting(name="prefix-aware", states=1680, requests=TURNS, p=3, policy="prefix-aware"),
    RouterSetting(
        name="prefix-aware, engines that die",
        states=3936,
        requests=as_a_whole(TURNS),
        policy="prefix-aware",
        deaths=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="prefix-aware, a small memory",
        states=1471,
        requests=as_a_whole(TURNS),
        policy="prefix-aware",
        names=3,
        deaths=1,
        d=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="sessions of D's own",
        states=174,
        requests=TURNS,
        policy="session-affinity",
        rules=Rules(disaggregation=Disaggregation(((35,),))),
        p=1,
        d=1,
    ),
    RouterSetting(name="hedges", states=5108, requests=TWO, hedge_after=1, ticks=1, failures=1),
    RouterSetting(
        name="hedges, late answers", states=1305, requests=ONE, hedge_after=1, ticks=1, attempts=2, failures=2, late=2
    ),
    RouterSetting(
        name="hedges and retries",
        states=189,
        requests=ONE,
        attempts=2,
        hedge_after=1,
        ticks=1,
        failures=3,
        disconnects=1,
    ),
    RouterSetting(
        name="hedges, engines that die",
        states=10605,
        requests=ONE,
        attempts=2,
        hedge_after=1,
        ticks=2,
        deaths=2,
        dispatch="sequential",
    ),
    RouterSetting(
        name="hedges of D's own prompts",
        states=1271,
        requests=TWO,
        rules=Rules(disaggregation=SHORT),
        hedge_after=1,
        ticks=1,
        failures=1,
    ),
    RouterSetting(
        name="prompts of D's own", states=155, requests=TWO, rules=Rules(disaggregation=SHORT), attempts=2, failures=1
    ),
    RouterSetting(
        name="recomputed by D",
        states=6386,
        requests=TWO,
        rules=Rules(recomputes=True),
        attempts=2,
        failures=1,
        deaths=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="recomputed by D at last",
        states=643,
        requests=ONE,
        rules=Rules(recomputes_last=True),
        attempts=3,
        failures=3,
        deaths=1,
        late=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="recomputed by D at last, hedged",
        states=301,
        requests=ONE,
        rules=Rules(recomputes_last=True),
        attempts=2,
        failures=3,
        hedge_after=1,
        ticks=1,
        resumes=True,
    ),
    RouterSetting(
        name="P's first token",
        states=294,
        requests=TWO,
        attempts=2,
        failures=2,
        first_from_prefill=True,
        rules=Rules(disaggregation=Disaggregation(((10,), (10,)))),
    ),
    RouterSetting(
        name="P's first token, an aggregated engine, answers as a whole",
        states=73,
        requests=as_a_whole(TWO),
        aggregated=frozenset({1}),
        attempts=2,
        failures=1,
        first_from_prefill=True,
    ),
    RouterSetting(
        name="P's first token, hedged and recomputed",
        states=7519,
        requests=ONE,
        attempts=2,
        failures=2,
        deaths=1,
        late=1,
        hedge_after=1,
        ticks=1,
        first_from_prefill=True,
        rules=Rules(recomputes=True),
    ),
    RouterSetting(
        name="answers resumed", states=1046, requests=ONE, attempts=3, failures=2, deaths=1, tears=1, resumes=True
    ),
    RouterSetting(
        name="answers resumed, hedged, late",
        states=8861,
        requests=ONE,
        attempts=3,
        hedge_after=1,
        ticks=1,
        failures=2,
        late=1,
        disconnects=1,
        tears=1,
        resumes=True,
    ),
    RouterSetting(
        name="answers resumed by D alone",
        states=607,
        requests=ONE,
        attempts=3,
        failures=2,
        deaths=1,
        late=1,
        first_from_prefill=True,
        rules=Rules(recomputes=True, disaggregation=Disaggregation(((50,), (10,)))),
        dispatch="sequential",
        resumes=True,
    ),
    RouterSetting(
        name="answers resumed with an aggregated engine",
        states=2063,
        requests=ONE,
        aggregated=frozenset({1}),
        attempts=3,
        deaths=2,
        failures=1,
        first_from_prefill=True,
        resumes=True,
    ),
    RouterSetting(
        name="an aggregated engine", states=129, requests=ONE_TOKEN, aggregated=frozenset({1}), attempts=2, failures=1
    ),
    RouterSetting(
        name="admission of requests", states=6486, requests=CHAT, rules=Rules(AdmissionLimits(max_inflight=2)), deaths=1
    ),
    RouterSetting(
        name="admission of tokens",
        states=6085,
        requests=CHAT,
        rules=Rules(AdmissionLimits(max_queue_tokens=40), SHORT),
        leaves=1,
    ),
    RouterSetting(name="engines that leave", states=1058, requests=TWO, leaves=1),
    RouterSetting(
        name="engines that leave and die", states=1763, requests=ONE, attempts=2, leaves=1, deaths=1, failures=1
    ),
    RouterSetting(
        name="engines that report", states=2783, requests=ONE, rules=Rules(silence_ns=2), p=1, d=1, ticks=3, deaths=1
    ),
    RouterSetting(
        name="engines that fall silent are abandoned",
        states=14021,
        requests=ONE,
        attempts=2,
        rules=Rules(silence_ns=1, abandons_silent=True),
        p=1,
        d=2,
        ticks=1,
        dispatch="sequential",
        resumes=True,
    ),
    RouterSetting(
        name="engines that report and leave",
        states=2617,
        requests=ONE,
        attempts=2,
        rules=Rules(silence_ns=1),
        p=2,
        d=1,
        ticks=1,
        leaves=1,
    ),
    RouterSetting(
        name="engines that stall",
        states=8214,
        requests=TWO,
        attempts=2,
        rules=Rules(stall=StallRule(1, least=0)),
        checks=2,
        p=2,
        d=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="engines that stall, and answers that are resumed",
        states=3692,
        requests=ONE,
        attempts=2,
        rules=Rules(stall=StallRule(1, least=0)),
        checks=4,
        p=1,
        late=1,
        resumes=True,
    ),
    RouterSetting(
        name="engines that stall and die",
        states=6986,
        requests=ONE,
        attempts=2,
        rules=Rules(stall=StallRule(1, least=1)),
        checks=4,
        d=1,
        deaths=1,
    ),
    RouterSetting(
        name="engines that stall and leave",
        states=1810,
        requests=ONE,
        attempts=2,
        rules=Rules(stall=StallRule(1, least=0)),
        checks=3,
        leaves=1,
        d=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="engines that stall and fall silent",
        states=10971,
        requests=ONE,
        attempts=2,
        rules=Rules(silence_ns=1, stall=StallRule(1, least=0)),
        checks=2,
        ticks=1,
        d=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="decode engines that stall and owe whole answers",
        states=3505,
        requests=as_a_whole(ONE),
        attempts=2,
        rules=Rules(stall=StallRule(1, least=1)),
        checks=4,
        idle=True,
        p=1,
        late=1,
        deaths=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="aggregated engines that stall and owe whole answers",
        states=7103,
        requests=MIXED,
        attempts=2,
        aggregated=frozenset({0, 1}),
        rules=Rules(stall=StallRule(1, least=1)),
        checks=4,
        idle=True,
        d=1,
    ),
    RouterSetting(
        name="aggregated engines that stall and are tried with whole answers",
        states=32350,
        requests=MIXED,
        attempts=2,
        aggregated=frozenset({0, 1}),
        rules=Rules(stall=StallRule(1, least=1)),
        checks=6,
        d=1,
    ),
    RouterSetting(
        name="hedges of engines that stall",
        states=2103,
        requests=ONE,
        attempts=2,
        hedge_after=1,
        ticks=1,
        rules=Rules(stall=StallRule(1, least=0)),
        checks=3,
        p=1,
    ),
    RouterSetting(
        name="prompts that hang",
        states=850,
        requests=tuple(replace(request, prefill_only=True) for request in SESSION),
        policy="session-affinity",
        attempts=2,
        rules=Rules(stall=StallRule(1, least=9, passed=1)),
        checks=2,
        d=1,
    ),
    RouterSetting(
        name="prompts that hang at aggregated engines",
        states=1504,
        requests=SESSION,
        policy="session-affinity",
        attempts=2,
        aggregated=frozenset({0, 1}),
        rules=Rules(stall=StallRule(1, least=1, passed=0)),
        checks=2,
        d=1,
    ),
    RouterSetting(
        name="first tokens that hang",
        states=4823,
        requests=SESSION,
        policy="session-affinity",
        attempts=2,
        rules=Rules(stall=StallRule(1, least=9, passed=0)),
        checks=2,
        p=1,
        dispatch="sequential",
    ),
    RouterSetting(
        name="streams that hang",
        states=3530,
        requests=ONE,
        attempts=2,
        resumes=True,
        rules=Rules(stall=StallRule(1, least=1, passed=1)),
        checks=4,
        p=1,
        late=1,
    ),
    RouterSetting(
        name="streams that hang, and prompts that are computed again",
        states=5400,
        requests=ONE,
        attempts=2,
        resumes=True,
        rules=Rules(recomputes=True, stall=StallRule(1, least=9, passed=0)),
        checks=3,
        p=1,
        deaths=1,
    ),
    RouterSetting(
        name="hedges that hang",
        states=2453,
        requests=ONE,
        attempts=2,
        hedge_after=1,
        ticks=1,
        resumes=True,
        rules=Rules(stall=StallRule(1, least=1, passed=1)),
        checks=3,
        p=1,
    ),
)

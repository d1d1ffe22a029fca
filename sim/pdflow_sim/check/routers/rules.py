"""Invariants of a router alone: of each effect, and of the state after each event.

They are those of sim/pdflow_sim/check/routed/invariant_checker.py, and those of rules that no scope has: hedging,
admission, prompts of D's own, engines that leave or fall silent. All are judged from the account (account.py); no rule
of the router is stated a second time but for its thresholds, which are the setting's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pdflow.protocol.events import TimeReached
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.routing.effects import (
    AbortLeg,
    AskEngine,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineLeft,
    EngineSilent,
    EngineWatched,
    Reply,
    ReportPrefill,
    RequestHangs,
    ResumeAnswer,
)
from pdflow.routing.events import (
    AnswerEnded,
    ClientGone,
    EngineLost,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.prefix_aware import PrefixAware
from pdflow_sim.check.routers.account import ROLES, Begun, CountedLeg, Role
from pdflow_sim.check.routers.choices import check_choice, found
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.watched_account import RouterAccount
from pdflow_sim.check.search.forward import Violation


def check_effect(account: RouterAccount, effect: Any) -> None:
    """Check an effect, and enter it into the account. Raises Violation."""
    _CHECKS[type(effect)](account, effect)


# Legs.


def _prefill(account: RouterAccount, effect: DispatchPrefill) -> None:
    asked = _begins(account, effect.request, effect.request_id)
    alone = asked.prefill_only or effect.engine in account.setting.aggregated
    if effect.xid != f"x{effect.request_id[1:]}" or effect.keeps == alone:
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} is dispatched as {effect}")
    if account.setting.rules.disaggregation is not None and _all_keep(account, asked):
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} goes to P, but D should compute it")
    if _recomputes(account, effect.request):
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} goes to P, but D should recompute it")
    weighs = check_choice(account, "prefill", effect.engine, effect.request_id, asked)
    account.attempts[effect.request_id] = Begun(effect.request, account.made(effect.request) + 1, effect.engine)
    account.legs["prefill", effect.request_id] = CountedLeg(effect.engine, weighs=weighs)
    account.wait_begins(effect.request_id)


def _decode(account: RouterAccount, effect: DispatchDecode) -> None:
    begun = account.attempts.get(effect.request_id)
    if begun is None or begun.d >= 0 or effect.request not in account.waiting:
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} has no prefill leg, or a decode leg already")
    asked = account.asked(effect.request_id)
    answer = account.event if isinstance(account.event, PrefillAnswered) else None
    answered = answer is not None and answer.request_id == effect.request_id
    if answered == (account.setting.dispatch == "concurrent"):
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} is dispatched to D at {account.event}")
    if answer is not None and answered and effect.params != answer.params:
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} is dispatched with {effect.params}")
    if effect.params.xid != f"x{effect.request_id[1:]}" or effect.params.request_id != effect.request_id:
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} is dispatched to fetch {effect.params.xid}")
    if not answered and effect.params.prefill != account.infos["prefill", begun.p]:
        raise Violation(
            RouterFinding.DISPATCH, f"{effect.request_id} is dispatched to fetch from {effect.params.prefill}"
        )
    if asked.prefill_only or begun.p in account.setting.aggregated:
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} needs no decode leg")
    weighs = check_choice(account, "decode", effect.engine, effect.request_id, asked)
    account.attempts[effect.request_id] = begun._replace(d=effect.engine)
    account.legs["decode", effect.request_id] = CountedLeg(effect.engine, weighs=weighs)


def _alone(account: RouterAccount, effect: DispatchAlone) -> None:
    asked = _begins(account, effect.request, effect.request_id)
    rules = account.setting.rules
    recomputed = _recomputes(account, effect.request) or (rules.recomputes and not account.up("prefill"))
    if not recomputed and not _keeps(account, asked, effect.engine):
        raise Violation(RouterFinding.DISPATCH, f"{effect.request_id} is D's alone, without a reason")
    weighs = check_choice(account, "decode", effect.engine, effect.request_id, asked)
    account.attempts[effect.request_id] = Begun(
        effect.request, account.made(effect.request) + 1, d=effect.engine, reports=1
    )
    account.legs["decode", effect.request_id] = CountedLeg(effect.engine, weighs=weighs)
    account.wait_begins(effect.request_id)


def _recomputes(account: RouterAccount, request: int) -> bool:
    """Whether D is to compute the prompt of the next attempt itself, since one has failed."""
    rules, made = account.setting.rules, account.made(request)
    if not made or _hedging(account):
        return False
    last = made + 1 - (request in account.hedged) >= account.setting.attempts
    return rules.recomputes or (rules.recomputes_last and last)


def _keeps(account: RouterAccount, asked: RequestArrived, d: int) -> bool:
    """Whether this D is to compute a prompt itself."""
    table = account.setting.rules.disaggregation
    if table is None:
        return False
    above = table.above[d]
    tokens = asked.prompt_tokens - found(account, "decode", d, asked)
    return tokens <= above[min(account.loads("decode")[d], len(above) - 1)]


def _all_keep(account: RouterAccount, asked: RequestArrived) -> bool:
    up = account.up("decode")
    return bool(up) and all(_keeps(account, asked, d) for d in up)


def _hedging(account: RouterAccount) -> bool:
    return isinstance(account.event, TimeReached)


def _begins(account: RouterAccount, request: int, name: RequestId) -> RequestArrived:
    """Check that an attempt may begin. Raises Violation."""
    made, asked = account.made(request), account.setting.requests[request]
    if name != f"r{request}.{made + 1}" or request not in account.waiting:
        raise Violation(RouterFinding.DISPATCH, f"{name} is dispatched as attempt {made + 1}")
    if account.streaming.get(request, name) != name:
        raise Violation(RouterFinding.DISPATCH, f"{name} begins behind a token of {account.streaming[request]}")
    under_way = account.open_of(request)
    if _hedging(account):
        (first,) = under_way
        begun = account.attempts[first]
        late = account.setting.hedge_after is not None and account.due.get(request, account.now + 1) <= account.now
        if not late or request in account.hedged:
            raise Violation(RouterFinding.DISPATCH, f"{name} hedges a request that is not late, or is hedged already")
        account.hedged |= {request}
        account.failed = ("prefill", begun.p) if begun.p >= 0 else ("decode", begun.d)
    elif under_way:
        raise Violation(RouterFinding.OPEN, f"{name} begins, and {under_way[0]} has an open leg")
    elif made - (request in account.hedged) >= account.setting.attempts:
        raise Violation(RouterFinding.DISPATCH, f"{name} is one attempt too many")
    elif made and getattr(account.event, "code", Code.NONE) is Code.REJECTED:
        raise Violation(RouterFinding.DISPATCH, f"{name} begins, although an engine rejects the request")
    elif not made and (account.event != asked or _refused(account, asked)):
        raise Violation(RouterFinding.DISPATCH, f"{name} begins at {account.event}, or beyond the limits of admission")
    return asked


# Answers.


def _reply(account: RouterAccount, effect: Reply) -> None:
    request, event = effect.request, account.event
    if request not in account.waiting:
        raise Violation(RouterFinding.ANSWER, f"{request} is answered a second time, or never asked")
    if account.open_of(request):
        raise Violation(RouterFinding.OPEN, f"{request} is answered, and {account.open_of(request)[0]} has an open leg")
    made = account.made(request)
    if effect.attempts != made:
        raise Violation(RouterFinding.ANSWER, f"{request} has made {made} attempts, and {effect.attempts} are reported")
    if (effect.outcome == "cancelled") != (event == ClientGone(request)):
        raise Violation(RouterFinding.ANSWER, f"{request} is {effect.outcome} at {event}")
    if effect.outcome == "completed":
        if isinstance(event, AnswerEnded):
            well = event == AnswerEnded(request, Code.NONE)
        else:
            name = getattr(event, "request_id", "")
            well = getattr(event, "code", None) is Code.NONE and account.attempts[name].request == request
            well = well and account.streaming.get(request, name) == name
        if not well or effect.code is not Code.NONE:
            raise Violation(RouterFinding.ANSWER, f"{request} is completed at {event}")
    if effect.outcome == "failed":
        _check_failure(account, effect)
    for begun in account.closed():
        if begun.request == request:
            _check_reports(account, begun)
    account.over(request)


def _check_reports(account: RouterAccount, begun: Begun) -> None:
    """Check that the end of the prefill leg of an attempt that is over was reported to D once."""
    if account.setting.reports and begun.p >= 0 and begun.d >= 0 and begun.reports != 1:
        raise Violation(RouterFinding.REPORT, f"D {begun.d} got {begun.reports} reports of {begun}")


def _check_failure(account: RouterAccount, effect: Reply) -> None:
    """Check that a failure is nobody's but the last attempt's, or that there was no engine."""
    event, request = account.event, effect.request
    if isinstance(event, EnginesChecked):
        raise Violation(RouterFinding.NEEDLESS, f"{request} fails at a check, and its engine may only be slow")
    made = account.made(request) - (request in account.hedged)
    if isinstance(event, RequestArrived):
        refused = _refused(account, event)
        if refused != (effect.code is Code.REJECTED) or bool(effect.reason) != refused:
            raise Violation(RouterFinding.NEEDLESS, f"{request} is answered {effect}")
    # A token of an attempt that is over: the attempt under way would send a second start of the answer.
    late_token = isinstance(event, FirstTokenDelivered)
    other = Code.IO if late_token else Code.PEER_DEAD if isinstance(event, EngineLost) else Code.NONE
    code = getattr(event, "code", other)
    if effect.code is Code.UNREACHABLE and not _reachable(account, request):
        return
    if effect.code is not code and not isinstance(event, RequestArrived):
        raise Violation(RouterFinding.ANSWER, f"{request} fails with {effect.code} at {event}")
    breaks_off = request in account.streaming and not account.setting.resumes
    final = breaks_off or effect.code is Code.REJECTED or made >= account.setting.attempts
    if not final and not isinstance(event, AnswerEnded):
        raise Violation(RouterFinding.NEEDLESS, f"{request} fails after {made} of {account.setting.attempts} attempts")


def _reachable(account: RouterAccount, request: int) -> bool:
    """Whether the engines that a request needs are up."""
    rules, asked = account.setting.rules, account.setting.requests[request]
    p, d = account.up("prefill"), account.up("decode")
    if (rules.recomputes or _recomputes(account, request)) and d:
        return True
    alone = asked.prefill_only or any(each in account.setting.aggregated for each in p)
    return bool(p) and (bool(d) or alone)


def _refused(account: RouterAccount, asked: RequestArrived) -> bool:
    """Whether the limits of admission refuse a request."""
    limits = account.setting.rules.admission
    if limits.max_inflight is not None and len(account.waiting) - 1 >= limits.max_inflight:
        return True
    legs = [name for (role, name), leg in account.legs.items() if role == "prefill" and leg.open]
    queued = sum(account.asked(name).prompt_tokens for name in legs)
    bound = limits.max_queue_tokens
    if bound is None or not queued or _all_keep(account, asked):
        return False
    return queued + asked.prompt_tokens > bound * len(account.up("prefill"))


_CHECKS: dict[type, Callable[[RouterAccount, Any], None]] = {
    AbortLeg: RouterAccount.aborted,
    AskEngine: RouterAccount.asks,
    DispatchAlone: _alone,
    DispatchDecode: _decode,
    DispatchPrefill: _prefill,
    EngineLeft: RouterAccount.gone,
    EngineSilent: RouterAccount.fell_silent,
    EngineWatched: RouterAccount.watched,
    RequestHangs: RouterAccount.hangs,
    Reply: _reply,
    ReportPrefill: RouterAccount.reported,
    ResumeAnswer: RouterAccount.resumed,
}


# The state after an event.


def check_state(account: RouterAccount, router: GovernedRouter) -> None:
    """Check what the router counts against the account, and that it has done what the event calls for. Raises
    Violation."""
    account.passes.keep(account.open_names())
    _check_stalls(account)
    _check_hanging(account)
    _check_hedges(account)
    _check_work(account, router)
    _check_engines(account, router)
    _check_timers(account, router)
    for begun in account.closed():
        _check_reports(account, begun)


def _check_work(account: RouterAccount, router: GovernedRouter) -> None:
    open_names = account.open_names()
    served = {account.attempts[name].request for name in open_names}
    if served != account.waiting.keys():
        raise Violation(RouterFinding.IDLE, f"{[*account.waiting]} wait, and {served} have open legs")
    if isinstance(account.event, ClientGone) and account.event.request in account.waiting:
        raise Violation(RouterFinding.ANSWER, f"the client of {account.event.request} has left")
    if open_names.keys() != router.attempts.keys() or router.by_request.keys() != account.waiting.keys():
        raise Violation(RouterFinding.COUNT, f"attempts {[*router.attempts]} are open, not {[*open_names]}")
    for request, name in account.streaming.items():
        if account.open_of(request) not in ([], [name]):
            raise Violation(RouterFinding.OPEN, f"{name} streams, and {account.open_of(request)} are open")
    for role, choice in zip(ROLES, (router.prefill_choice, router.decode_choice), strict=True):
        loads = account.loads(role)
        if choice.loads != loads:
            raise Violation(RouterFinding.COUNT, f"{role} legs are {loads}, and {choice.loads} are counted")
        legs = [name for (which, name), leg in account.legs.items() if which == role and leg.open]
        tokens = sum(account.asked(name).prompt_tokens for name in legs)
        if choice.open_tokens != tokens:
            raise Violation(RouterFinding.COUNT, f"{role} legs have {tokens} tokens, not {choice.open_tokens}")
        if isinstance(choice, PrefixAware):
            _check_names(choice)


def _check_names(choice: PrefixAware) -> None:
    """Check that a policy's two tables of the names of prefix blocks agree, and have a bound."""
    holders: Counter[int] = Counter()
    for engine, (names, most) in enumerate(zip(choice.known, choice.capacities, strict=True)):
        if len(names) > most:
            raise Violation(RouterFinding.COUNT, f"engine {engine} has {len(names)} names, of at most {most}")
        holders.update(dict.fromkeys(names, 1 << engine))
    if holders != choice.holders:
        raise Violation(RouterFinding.COUNT, f"engines have {[*choice.known]}, and holders are {choice.holders}")


def _check_engines(account: RouterAccount, router: GovernedRouter) -> None:
    for role, engines, choice in zip(
        ROLES, (router.prefill, router.decode), (router.prefill_choice, router.decode_choice), strict=True
    ):
        up = [account.is_up((role, engine)) for engine in account.engines(role)]
        infos = [account.infos[role, engine] for engine in account.engines(role)]
        if choice.up != up or engines != infos:
            raise Violation(RouterFinding.MEMBER, f"{role}: {up} are up, and {choice.up} are taken for it")
    users = [account.users(engine) for engine in account.engines("prefill")]
    if router.membership.users != users:
        raise Violation(RouterFinding.COUNT, f"{users} attempts need each P, not {router.membership.users}")
    kept = [engine for engine in account.leaving if not account.in_use(engine)] if account.leaving else []
    if kept or router.membership.leaving.keys() != account.leaving or router.membership.left.keys() != account.left:
        raise Violation(RouterFinding.MEMBER, f"{kept or account.leaving} should have left, {account.left} have")
    if account.silent:
        raise Violation(RouterFinding.MEMBER, f"{account.silent} are silent, and are not reported so")


def _check_stalls(account: RouterAccount) -> None:
    """Check that an engine that has been silent for too long gets nothing more, that requests do not wait for it that
    may go elsewhere, and that one that is at work again is trusted, or at least tried after its pause."""
    event = account.event
    if not isinstance(event, EnginesChecked):
        return
    for seat, stall in account.stalled.items():
        engine = account.infos[seat].engine
        if account.works(engine, event):
            raise Violation(RouterFinding.MEMBER, f"{engine} works, and is taken for stalled")
        if not stall.on_trial and stall.checks >= stall.pause:
            raise Violation(RouterFinding.MEMBER, f"{engine} has paused for {stall.checks} checks, and is not tried")
        if not stall.hung and engine not in account.questions:
            raise Violation(RouterFinding.MEMBER, f"{engine} was stopped, and is not asked whether it responds")
    for name, wait in account.waits.items():
        role, index = seat = wait.seat
        others = [engine for engine in account.up(role) if engine != index]
        if not others or not account.exceeds(seat) or account.most_silent(role):
            continue
        if name in account.open_names() and account.waits_for(name) == seat and _may_leave(account, name):
            raise Violation(RouterFinding.NEEDLESS, f"{name} waits for {role} {index}, which is stalled")
        if account.is_up(seat):
            raise Violation(RouterFinding.MEMBER, f"{role} {index} is stalled, and may get legs")


def _check_hanging(account: RouterAccount) -> None:
    """Check that no request waits for an engine that has passed it over too often, if it may go elsewhere."""
    rule = account.setting.rules.stall
    if rule is None or not isinstance(account.event, EnginesChecked):
        return
    for name, passed in account.passes.passed.items():
        role, index = account.waits_for(name)
        others = [engine for engine in account.up(role) if engine != index]
        if passed > rule.passed and others and _may_leave(account, name):
            raise Violation(RouterFinding.NEEDLESS, f"{name} hangs at {role} {index}: passed over {passed} times")


def _may_leave(account: RouterAccount, name: RequestId) -> bool:
    """Whether another attempt may follow this one, and its engines are up."""
    request = account.attempts[name].request
    made = account.made(request) - (request in account.hedged)
    breaks_off = request in account.streaming and not account.setting.resumes
    return made < account.setting.attempts and not breaks_off and _reachable(account, request)


def _check_hedges(account: RouterAccount) -> None:
    """Check that what is late is hedged, and enter what will be due."""
    event, after = account.event, account.setting.hedge_after
    if isinstance(event, RequestArrived) and event.request in account.waiting and after is not None:
        account.due[event.request] = account.now + after
    if not isinstance(event, TimeReached):
        return
    for request, at in list(account.due.items()):
        if at <= account.now:
            del account.due[request]
            if request not in account.hedged and _another(account, account.open_of(request)[0]):
                raise Violation(RouterFinding.NEEDLESS, f"{request} is late, and not hedged")


def _another(account: RouterAccount, name: RequestId) -> bool:
    """Whether there are engines for a second attempt in addition to this one."""
    begun = account.attempts[name]
    role: Role = "prefill" if begun.p >= 0 else "decode"
    engine = begun.p if begun.p >= 0 else begun.d
    return any(each != engine for each in account.up(role)) and _reachable(account, begun.request)


def _check_timers(account: RouterAccount, router: GovernedRouter) -> None:
    if not isinstance(router, HedgingRouter):
        return
    wake_at, due = router.wake_at(), min(account.due.values(), default=None)
    if wake_at != due:
        raise Violation(RouterFinding.TIMER, f"the next hedge is due at {due}, and the router wakes at {wake_at}")
    late = sorted(request for request, at in account.due.items() if at <= account.now)
    if sorted(router.deadlines.late(account.now)) != late:
        raise Violation(RouterFinding.TIMER, f"{late} are late")


def check_end(router: GovernedRouter) -> None:
    """Check that a router without requests has kept nothing of them. Raises Violation."""
    kept: list[Any] = [router.attempts, router.by_request, *router.membership.users, router.membership.leaving]
    if isinstance(router, HedgingRouter):
        kept += [router.pairs, router.last, router.deadlines.due, router.deadlines.heap]
    for choice in (router.prefill_choice, router.decode_choice):
        kept += [*choice.loads, choice.open_tokens, *getattr(choice, "loads_tokens", ()), getattr(choice, "weighs", {})]
    if any(kept):
        raise Violation(RouterFinding.KEPT, f"{[each for each in kept if each]}")

"""The router alone: every order of events of the settings of `pdflow check routers`, and what is found of routers with
a rule missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from pdflow.protocol.messages import Code
from pdflow.routing import router
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.answer import Answer
from pdflow.routing.attempt import Attempt
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import AbortLeg, AskEngine, EngineSilent, ReportPrefill, ResumeAnswer
from pdflow.routing.failure import AfterFailure, after_failure
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.heartbeats import Roll
from pdflow.routing.hedging import HedgeDeadlines, HedgingRouter
from pdflow.routing.membership import Membership
from pdflow.routing.passes import PassCounts
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Router
from pdflow.routing.stalls import Awaited, Waiting
from pdflow.routing.watching import Stall, WatchingRouter, _waits_for
from pdflow.version import compiled
from pdflow_sim.check.routers.catalogue import SETTINGS
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.routers.world import RouterWorld
from pdflow_sim.check.search.forward import Violation, explore
from tests.check.answers import routers_explored

BY_NAME = {setting.name: setting for setting in SETTINGS}
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_nothing_is_found_in_any_order(setting: RouterSetting) -> None:
    assert routers_explored(setting) == (setting.states, {})


def test_all_names_differ() -> None:
    assert len(BY_NAME) == len(SETTINGS)


def method(owner: Any, name: str, replacement: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(owner, name, replacement)


def without(owner: Any, name: str, dropped: type) -> Patch:
    """Drop effects of one kind from what a method returns."""
    original = getattr(owner, name)

    def fewer(*args: Any) -> Any:
        return tuple(effect for effect in original(*args) if not isinstance(effect, dropped))

    return method(owner, name, fewer)


def _forgets_the_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router, "after_failure", lambda code, started, *counts: after_failure(code, False, *counts))


def _retries_what_is_rejected(patch: pytest.MonkeyPatch) -> None:
    retry = lambda self, attempt, code: after_failure(Code.IO, attempt.started, attempt.number, self.max_attempts)  # noqa: E731
    patch.setattr(Router, "_after_failure", retry)


def _stalls_as(kind: Literal["stopped", "hung"]) -> Patch:
    """Take every engine that stalls for one whose process is stopped, or whose GPU hangs."""
    stall = WatchingRouter._stall

    def stalls(self: WatchingRouter, seat: Any, silences: Any, attempts: Any) -> bool:
        for attempt in attempts:
            self.waits[attempt.request_id].responded = kind == "hung"
        return stall(self, seat, silences, attempts)

    return method(WatchingRouter, "_stall", stalls)


BUGS: dict[str, tuple[Patch, str, RouterFinding]] = {
    "each attempt of a pair is answered": (
        method(HedgingRouter, "_over", GovernedRouter._over), "hedges", RouterFinding.ANSWER,
    ),
    "an engine never leaves": (
        method(Membership, "gone", lambda *_: iter(())), "engines that leave", RouterFinding.MEMBER,
    ),
    "an engine leaves at once": (
        method(Membership, "gone", lambda self, *_: [self.leaving.popitem()[0]] if self.leaving else []),
        "engines that leave",
        RouterFinding.MEMBER,
    ),
    "a token is forgotten": (_forgets_the_token, "hedges and retries", RouterFinding.DISPATCH),
    "late tokens are ignored": (
        method(HedgingRouter, "_late_first_token", lambda *_: ()), "hedges, engines that die", RouterFinding.OPEN,
    ),
    "a number is used again": (
        method(HedgingRouter, "_next_number", lambda self, attempt: attempt.number + 1),
        "hedges and retries",
        RouterFinding.DISPATCH,
    ),
    "a rejected request is tried again": (_retries_what_is_rejected, "retries", RouterFinding.DISPATCH),
    "nothing is tried again": (
        method(Router, "_after_failure", lambda *_: AfterFailure.FAIL), "retries", RouterFinding.NEEDLESS,
    ),
    "legs are not aborted": (without(Router, "_close", AbortLeg), "retries", RouterFinding.OPEN),
    "D gets no report": (without(Router, "_close", ReportPrefill), "reports to D", RouterFinding.REPORT),
    "the most loaded engine is chosen": (
        method(Choice, "take", lambda self, avoid=None: _most_loaded(self)), "prompts of D's own", RouterFinding.ENGINE,
    ),
    "an engine is not avoided": (
        method(Choice, "candidates", lambda self, avoid: [e for e, up in enumerate(self.up) if up]),
        "two choices",
        RouterFinding.ENGINE,
    ),
    "engines that are down get legs": (
        method(Choice, "candidates", lambda self, avoid: [*range(len(self.up))]),
        "prefix-aware, engines that die",
        RouterFinding.ENGINE,
    ),
    "no session stays": (
        method(SessionAffinity, "_is_full", lambda *_: True), "session affinity", RouterFinding.ENGINE,
    ),
    "an engine that restarts keeps its sessions": (
        method(SessionAffinity, "forget", lambda *_: None),
        "session affinity, engines that die",
        RouterFinding.ENGINE,
    ),
    "no prefix is known": (
        method(PrefixAware, "matched", lambda self, asked: [0] * len(self.up)), "prefix-aware", RouterFinding.ENGINE,
    ),
    "nothing is late": (method(HedgeDeadlines, "push", lambda *_: None), "hedges", RouterFinding.TIMER),
    "what is over wakes the router": (method(HedgeDeadlines, "tidy", lambda *_: None), "hedges", RouterFinding.TIMER),
    "nothing is hedged": (method(HedgingRouter, "_hedge", lambda *_: ()), "hedges", RouterFinding.NEEDLESS),
    "P computes short prompts": (
        method(Disaggregation, "keeps", lambda *_: False), "prompts of D's own", RouterFinding.DISPATCH,
    ),
    "every request is admitted": (
        method(AdmissionLimits, "refusal", lambda *_: ""), "admission of requests", RouterFinding.DISPATCH,
    ),
    "every prompt is refused": (
        method(AdmissionLimits, "refusal", lambda *_: "shed"), "admission of tokens", RouterFinding.NEEDLESS,
    ),
    "no engine falls silent": (
        method(Roll, "pass_to", lambda self, now: setattr(self, "now", now) or []),
        "engines that report",
        RouterFinding.MEMBER,
    ),
    "nothing is resumed": (
        method(Router, "_after_failure", lambda self, attempt, code: _without_resumption(self, attempt, code)),
        "answers resumed",
        RouterFinding.NEEDLESS,
    ),
    "an answer starts again": (without(Router, "_resume", ResumeAnswer), "answers resumed", RouterFinding.DISPATCH),
    "the attempt that continues an answer is no candidate": (
        method(Answer, "resume", lambda self, attempt: None), "answers resumed", RouterFinding.STUCK,
    ),
    "the next attempt of a resumed answer starts it again": (
        method(Router, "_resume", lambda self, attempt: _resumed_as_new(self, attempt)),
        "answers resumed",
        RouterFinding.DISPATCH,
    ),
    "an answer that is whole begins again": (
        method(Answer, "whole", lambda self, attempt: None), "answers resumed", RouterFinding.ANSWER,
    ),
    "the last attempt needs a P": (
        method(GovernedRouter, "_is_last", lambda *_: False), "recomputed by D at last", RouterFinding.DISPATCH,
    ),
    "an engine that falls silent keeps its legs": (
        method(GovernedRouter, "_fallen_silent", lambda self, roll, now: _kept_legs(self, roll, now)),
        "engines that fall silent are abandoned",
        RouterFinding.MEMBER,
    ),
    "no engine stalls": (
        method(WatchingRouter, "_stall", lambda *_: False), "engines that stall", RouterFinding.NEEDLESS,
    ),
    "requests wait for a stalled engine": (
        method(WatchingRouter, "_is_last_resort", lambda *_: True), "engines that stall", RouterFinding.NEEDLESS,
    ),
    "an engine that was active stalls": (
        method(Waiting, "checked", lambda self, *_: setattr(self, "silent", self.silent + 1)),
        "engines that stall",
        RouterFinding.MEMBER,
    ),
    "a stalled engine is tried at once": (
        method(WatchingRouter, "_offer_trials", lambda self, *_: _all_tried(self)),
        "engines that stall",
        RouterFinding.ENGINE,
    ),
    "a stalled engine gets legs": (
        method(WatchingRouter, "_watched", lambda self: _changes(self)), "engines that stall", RouterFinding.MEMBER,
    ),
    "an engine is trusted after a pause": (
        method(WatchingRouter, "_pause", lambda self, seat: self._trust(seat)),
        "engines that stall",
        RouterFinding.MEMBER,
    ),
    "whole answers have no limit": (
        method(Waiting, "limit", lambda self, rule, *_: None if self.awaited is Awaited.WHOLE else rule.least),
        "decode engines that stall and owe whole answers",
        RouterFinding.NEEDLESS,
    ),
    "no engine is asked whether it responds": (
        method(WatchingRouter, "_asks", lambda self: ()),
        "decode engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "a response counts for streams": (
        method(Waiting, "checked", lambda self, active, responds, _: _checked(self, active, responds, True, True)),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.NEEDLESS,
    ),
    "a response counts for no whole answer": (
        method(Waiting, "checked", lambda self, active, *_: setattr(self, "silent", 0 if active else self.silent + 1)),
        "decode engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "a response counts for no stream behind a whole answer": (
        method(Waiting, "checked", lambda self, *signs: _checked(self, *signs, self.awaited is Awaited.WHOLE)),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "a response counts for a stream that has begun": (
        method(Waiting, "checked", lambda self, *signs: _checked(self, *signs, True)),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "a response ends every stall": (
        _stalls_as("stopped"), "aggregated engines that stall and owe whole answers", RouterFinding.MEMBER,
    ),
    "a response ends no stall": (
        _stalls_as("hung"), "decode engines that stall and owe whole answers", RouterFinding.MEMBER,
    ),
    "a whole answer is a trial": (
        method(WatchingRouter, "_offer_trials", lambda self, *_: _all_on_trial_tried(self)),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.ENGINE,
    ),
    "only the last check shows whether an engine responds": (
        method(Waiting, "checked", lambda self, *signs: _forgets_responses(self, *signs)),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "no whole answer is ever a trial": (
        method(Stall, "may_try", lambda self, owes_whole: not (self.left or owes_whole)),
        "aggregated engines that stall and are tried with whole answers",
        RouterFinding.ENGINE,
    ),
    "an engine that stalls is not asked any more": (
        method(WatchingRouter, "_asks", lambda self: _asks_those_waited_for(self)),
        "decode engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "no trial is offered": (
        method(WatchingRouter, "_offer_trials", lambda *_: None), "engines that stall", RouterFinding.ENGINE,
    ),
    "a pause never ends": (
        method(WatchingRouter, "_pause", lambda *_: None), "engines that stall", RouterFinding.MEMBER,
    ),
    "a restarted engine stays stalled": (
        method(WatchingRouter, "_forget", lambda *_: None), "engines that stall and die", RouterFinding.MEMBER,
    ),
    "an engine that runs no step is at work": (
        method(WatchingRouter, "_silence", lambda *seen: SILENCE(*seen[:4], False, seen[5])),
        "decode engines that stall and owe whole answers",
        RouterFinding.NEEDLESS,
    ),
    "a response never shows work": (
        method(WatchingRouter, "_silence", lambda *seen: SILENCE(*seen[:4], True, seen[5])),
        "aggregated engines that stall and owe whole answers",
        RouterFinding.MEMBER,
    ),
    "no request hangs": (
        method(WatchingRouter, "_hangs", lambda *_: False), "first tokens that hang", RouterFinding.NEEDLESS,
    ),
    "no stream hangs": (
        method(WatchingRouter, "_hangs", lambda *_: False), "streams that hang", RouterFinding.NEEDLESS,
    ),
    "a request that hangs fails where it could continue": (
        method(WatchingRouter, "_reachable", lambda *_: True),
        "decode engines that stall and owe whole answers",
        RouterFinding.NEEDLESS,
    ),
    "an earlier request overtakes": (
        method(PassCounts, "overtaken", lambda self, seat, waiting: (seat, waiting.awaited) in self.newest),
        "prompts that hang at aggregated engines",
        RouterFinding.MEMBER,
    ),
    "a wait of another kind overtakes": (
        method(PassCounts, "overtaken", lambda self, _, waiting: waiting.number < max(self.newest.values(), default=0)),
        "first tokens that hang",
        RouterFinding.MEMBER,
    ),
    "one that overtakes counts at every check": (
        method(PassCounts, "checked", lambda *_: None), "prompts that hang", RouterFinding.MEMBER,
    ),
    "an engine that sends nothing passes a stream over": (
        method(PassCounts, "too_often", lambda *wait: PASSED_TOO_OFTEN(*wait[:5], True, wait[6])),
        "streams that hang",
        RouterFinding.MEMBER,
    ),
    "a stream that gets tokens hangs": (
        method(PassCounts, "too_often", lambda *wait: PASSED_TOO_OFTEN(*wait[:6], True)),
        "hedges that hang",
        RouterFinding.MEMBER,
    ),
    "a request that hangs is computed again where it hangs": (
        method(WatchingRouter, "_leave", lambda self, _, attempt: _stay(self, attempt)),
        "streams that hang, and prompts that are computed again",
        RouterFinding.ENGINE,
    ),
    "P's token is forwarded to no leg": (
        method(Answer, "decode_dispatched", lambda self, attempt: self.first_from_prefill and not self.has_first_token),
        "P's first token",
        RouterFinding.STUCK,
    ),
}  # fmt: skip


def _asks_those_waited_for(router: WatchingRouter) -> Any:
    seats = {_waits_for(attempt) for attempt in router.attempts.values() if router.waits[attempt.request_id].silent}
    return tuple(AskEngine(router._info(seat).engine) for seat in sorted(seats))


CHECKED = Waiting.checked
SILENCE = WatchingRouter._silence
PASSED_TOO_OFTEN = PassCounts.too_often


def _stay(router: WatchingRouter, attempt: Attempt) -> Any:
    """Have an attempt begin again, at any engine."""
    return () if router._is_last_resort(attempt) else router._failed(attempt, Code.STALLED)


def _forgets_responses(waiting: Waiting, *signs: bool) -> None:
    waiting.responded = False
    CHECKED(waiting, *signs)


def _checked(waiting: Waiting, active: bool, responds: bool, owes_whole: bool, counts: bool) -> None:
    """Record a check of an engine, where a response counts if it owes a whole answer, and this holds."""
    waiting.silent = 0 if active or (responds and owes_whole and counts) else waiting.silent + 1


def _without_resumption(router: Router, attempt: Attempt, code: Code) -> AfterFailure:
    return after_failure(code, attempt.started, attempt.number, router.max_attempts)


def _resumed_as_new(router: Router, attempt: Attempt) -> Any:
    """Resume an answer, and forget that its client has received tokens."""
    effects = router._retry(attempt)
    begun = router.by_request.get(attempt.request)
    return effects if begun is None else (ResumeAnswer(attempt.request, begun.request_id), *effects)


def _kept_legs(router: GovernedRouter, roll: Roll, now: int) -> Any:
    gone = roll.pass_to(now)
    for role, index in gone:
        (router.prefill_choice if role == "prefill" else router.decode_choice).up[index] = False
    return tuple(EngineSilent(router._info(seat).engine) for seat in gone)


def _changes(router: WatchingRouter) -> Any:
    """Return what has changed, and let every engine get legs."""
    for seat in router.stalled:
        router._choice(seat).up[seat[1]] = True
    changes, router.changes = tuple(router.changes), []
    return changes


def _all_tried(router: WatchingRouter) -> None:
    for seat in router.stalled:
        router._choice(seat).up[seat[1]] = True


def _all_on_trial_tried(router: WatchingRouter) -> None:
    for seat, stall in router.stalled.items():
        router._choice(seat).up[seat[1]] = not stall.left and not router._choice(seat).loads[seat[1]]


def _most_loaded(choice: Choice) -> int | None:
    up = [engine for engine, is_up in enumerate(choice.up) if is_up]
    if not up:
        return None
    chosen = max(up, key=choice.loads.__getitem__)
    choice.loads[chosen] += 1
    return chosen


@pytest.mark.skipif(compiled(), reason="a compiled router's rules cannot be exchanged; the source's are")
@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_rule_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    patch, name, finding = BUGS[bug]
    patch(monkeypatch)
    found = explore(RouterWorld(BY_NAME[name])).counterexamples
    assert finding in found, {each.value: lines for each, lines in found.items()}


def test_a_counterexample_ends_with_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RouterWorld(BY_NAME["retries"])
    monkeypatch.setattr(world.account, "reported_up", dict.fromkeys(world.account.reported_up, False))
    with pytest.raises(Violation, match="goes to engine 0, which is not in") as broken:
        world.after(("arrive", 0, 0))
    assert broken.value.action == "arrive 0 0"

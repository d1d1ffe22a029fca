"""What the router has done, counted without it: engines, attempts, legs and answers.

`RouterAccount` gets each event before the router handles it and each effect after, and knows from them alone which
engines are up, which legs are open and which clients wait. What the router counts itself must agree (rules.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, RequestId
from pdflow.routing.effects import (
    AbortLeg,
    AskEngine,
    EngineLeft,
    EngineSilent,
    EngineWatched,
    ReportPrefill,
    RequestHangs,
    ResumeAnswer,
)
from pdflow.routing.events import (
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    EngineReported,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.heartbeats import Seat
from pdflow.routing.watching import LONGEST_PAUSE
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.passes import PassAccount, Queue
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.search.forward import Violation

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
PER_EVENT = frozenset({"setting", "event", "silent", "failed", "earlier_questions", "was_up", "passes"})
"""Fields that matter only while an event is handled, or have a fingerprint of their own."""
LegKey: TypeAlias = tuple[Role, RequestId]


class CountedLeg(NamedTuple):
    """A leg that its engine may still answer."""

    engine: int
    open: bool = True
    """Neither answered nor aborted: the router waits for it."""
    weighs: int = 0
    """The tokens that it adds to what waits at its engine, for policies that look at prompts."""
    awaits_token: bool = False
    """It cannot decode before P's first token is forwarded to it."""
    returns_token: bool = False
    """P is asked for the first token of the answer."""
    begun: bool = False
    """The first piece of its answer has arrived."""
    dropped: bool = False
    """Its answer is dropped: the leg does not end, and must be aborted."""
    whole: bool = False
    """The last piece of its answer has arrived, and its end has not."""
    delivered: bool = False
    """The router knows that the client has the first token of its answer."""


class CountedWait(NamedTuple):
    """The wait of an open attempt."""

    seat: Seat
    silent: int = 0
    """The checks since in which the engine has given no sign of work."""
    responded: bool = False
    """It responded at one of them."""


class CountedStall(NamedTuple):
    """An engine that has stalled."""

    pause: int
    """Checks before it is tried."""
    hung: bool
    """It responded at a check of the silence after which it stalled."""
    on_trial: bool = False
    checks: int = 0
    """Checks of its pause so far; on trial those without a leg, up to the length of the pause."""


class Begun(NamedTuple):
    """An attempt that the router has begun."""

    request: int
    number: int
    p: int = -1
    d: int = -1
    reports: int = 0
    """How often the end of the prefill leg was reported to D."""


class RouterAccount:
    """The account of one router."""

    def __init__(self, setting: RouterSetting) -> None:
        self.setting = setting
        self.now: Instant = 0
        self.infos: dict[Seat, EngineInfo] = setting.infos()
        self.reported_up: dict[Seat, bool] = dict.fromkeys(self.infos, True)
        self.last_reports: dict[Seat, Instant] = {}
        """The last report of each engine that has reported lately."""
        self.leaving: frozenset[EngineId] = frozenset()
        self.left: frozenset[EngineId] = frozenset()
        self.legs: dict[LegKey, CountedLeg] = {}
        self.attempts: dict[RequestId, Begun] = {}
        self.waiting: dict[int, RequestArrived] = {}
        """Requests that the router has accepted, and not answered."""
        self.streaming: dict[int, RequestId] = {}
        """The attempt of which the router knows that its client has a token, or the one that is to continue behind
        it."""
        self.due: dict[int, Instant] = {}
        """When each request is to be hedged."""
        self.hedged: frozenset[int] = frozenset()
        self.last_choices: dict[Role, tuple[int, tuple[int, ...]]] = {}
        """The last engine chosen for each leg, and which were up then."""
        self.sessions: dict[tuple[Role, int], tuple[int, int]] = {}
        """The engine that each session's last leg was sent to, and its prompt's tokens."""
        self.known: dict[Seat, frozenset[int]] = dict.fromkeys(self.infos, frozenset())
        """The names of prefix blocks that each engine has."""
        self.late = setting.late
        """How many legs may still end at the moment at which they are aborted."""
        self.stalled: dict[Seat, CountedStall] = {}
        self.questions: frozenset[EngineId] = frozenset()
        """Engines that have been asked since the last check whether they respond."""
        self.earlier_questions: frozenset[EngineId] = frozenset()
        """Engines that had been asked before this check."""
        self.waits: dict[RequestId, CountedWait] = {}
        self.passes = PassAccount()
        self.was_up: dict[Seat, bool] = {}
        """Engines that might get legs, were on trial, or were at work again, when they were checked."""
        self.event: Any = None
        self.silent: set[EngineId] = set()
        """Engines that fell silent by the time of this event."""
        self.failed: Seat | None = None
        """The engine whose leg fails with this event."""

    def fork(self) -> RouterAccount:
        other = RouterAccount.__new__(RouterAccount)
        vars(other).update({name: value.copy() if type(value) is dict else value for name, value in vars(self).items()})
        other.passes = self.passes.fork()
        return other

    def fingerprint(self) -> Hashable:
        found = tuple(
            (tuple(value.items()) if name in ("attempts", "waiting") else frozenset(value.items()))
            if type(value) is dict
            else value
            for name, value in vars(self).items()
            if name not in PER_EVENT
        )
        return *found, self.passes.fingerprint()

    # Engines.

    def engines(self, role: Role) -> range:
        return range(self.setting.p if role == "prefill" else self.setting.d)

    def is_up(self, seat: Seat) -> bool:
        """Whether an engine may get legs."""
        if self.infos[seat].engine in self.leaving | self.left or seat in self.stalled:
            return False
        return self.reported_up[seat] if self.setting.rules.silence_ns is None else seat in self.last_reports

    def up(self, role: Role) -> list[int]:
        return [engine for engine in self.engines(role) if self.is_up((role, engine))]

    def loads(self, role: Role) -> list[int]:
        """Return how many legs are open at each engine."""
        loads = [0] * len(self.engines(role))
        for (which, _), leg in self.legs.items():
            if which == role and leg.open:
                loads[leg.engine] += 1
        return loads

    def open_names(self) -> dict[RequestId, None]:
        """Return the attempts that have an open leg, in the order of their legs."""
        return {name: None for (_, name), leg in self.legs.items() if leg.open}

    def open_of(self, request: int) -> list[RequestId]:
        """Return the attempts of a request that have an open leg."""
        return [name for name in self.open_names() if self.attempts[name].request == request]

    def asked(self, name: RequestId) -> RequestArrived:
        return self.setting.requests[self.attempts[name].request]

    def made(self, request: int) -> int:
        """Return how many attempts of a request have begun."""
        return sum(begun.request == request for begun in self.attempts.values())

    def users(self, engine: int) -> int:
        """Return how many open attempts were sent to a prefill engine."""
        return sum(self.attempts[name].p == engine for name in self.open_names())

    def in_use(self, engine: EngineId) -> bool:
        """Whether an attempt has a leg at an engine, or KV from it."""
        loads = self.loads("decode")
        return any(
            self.users(index) if role == "prefill" else loads[index]
            for (role, index), info in self.infos.items()
            if info.engine == engine
        )

    # Events, before the router handles them.

    def before(self, event: Any, now: Instant) -> None:
        self.event, self.now, self.failed = event, now, None
        silence = self.setting.rules.silence_ns
        gone = [] if silence is None else [seat for seat, at in self.last_reports.items() if at + silence <= now]
        self.silent = {self.infos[seat].engine for seat in gone}
        for seat in gone:
            del self.last_reports[seat]
            self._forget(seat)
        match event:
            case PrefillAnswered():
                self._got("prefill", event.request_id, event.params is not None)
                self._ended("prefill", event.request_id, event.params is None)
            case DecodeEnded():
                self._got("decode", event.request_id, event.code is Code.NONE)
                self._ended("decode", event.request_id, event.code is not Code.NONE)
            case FirstTokenDelivered() if event.request in self.waiting:
                self.streaming.setdefault(event.request, event.request_id)
                self.due.pop(event.request, None)
                self._sent_first(event.request_id)
            case EnginesChecked():
                self._checked(event)
            case EngineChanged() | EngineLost():
                self._changed(event)
            case EngineLeaves():
                self._forget(self.seat_of(event.engine))
                self.leaving |= {event.engine} - self.left
            case EngineJoins():
                self.leaving, self.left = self.leaving - {event.engine}, self.left - {event.engine}
                self._forget(self.seat_of(event.engine))
                self.reported_up[self.seat_of(event.engine)] = True
            case EngineReported():
                self._became((event.role, event.engine), event.info)
                self.last_reports[event.role, event.engine] = now
            case RequestArrived():
                self.waiting[event.request] = event

    def _got(self, role: Role, name: RequestId, well: bool) -> None:
        """Record that a leg has ended, and the wait of its attempt with it if it has ended well."""
        if well and self.legs[role, name].open:
            self.passes.ended(name, self._queue)
            self.wait_begins(name)

    def _queue(self, name: RequestId) -> Queue:
        """Return what an open attempt waits for, and at which engine."""
        role, index = seat = self.waits_for(name)
        asked = self.asked(name)
        if self.owes_whole(asked, seat):
            return None
        answers = role == "decode" or asked.prefill_only or index in self.setting.aggregated
        return seat, answers and self.legs[role, name].delivered

    def wait_begins(self, name: RequestId) -> None:
        if self.setting.rules.stall is not None:
            self.passes.begins(name)

    def seat_of(self, engine: EngineId) -> Seat:
        return next(seat for seat, info in self.infos.items() if info.engine == engine)

    def _ended(self, role: Role, name: RequestId, failed: bool) -> None:
        leg = self.legs.pop((role, name))
        if leg.open:
            self.failed = (role, leg.engine) if failed else None
            return
        self.late -= 1
        if not self.late:
            self.legs = {key: other for key, other in self.legs.items() if other.open}

    def waits_for(self, name: RequestId) -> Seat:
        """Return the engine that an open attempt waits for: P until it has answered."""
        leg = self.legs.get(("prefill", name))
        return ("prefill", leg.engine) if leg is not None and leg.open else ("decode", self.legs["decode", name].engine)

    def owes_whole(self, asked: RequestArrived, seat: Seat) -> bool:
        """Whether an engine sends nothing for a request before the end of its answer."""
        whole = not asked.streams and not asked.prefill_only
        return whole and (seat[0] == "decode" or seat[1] in self.setting.aggregated)

    def response_counts(self, name: RequestId, seat: Seat) -> bool:
        """Whether a response of the engine that an attempt waits for shows that it may be at work for it: it has not
        stalled, and owes the attempt a whole answer, or owes one to another, behind which this one may be queued."""
        if seat in self.stalled:
            return False
        if self.owes_whole(self.asked(name), seat):
            return True
        others = [each for each in self.open_names() if self.waits_for(each) == seat]
        return not self.legs[seat[0], name].delivered and any(
            self.owes_whole(self.asked(each), seat) for each in others
        )

    def works(self, engine: EngineId, event: EnginesChecked) -> bool:
        """Whether a check shows that an engine is at work: it has sent something, or it was stopped, and responds."""
        seat = self.seat_of(engine)
        was_stopped = seat in self.stalled and not self.stalled[seat].hung
        return engine in event.active or (engine in event.responding and was_stopped)

    def _checked(self, event: EnginesChecked) -> None:
        self.earlier_questions, self.questions = self.questions, frozenset()
        again = [seat for seat in self.stalled if self.works(self.infos[seat].engine, event)]
        trials = [seat for seat, stall in self.stalled.items() if stall.on_trial]
        for seat, stall in self.stalled.items():
            if not stall.on_trial or not self.loads(seat[0])[seat[1]]:
                self.stalled[seat] = stall._replace(checks=min(stall.checks + 1, stall.pause))
        self.was_up = {seat: self.is_up(seat) or seat in trials or seat in again for seat in self.infos}
        waits: dict[RequestId, CountedWait] = {}
        for name in self.open_names():
            seat = self.waits_for(name)
            before = self.waits.get(name, CountedWait(seat))
            if before.seat != seat:
                before = CountedWait(seat)
            engine = self.infos[seat].engine
            computes = engine in event.responding and engine not in event.idle
            works = self.works(engine, event) or (computes and self.response_counts(name, seat))
            responded = before.responded or engine in event.responding
            waits[name] = CountedWait(seat) if works else CountedWait(seat, before.silent + 1, responded)
        self.waits = waits
        queues = {name: self._queue(name) for name in self.passes.order}
        serving = {seat for seat, info in self.infos.items() if info.engine in event.active}
        self.passes.checked(queues, serving, event.quiet)

    def _sent_first(self, name: RequestId) -> None:
        """Begin the wait for the next tokens of an attempt, if it was for the first one."""
        if name in self.open_names():
            seat = self.waits_for(name)
            alone = self.asked(name).prefill_only or seat[1] in self.setting.aggregated
            if seat[0] == "decode" or alone:
                self.passes.ended(name, self._queue)
                self.wait_begins(name)
                if name in self.waits:
                    self.waits[name] = CountedWait(seat)
        key: LegKey = ("decode" if ("decode", name) in self.legs else "prefill", name)
        if key in self.legs and self.setting.rules.stall is not None:
            self.legs[key] = self.legs[key]._replace(delivered=True)

    def may_try(self, role: Role, engine: int, name: RequestId, asked: RequestArrived) -> bool:
        """Whether this attempt may be the trial of an engine that stalled: it can go elsewhere, and shows soon whether
        the engine is at work, or none that does has come for a pause, and no response is to end the stall."""
        first = name.endswith(".1") and isinstance(self.event, RequestArrived | PrefillAnswered)
        stall = self.stalled.get((role, engine))
        if stall is None or not stall.on_trial or not first or self.loads(role)[engine]:
            return False
        return (stall.hung and stall.checks >= stall.pause) or not self.owes_whole(asked, (role, engine))

    def _forget(self, seat: Seat) -> None:
        """Forget that an engine had stalled."""
        self.stalled.pop(seat, None)

    def never_stalled(self, role: Role) -> list[int]:
        """Return the engines of a role that are up and have not stalled."""
        return [engine for engine in self.up(role) if (role, engine) not in self.stalled]

    def _changed(self, event: EngineChanged | EngineLost) -> None:
        seat = self.seat_of(event.engine)
        self._forget(seat)
        if isinstance(event, EngineLost):
            self.reported_up[seat] = False
            self.known[seat] = frozenset()
            for key in [key for key, (at, _) in self.sessions.items() if (key[0], at) == seat]:
                del self.sessions[key]
        else:
            self.reported_up[seat] = event.up
            if event.became is not None:
                self._became(seat, event.became)

    def _became(self, seat: Seat, info: EngineInfo) -> None:
        """Record an engine's new incarnation, which is as much in or out as the one before."""
        before, self.infos[seat] = self.infos[seat].engine, info
        for group in ("leaving", "left"):
            if before in getattr(self, group):
                setattr(self, group, getattr(self, group) - {before} | {info.engine})

    # Effects.

    def aborted(self, effect: AbortLeg) -> None:
        key = (effect.role, effect.request_id)
        leg = self.legs.get(key)
        if leg is None or not leg.open:
            raise Violation(RouterFinding.DISPATCH, f"{effect} aborts a leg that is not open")
        if leg.engine != effect.engine:
            what = f"{effect.request_id} is at {effect.role} {leg.engine}, and is aborted at {effect.engine}"
            raise Violation(RouterFinding.ENGINE, what)
        if self.late:
            self.legs[key] = leg._replace(open=False)
        else:
            del self.legs[key]

    def resumed(self, effect: ResumeAnswer) -> None:
        request = effect.request
        if not self.setting.resumes or request not in self.streaming:
            raise Violation(RouterFinding.DISPATCH, f"{effect}, and its client has received nothing")
        if effect.request_id != f"r{request}.{self.made(request) + 1}":
            raise Violation(RouterFinding.DISPATCH, f"{effect} names no attempt that follows")
        self.streaming[request] = effect.request_id

    def over(self, request: int) -> None:
        """Record that a request is answered. Of its attempts only their numbers are kept."""
        del self.waiting[request]
        self.due.pop(request, None)
        self.streaming.pop(request, None)
        self.hedged -= {request}
        for name, begun in self.attempts.items():
            if begun.request == request:
                self.attempts[name] = Begun(request, begun.number, reports=begun.reports)

    def reported(self, effect: ReportPrefill) -> None:
        begun = self.attempts[effect.request_id]
        failed = self.failed is not None and self.failed[0] == "prefill" and self.event.request_id == effect.request_id
        if effect.engine != begun.d or effect.ok == failed:
            raise Violation(RouterFinding.REPORT, f"D {begun.d} has {effect.request_id}, and this is sent: {effect}")
        self.attempts[effect.request_id] = begun._replace(reports=begun.reports + 1)

    def gone(self, effect: EngineLeft) -> None:
        if effect.engine not in self.leaving or self.in_use(effect.engine):
            raise Violation(RouterFinding.MEMBER, f"{effect.engine} is said to have left, and is not leaving or in use")
        self.leaving, self.left = self.leaving - {effect.engine}, self.left | {effect.engine}

    def fell_silent(self, effect: EngineSilent) -> None:
        if effect.engine not in self.silent or effect.abandoned != self.setting.rules.abandons_silent:
            raise Violation(RouterFinding.MEMBER, f"{effect.engine} is called silent: {effect}")
        self.silent = self.silent - {effect.engine}

    def asks(self, effect: AskEngine) -> None:
        seat = self.seat_of(effect.engine)
        if seat not in self.stalled and not any(wait.seat == seat and wait.silent for wait in self.waits.values()):
            raise Violation(RouterFinding.MEMBER, f"{effect.engine} is asked, and is neither stalled nor silent")
        self.questions |= {effect.engine}

    def hangs(self, effect: RequestHangs) -> None:
        """Check that an attempt hangs, and record that it leaves its engine."""
        name, rule = effect.request_id, self.setting.rules.stall
        seat = self.waits_for(name) if name in self.open_names() else None
        if seat is None or self.infos[seat].engine != effect.engine or rule is None:
            raise Violation(RouterFinding.MEMBER, f"{effect}: it does not wait there")
        passed = self.passes.passed.get(name, 0)
        if passed <= rule.passed:
            raise Violation(RouterFinding.MEMBER, f"{effect}: it was passed over {passed} times")
        self.failed = seat

    def watched(self, effect: EngineWatched) -> None:
        """Check that an engine is called stalled, tried and trusted with a reason, and record it."""
        seat, event = self.seat_of(effect.engine), self.event
        role, before = seat[0], self.stalled.get(seat)
        match effect.state:
            case "stalled":
                exceeds, asked = self.exceeds(seat), not self.was_to_be_asked(seat)
                waits = [wait for wait in self.waits.values() if wait.seat == seat]
                silence = max((wait.silent for wait in waits), default=0)
                pause = min(silence if before is None else 2 * before.pause, LONGEST_PAUSE)
                self.stalled[seat] = CountedStall(pause, any(wait.responded for wait in waits))
                paused = before is not None and not before.on_trial
                if not exceeds or paused or not self.never_stalled(role) or self.most_silent(role):
                    raise Violation(RouterFinding.MEMBER, f"{effect.engine} is called stalled: {self.waits}")
                if effect.engine not in self.earlier_questions and not asked:
                    raise Violation(RouterFinding.MEMBER, f"{effect.engine} is called stalled, and was not asked")
            case "trial":
                if before is None or before.on_trial or before.checks < before.pause:
                    raise Violation(RouterFinding.MEMBER, f"{effect.engine} is tried, and is {before or 'up'}")
                self.stalled[seat] = before._replace(on_trial=True, checks=0)
                self.waits = {
                    name: CountedWait(seat) if wait.seat == seat else wait for name, wait in self.waits.items()
                }
            case "answers":
                works = isinstance(event, EnginesChecked) and self.works(effect.engine, event)
                if before is None or not (works or not self.never_stalled(role)):
                    raise Violation(RouterFinding.MEMBER, f"{effect.engine} is trusted, and has sent nothing")
                self._forget(seat)

    def most_silent(self, role: Role) -> bool:
        """Whether more than half of the engines that a role had up before this check have been silent for too long."""
        known = [engine for engine in self.engines(role) if self.was_up.get((role, engine))]
        return 2 * sum(self.exceeds((role, engine)) for engine in known) > len(known)

    def was_to_be_asked(self, seat: Seat) -> bool:
        """Whether a response would have counted for all that waits for an engine."""
        return all(self.response_counts(name, seat) for name, wait in self.waits.items() if wait.seat == seat)

    def exceeds(self, seat: Seat) -> bool:
        """Whether an attempt has waited for this engine for too long. A whole answer on trial has as long as the
        pause."""
        rule, stall = self.setting.rules.stall, self.stalled.get(seat)
        if rule is None:
            return False
        waits = {name: wait.silent for name, wait in self.waits.items() if wait.seat == seat}
        least = rule.least
        if stall is not None and stall.on_trial and any(self.owes_whole(self.asked(name), seat) for name in waits):
            least = max(least, stall.pause)
        return any(silent > least for silent in waits.values())

    def closed(self) -> Iterator[Begun]:
        """Yield the attempts without an open leg, of requests that wait."""
        open_names = self.open_names()
        for name, begun in self.attempts.items():
            if begun.request in self.waiting and name not in open_names:
                yield begun

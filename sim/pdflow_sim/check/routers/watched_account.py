"""What the router has done, counted without it: what attempts wait for, and which engines have stalled.

`RouterAccount` adds to the account of engines and legs which engines have sent nothing for too long, which are on
trial, and how often attempts were passed over (passes.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Self

from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, RequestId
from pdflow.routing.effects import AskEngine, EngineWatched, RequestHangs
from pdflow.routing.events import DecodeEnded, EnginesChecked, FirstTokenDelivered, PrefillAnswered, RequestArrived
from pdflow.routing.heartbeats import Seat
from pdflow.routing.watching import LONGEST_PAUSE
from pdflow_sim.check.routers.account import LegAccount, LegKey, Role
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.passes import PassAccount, Queue
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.search.forward import Violation


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


class RouterAccount(LegAccount):
    """The account of one router."""

    per_event = LegAccount.per_event | {"earlier_questions", "was_up", "passes"}

    def __init__(self, setting: RouterSetting) -> None:
        super().__init__(setting)
        self.stalled: dict[Seat, CountedStall] = {}
        self.questions: frozenset[EngineId] = frozenset()
        """Engines that have been asked since the last check whether they respond."""
        self.earlier_questions: frozenset[EngineId] = frozenset()
        """Engines that had been asked before this check."""
        self.waits: dict[RequestId, CountedWait] = {}
        self.passes = PassAccount()
        """It has a fingerprint of its own."""
        self.was_up: dict[Seat, bool] = {}
        """Engines that might get legs, were on trial, or were at work again, when they were checked."""

    def fork(self) -> Self:
        other = super().fork()
        other.passes = self.passes.fork()
        return other

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.passes.fingerprint()

    def is_up(self, seat: Seat) -> bool:
        return seat not in self.stalled and super().is_up(seat)

    # Events, before the router handles them.

    def before(self, event: Any, now: Instant) -> None:
        match event:
            case PrefillAnswered():
                self._got("prefill", event.request_id, event.params is not None)
            case DecodeEnded():
                self._got("decode", event.request_id, event.code is Code.NONE)
        super().before(event, now)
        match event:
            case FirstTokenDelivered() if event.request in self.waiting:
                self._sent_first(event.request_id)
            case EnginesChecked():
                self._checked(event)

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

    # Effects.

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
                if not exceeds or paused or not self.up(role) or self.most_silent(role):
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
                if before is None or not (works or not self.up(role)):
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

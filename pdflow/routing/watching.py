"""Engines that stall: a process that is stopped, a GPU that hangs, a host that swaps. Their connections stay open.

An engine that owes answers and has been silent for unusually long (`stalls`) is stalled, if others can do its work. It
gets no new legs, and attempts that wait for it fail: their requests are retried or resumed elsewhere. The last attempt
that a request may have goes on, and so does an answer that could not be resumed, because a slow engine is better than
none. If more than half of a role's engines are silent, the cause is not an engine: nothing is taken back.

A request that an engine passes over while it serves others hangs (`passes`). It is taken back in the same way, if
another engine of the role is up. The engine itself does not stall.

After a pause a stalled engine is on trial: it gets one leg at a time, until it has answered something. A trial is the
first attempt of a request, which can leave again. It owes no whole answer, which does not show soon whether the GPU
hangs, unless the engine responds and no other request has come for a pause; the answer then has as long as the pause.
The pause is as long as the silence that was too long, and doubles up to `LONGEST_PAUSE` if the engine is silent again.
If no other engine of its role is up any more, it gets legs again at once.

Engines that were silent at a check are asked whether they respond, and how many steps they have run. A process may
respond while its GPU hangs, so this counts for whole answers and what is queued behind them (`stalls`), and for an
engine that did not respond before it stalled: its process was stopped, and goes on when it responds. A heartbeat is not
used here, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, Literal

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, RequestId
from pdflow.routing import governed
from pdflow.routing.attempt import Attempt
from pdflow.routing.effects import AskEngine, EngineSilent, EngineWatched, RequestHangs, RouterEffects
from pdflow.routing.events import (
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineReported,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
    RouterEvent,
)
from pdflow.routing.failure import AfterFailure
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.heartbeats import Roll, Seat
from pdflow.routing.passes import PassCounts
from pdflow.routing.policy import Choice
from pdflow.routing.router import Dispatch, Router
from pdflow.routing.stalls import Awaited, Usual, Waiting

ROLES: Final[tuple[Literal["prefill"], Literal["decode"]]] = ("prefill", "decode")
LONGEST_PAUSE: Final = 64
"""Checks before a stalled engine is tried again, at most."""


class Stall:
    """A stalled engine: checks until it is tried, 0 if it is on trial; the length of its pause; whether it responded
    while it was silent; checks on trial without a leg, up to the length of the pause."""

    __slots__ = ("left", "pause", "responds", "untried")

    def __init__(self, pause: int, responds: bool) -> None:
        self.pause = min(pause, LONGEST_PAUSE)
        self.left = self.pause
        self.responds = responds
        self.untried = 0

    def fork(self) -> Stall:
        other = Stall(self.pause, self.responds)
        other.left, other.untried = self.left, self.untried
        return other

    def fingerprint(self) -> Hashable:
        return self.left, self.pause, self.responds, self.untried

    def may_try(self, owes_whole: bool) -> bool:
        """Whether a request may be the trial: one that shows soon whether the engine works, or any if none came and no
        response will end the stall."""
        return not self.left and (not owes_whole or (self.responds and self.untried >= self.pause))


class WatchingRouter(GovernedRouter):
    """A router that notices stalled engines, if its rules have a `StallRule`.

    Args: as GovernedRouter's.
    """

    __slots__ = ("changes", "passes", "stalled", "usual", "waits")

    def __init__(
        self,
        prefill: tuple[EngineInfo, ...],
        decode: tuple[EngineInfo, ...],
        dispatch: Dispatch,
        choices: tuple[Choice, Choice],
        rules: Rules,
        max_attempts: int = 1,
        reports_prefill: bool = False,
        aggregated: frozenset[int] = frozenset(),
        resumes: bool = False,
    ) -> None:
        super().__init__(prefill, decode, dispatch, choices, rules, max_attempts, reports_prefill, aggregated, resumes)
        self.waits: dict[RequestId, Waiting] = {}
        """The wait of each open attempt, where engines are watched."""
        self.usual = {wait: Usual() for wait in Awaited}
        self.passes = PassCounts()
        self.stalled: dict[Seat, Stall] = {}
        self.changes: list[EngineWatched] = []
        """Changes of this turn that have not been reported."""

    def _turn(self, event: RouterEvent, now: Instant) -> RouterEffects:
        effects: RouterEffects = _ON[type(event)](self, event)
        # Changes first: the legs in `effects` were sent with them known.
        return self._watched() + effects if self.stalled or self.changes else effects

    def copied_to(self, other: Router) -> None:
        super().copied_to(other)
        assert isinstance(other, WatchingRouter)
        other.waits = {request_id: waiting.fork() for request_id, waiting in self.waits.items()}
        other.usual = {wait: usual.fork() for wait, usual in self.usual.items()}
        other.passes = self.passes.fork()
        other.stalled = {seat: stall.fork() for seat, stall in self.stalled.items()}

    def fingerprint(self) -> Hashable:
        learns = self.rules.stall is not None and self.rules.stall.learns
        usual = tuple(self._usual_fingerprints()) if learns else ()
        stalled = tuple((seat, stall.fingerprint()) for seat, stall in self.stalled.items())
        return super().fingerprint(), tuple(self._wait_fingerprints()), usual, stalled

    def _usual_fingerprints(self) -> Iterator[Hashable]:
        for usual in (*self.usual.values(), *self.passes.usual.values()):
            yield usual.fingerprint()

    def _wait_fingerprints(self) -> Iterator[Hashable]:
        """Yield the state of each wait, in the order in which they began: later ones may overtake earlier ones."""
        for request_id, waiting in sorted(self.waits.items(), key=lambda item: item[1].number):
            overtaken = self.passes.overtaken(_waits_for(self.attempts[request_id]), waiting)
            yield request_id, waiting.fingerprint(), overtaken

    # Waits.

    def _open(self, attempt: Attempt) -> None:
        super()._open(attempt)
        if self.rules.stall is not None:
            whole = self._owes_whole(attempt.asked, _waits_for(attempt))
            self.waits[attempt.request_id] = self.passes.begin(Awaited.WHOLE if whole else Awaited.PROMPT)

    def _close(self, attempt: Attempt) -> RouterEffects:
        self.waits.pop(attempt.request_id, None)
        return super()._close(attempt)

    def _owes_whole(self, asked: RequestArrived, seat: Seat) -> bool:
        """Whether an engine sends nothing for a request before an answer of any length is complete."""
        return not (asked.streams or asked.prefill_only) and (seat[0] == "decode" or seat[1] in self.aggregated)

    def _is_served_alone(self, attempt: Attempt) -> bool:
        """Whether one engine computes the prompt and the answer."""
        return attempt.p < 0 or self._alone(attempt)

    def _arrived(self, event: RequestArrived) -> RouterEffects:
        """Begin a request's first attempt, which may be an engine's trial."""
        self._offer_trials("prefill", event)
        self._offer_trials("decode", event)
        return super()._arrived(event)

    def _prefill_answered(self, event: PrefillAnswered) -> RouterEffects:
        if event.params is not None:
            self._wait_ended(event.request_id)
        attempt = self.attempts.get(event.request_id)
        if attempt is not None and attempt.number == 1:
            self._offer_trials("decode", attempt.asked)
        return super()._prefill_answered(event)

    def _first_token_delivered(self, event: FirstTokenDelivered) -> RouterEffects:
        waiting = self.waits.get(event.request_id)
        if waiting is not None:
            attempt = self.attempts[event.request_id]
            if waiting.awaited is Awaited.FIRST or self._is_served_alone(attempt):
                self._wait_ended(event.request_id)
            else:
                waiting.has_token = True
        return super()._first_token_delivered(event)

    def _decode_ended(self, event: DecodeEnded) -> RouterEffects:
        if event.code is Code.NONE:
            self._wait_ended(event.request_id)
        return super()._decode_ended(event)

    def _wait_ended(self, request_id: RequestId) -> None:
        """Record that an attempt's wait has ended well, and begin the next one."""
        waiting = self.waits.get(request_id)
        if waiting is None:
            return
        attempt, awaited = self.attempts[request_id], waiting.awaited
        waiting.teach(self.usual[awaited], attempt.asked.prompt_tokens)
        self.passes.ended(_waits_for(attempt), waiting, attempt.asked.prompt_tokens)
        if not attempt.asked.streams:
            awaited = Awaited.WHOLE
        elif awaited is not Awaited.PROMPT or waiting.has_token or self._is_served_alone(attempt):
            awaited = Awaited.NEXT
        else:
            awaited = Awaited.FIRST
        self.waits[request_id] = self.passes.begin(awaited)

    # Checks.

    def _checked(self, event: EnginesChecked) -> RouterEffects:
        if self.rules.stall is None:
            raise LocalProtocolError("engines were checked, but this router does not watch them")
        active, responding = set(event.active), frozenset(event.responding)
        for seat, stall in list(self.stalled.items()):
            engine = self._info(seat).engine
            if engine in responding and not stall.responds:
                active.add(engine)
            if engine in active:
                self._trust(seat)
            elif not (stall.left or self._choice(seat).loads[seat[1]]):
                stall.untried = min(stall.untried + 1, stall.pause)
        pausing = [seat for seat, stall in self.stalled.items() if stall.left]
        at: dict[Seat, list[Attempt]] = {}
        for attempt in self.attempts.values():
            at.setdefault(_waits_for(attempt), []).append(attempt)
        silences: dict[Seat, int] = {}
        for seat, attempts in at.items():
            engine = self._info(seat).engine
            signs = engine in active, engine in responding, engine in event.idle
            silence = self._silence(attempts, *signs, self.stalled.get(seat))
            if silence:
                silences[seat] = silence
                for attempt in attempts:
                    self.waits[attempt.request_id].teaches = False
        stalled = [seat for seat in silences if self._stall(seat, silences, at[seat])]
        effects: RouterEffects = ()
        for seat in stalled:
            for attempt in at[seat]:
                effects += self._leave(seat, attempt)
        effects += self._leave_if_passed_over(at, event)
        for seat in pausing:
            self._pause(seat)
        return effects + self._asks()

    def _leave_if_passed_over(self, at: dict[Seat, list[Attempt]], event: EnginesChecked) -> RouterEffects:
        """Have attempts leave engines that pass them over too often."""
        effects: RouterEffects = ()
        quiet = frozenset(event.quiet)
        for seat, attempts in at.items():
            engine = self._info(seat).engine
            for attempt in attempts:
                if self._hangs(seat, attempt, engine in event.active, attempt.request_id in quiet):
                    left = self._leave(seat, attempt)
                    effects += (RequestHangs(engine, attempt.request_id), *left) if left else ()
        self.passes.checked()
        return effects

    def _hangs(self, seat: Seat, attempt: Attempt, active: bool, quiet: bool) -> bool:
        """Record a check for an attempt. Returns whether the engine that it waits for passes it over too often."""
        rule, waiting = self.rules.stall, self.waits.get(attempt.request_id)
        if rule is None or waiting is None:
            return False
        hangs = self.passes.too_often(rule, seat, waiting, attempt.asked.prompt_tokens, active, quiet)
        waiting.teaches = waiting.teaches and not hangs
        return hangs

    def _leave(self, seat: Seat, attempt: Attempt) -> RouterEffects:
        """Have an attempt fail that waits for this engine, if another one can serve it."""
        up, index = self._choice(seat).up, seat[1]
        others = any(each for other, each in enumerate(up) if other != index)
        # What failed another attempt may have ended this one, too.
        if not others or attempt.request_id not in self.attempts or self._is_last_resort(attempt):
            return ()
        # Whatever other engines are avoided, this one is.
        before, up[index] = up[index], False
        effects = self._failed(attempt, Code.STALLED)
        up[index] = before
        return effects

    def _asks(self) -> RouterEffects:
        """Have the engines asked whose response may matter: those that are silent and waited for, and stopped ones."""
        seats = {_waits_for(attempt) for attempt in self.attempts.values() if self.waits[attempt.request_id].silent}
        seats |= {seat for seat, stall in self.stalled.items() if not stall.responds}
        return tuple([AskEngine(self._info(seat).engine) for seat in sorted(seats)])

    def _silence(self, attempts: list[Attempt], active: bool, responds: bool, idle: bool, stall: Stall | None) -> int:
        """Record a check for attempts that wait for one engine. Returns its silence if it is too long, else 0.

        The limit is the longest of all attempts' there: an engine that computes a long prompt sends nothing to the
        others either. No response counts for an engine that has stalled: if its GPU hangs, a whole answer on trial
        would never end.
        """
        rule = self.rules.stall
        assert rule is not None
        owes_whole = any(self.waits[attempt.request_id].awaited is Awaited.WHOLE for attempt in attempts)
        pause = stall.pause if owes_whole and stall is not None else -1
        silence, longest = 0, pause
        for attempt in attempts:
            waiting = self.waits[attempt.request_id]
            waiting.checked(active, responds, owes_whole and stall is None and not idle)
            limit = waiting.limit(rule, self.usual[waiting.awaited], attempt.asked.prompt_tokens)
            if limit is not None:
                longest = max(longest, limit)
            if limit is not None or pause >= 0:
                silence = max(silence, waiting.silent)
        return silence if 0 <= longest < silence else 0

    def _stall(self, seat: Seat, silences: dict[Seat, int], attempts: list[Attempt]) -> bool:
        """Send this engine nothing for now. Returns whether others can do its work, and attempts are to leave it."""
        role, index = seat
        choice, stall = self._choice(seat), self.stalled.get(seat)
        others = [other for other in self._never_stalled(role) if other != index and choice.up[other]]
        silent = [other for other in others if (role, other) in silences]
        if not others or 2 * (1 + len(silent)) > 1 + len(others):
            return False
        pauses = stall is not None and stall.left > 0
        if not pauses and (stall is not None or choice.up[index]):
            engine = self._info(seat).engine
            responds = any(self.waits[attempt.request_id].responded for attempt in attempts)
            self.stalled[seat] = Stall(silences[seat] if stall is None else 2 * stall.pause, responds)
            choice.up[index] = False
            self.changes.append(EngineWatched(engine, "stalled"))
        return True

    def _is_last_resort(self, attempt: Attempt) -> bool:
        """Whether no other attempt may follow this one: none is left, its answer could not be continued, or the engines
        that another one needs are down."""
        return self._after_failure(attempt, Code.STALLED) is AfterFailure.FAIL or not self._reachable(attempt)

    def _reachable(self, attempt: Attempt) -> bool:
        """Whether the engines are up that another attempt needs."""
        decodes = any(self.decode_choice.up)
        if decodes and (self.rules.recomputes or (self.rules.recomputes_last and self._is_last(attempt))):
            return True
        prefills = [engine for engine, up in enumerate(self.prefill_choice.up) if up]
        alone = attempt.prefill_only or any(engine in self.aggregated for engine in prefills)
        return bool(prefills) and (decodes or alone)

    def _pause(self, seat: Seat) -> None:
        """Shorten the pause of a stalled engine by one check. Behind its last one the engine is tried."""
        stall = self.stalled[seat]
        stall.left -= 1
        if stall.left:
            return
        self.changes.append(EngineWatched(self._info(seat).engine, "trial"))
        # Attempts that could not go elsewhere wait there: the trial has its own silence.
        for attempt in self.attempts.values():
            if _waits_for(attempt) == seat:
                self.waits[attempt.request_id].silent = 0
                self.waits[attempt.request_id].responded = False

    # Engines that are stalled.

    def _watched(self) -> RouterEffects:
        """Return what has changed in this turn."""
        self._need_all()
        for seat in self.stalled:
            # It was offered for a trial, or has reported.
            self._choice(seat).up[seat[1]] = False
        changes, self.changes = tuple(self.changes), []
        return changes

    def _offer_trials(self, role: Literal["prefill", "decode"], asked: RequestArrived) -> None:
        """Let engines on trial that have no leg get one in this turn, if this request may be their trial."""
        for seat, stall in self.stalled.items():
            if seat[0] == role and stall.may_try(self._owes_whole(asked, seat)):
                self._choice(seat).up[seat[1]] = not self._choice(seat).loads[seat[1]]

    def _need_all(self) -> None:
        """Trust the stalled engines of a role again if no other one is up, and none could be on trial alone."""
        for role in ROLES:
            stalled = [seat for seat in self.stalled if seat[0] == role]
            if stalled:
                up = self._choice(stalled[0]).up
                if not any(up[index] for index in self._never_stalled(role)):
                    for seat in stalled:
                        self._trust(seat)

    def _never_stalled(self, role: Literal["prefill", "decode"]) -> list[int]:
        engines = self.prefill if role == "prefill" else self.decode
        return [index for index in range(len(engines)) if (role, index) not in self.stalled]

    def _trust(self, seat: Seat) -> None:
        del self.stalled[seat]
        self._choice(seat).up[seat[1]] = True
        self.changes.append(EngineWatched(self._info(seat).engine, "answers"))

    def _forget(self, engine: EngineId) -> None:
        """Forget that an engine was stalled: something else decides now whether it gets legs."""
        for seat in [seat for seat in self.stalled if self._info(seat).engine == engine]:
            del self.stalled[seat]

    def _choice(self, seat: Seat) -> Choice:
        return self.prefill_choice if seat[0] == "prefill" else self.decode_choice

    def _engine_changed(self, event: EngineChanged) -> RouterEffects:
        if self.roll is None:
            self._forget(event.engine)
        effects = super()._engine_changed(event)
        self._need_all()
        return effects

    def _leaves(self, event: EngineLeaves) -> RouterEffects:
        self._forget(event.engine)
        effects = super()._leaves(event)
        self._need_all()
        return effects

    def _joins(self, event: EngineJoins) -> RouterEffects:
        self._forget(event.engine)
        return super()._joins(event)

    def _reported(self, event: EngineReported) -> RouterEffects:
        """Record an engine's report. It ends no stall, unless it is that of a new incarnation."""
        seat: Seat = (event.role, event.engine)
        if self._info(seat).engine != event.info.engine:
            self._forget(self._info(seat).engine)
        return super()._reported(event)

    def _fallen_silent(self, roll: Roll, now: Instant) -> tuple[EngineSilent, ...]:
        silent = super()._fallen_silent(roll, now)
        for effect in silent:
            self._forget(effect.engine)
        if silent:
            self._need_all()
        return silent


def _waits_for(attempt: Attempt) -> Seat:
    """Return the engine that an attempt waits for."""
    return ("prefill", attempt.p) if attempt.p_open else ("decode", attempt.d)


_ON: dict[type, Callable[[Any, Any], RouterEffects]] = {
    **governed._ON,
    DecodeEnded: WatchingRouter._decode_ended,
    EngineChanged: WatchingRouter._engine_changed,
    EngineJoins: WatchingRouter._joins,
    EngineLeaves: WatchingRouter._leaves,
    EngineReported: WatchingRouter._reported,
    EnginesChecked: WatchingRouter._checked,
    FirstTokenDelivered: WatchingRouter._first_token_delivered,
    PrefillAnswered: WatchingRouter._prefill_answered,
    RequestArrived: WatchingRouter._arrived,
}

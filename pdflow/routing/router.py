"""The router's endpoint: two legs per attempt, dispatched in turn or at once, retried as a new attempt, answered once.

An attempt is a pair of legs with ids of its own: a retry never reuses a request id or an xid, so that nothing of a
former attempt can be matched by a later one (spec 7.5, R12). Sequential dispatch sends the decode leg when the
prefill leg's answer has come; concurrent dispatch sends both, which push needs in order to overlap (spec 6.3).

It decides nothing about KV: the coordinates that a leg returns (`KvParams`) are passed on. What follows a failed
attempt is decided in `failure`. Admission limits, prompts that D computes itself, and engines that leave are in
`governed`, second attempts beside the first in `hedging`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, TypeAlias

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Instant, RequestId
from pdflow.routing.attempt import Attempt
from pdflow.routing.effects import (
    AbortLeg,
    DispatchDecode,
    DispatchPrefill,
    Reply,
    ReportPrefill,
    ResumeAnswer,
    RouterEffects,
)
from pdflow.routing.events import (
    AnswerEnded,
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
    RouterEvent,
)
from pdflow.routing.failure import AfterFailure, after_failure
from pdflow.routing.policy import Choice, Policy

Dispatch: TypeAlias = Literal["sequential", "concurrent"]


class Router:
    """The endpoint of a router.

    Args:
    prefill, decode: the engines of each role, by position; among those of `prefill` are those that also decode.
    aggregated: the positions of these, which serve a request alone.
    reports_prefill: D gets a report of the prefill leg's end, behind the decode leg (dialects without control frames).
    max_attempts: of one request, the first included.
    choices: of the prefill and of the decode engine, where `policy` does not name all of them.
    resumes: an answer that has started continues by another attempt when its attempt fails.
    """

    timed = False
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = (
        "aggregated",
        "attempts",
        "by_request",
        "decode",
        "decode_choice",
        "dispatch",
        "max_attempts",
        "prefill",
        "prefill_choice",
        "reports_prefill",
        "resumes",
    )

    def __init__(
        self,
        prefill: tuple[EngineInfo, ...],
        decode: tuple[EngineInfo, ...],
        policy: Policy,
        dispatch: Dispatch,
        max_attempts: int = 1,
        reports_prefill: bool = False,
        aggregated: frozenset[int] = frozenset(),
        choices: tuple[Choice, Choice] | None = None,
        resumes: bool = False,
    ) -> None:
        self.prefill = list(prefill)
        self.aggregated = aggregated
        self.decode = list(decode)
        self.prefill_choice, self.decode_choice = choices or (Choice(policy, len(prefill)), Choice(policy, len(decode)))
        self.dispatch = dispatch
        self.max_attempts = max_attempts
        self.reports_prefill = reports_prefill
        self.resumes = resumes
        self.attempts: dict[RequestId, Attempt] = {}
        self.by_request: dict[int, Attempt] = {}

    def handle(self, event: RouterEvent, now: Instant) -> RouterEffects:
        effects: RouterEffects = _ON[type(event)](self, event)
        return effects

    def wake_at(self) -> Instant | None:
        return None

    def unfinished(self) -> Mapping[int, Attempt]:
        """Every open request. To be read only."""
        return self.by_request

    def armed(self) -> tuple[Timer, ...]:
        return ()

    def fork(self) -> Router:
        """Return an independent copy."""
        policy, choices = self.prefill_choice.policy, (self.prefill_choice.fork(), self.decode_choice.fork())
        other = Router(
            (),
            (),
            policy,
            self.dispatch,
            self.max_attempts,
            self.reports_prefill,
            self.aggregated,
            choices,
            self.resumes,
        )
        self.copied_to(other)
        return other

    def copied_to(self, other: Router) -> None:
        """Copy the state of engines and attempts to `other`."""
        other.prefill, other.decode = self.prefill.copy(), self.decode.copy()
        other.attempts = {request_id: attempt.fork() for request_id, attempt in self.attempts.items()}
        other.by_request = {request: other.attempts[attempt.request_id] for request, attempt in self.by_request.items()}

    def fingerprint(self) -> Hashable:
        """The hashable state, attempts in the order in which they began: in that order they fail when an engine is
        lost."""
        return (
            tuple(attempt.fingerprint() for attempt in self.attempts.values()),
            self.prefill_choice.fingerprint(),
            self.decode_choice.fingerprint(),
            *self.prefill,
            *self.decode,
        )

    def _arrived(self, event: RequestArrived) -> RouterEffects:
        if event.request in self.by_request:
            raise LocalProtocolError(f"request {event.request} has already arrived")
        return self._begin(event, 1, None)

    def _begin(self, asked: RequestArrived, number: int, before: Attempt | None) -> RouterEffects:
        """Begin an attempt, at other engines than those of the attempt before."""
        p = self.prefill_choice.choose(asked, before.p if before is not None else None)
        if p is None:
            return (Reply(asked.request, "failed", Code.UNREACHABLE, number - 1),)
        avoid_d = None if before is None or before.d < 0 else before.d
        attempt = Attempt(asked.request, number, p, asked, avoid_d)
        alone = self._alone(attempt)
        concurrent = self.dispatch == "concurrent" and not alone
        if concurrent and not any(self.decode_choice.up):
            # P would compute in vain.
            self.prefill_choice.ended(asked, p)
            return (Reply(asked.request, "failed", Code.UNREACHABLE, number - 1),)
        self._open(attempt)
        first = DispatchPrefill(p, asked.request, attempt.request_id, attempt.xid, not alone)
        if not concurrent:
            return (first,)
        # Only P's coordinates are known yet; that is all that push needs.
        second = self._send_decode(attempt, KvParams(self.prefill[p], attempt.xid, attempt.request_id, 0))
        assert second is not None, "a decode engine is up"
        return (first, second)

    def _open(self, attempt: Attempt) -> None:
        self.attempts[attempt.request_id] = attempt
        self.by_request[attempt.request] = attempt

    def _alone(self, attempt: Attempt) -> bool:
        """Whether no decode leg follows: P's token is all that is wanted, or its engine decodes too."""
        return attempt.prefill_only or attempt.p in self.aggregated

    def _send_decode(self, attempt: Attempt, params: KvParams) -> DispatchDecode | None:
        d = self.decode_choice.choose(attempt.asked, attempt.avoid_d)
        if d is None:
            return None
        attempt.d = d
        attempt.d_open = True
        return DispatchDecode(d, attempt.request, attempt.request_id, params)

    def _prefill_answered(self, event: PrefillAnswered) -> RouterEffects:
        attempt = self.attempts.get(event.request_id)
        if attempt is None or not attempt.p_open:
            return ()
        attempt.p_open = False
        self.prefill_choice.ended(attempt.asked, attempt.p)
        if event.params is None:
            effects: RouterEffects = ()
            if attempt.d_open and self.reports_prefill:
                effects = (ReportPrefill(attempt.d, attempt.request_id, False),)
            return effects + self._failed(attempt, event.code)
        if event.ends or self._alone(attempt):
            return self._over(attempt, "completed", Code.NONE)
        if attempt.d_open:
            return (ReportPrefill(attempt.d, attempt.request_id, True),) if self.reports_prefill else ()
        decode = self._send_decode(attempt, event.params)
        if decode is None:
            return self._over(attempt, "failed", Code.UNREACHABLE)
        return (decode, ReportPrefill(attempt.d, attempt.request_id, True)) if self.reports_prefill else (decode,)

    def _decode_ended(self, event: DecodeEnded) -> RouterEffects:
        attempt = self.attempts.get(event.request_id)
        if attempt is None or not attempt.d_open:
            return ()
        attempt.d_open = False
        self.decode_choice.ended(attempt.asked, attempt.d)
        if event.code is Code.NONE:
            return self._over(attempt, "completed", Code.NONE)
        return self._failed(attempt, event.code)

    def _failed(self, attempt: Attempt, code: Code) -> RouterEffects:
        """Handle a failed leg: abort the other leg, and fail, retry or resume the request."""
        match self._after_failure(attempt, code):
            case AfterFailure.FAIL:
                return self._over(attempt, "failed", code)
            case AfterFailure.RETRY:
                return self._retry(attempt)
            case AfterFailure.RESUME:
                return self._resume(attempt)

    def _after_failure(self, attempt: Attempt, code: Code) -> AfterFailure:
        made, allowed = self._counted(attempt)
        return after_failure(code, attempt.started, made, allowed, self.resumes and attempt.asked.resumable)

    def _counted(self, attempt: Attempt) -> tuple[int, int]:
        """Return how many attempts of this attempt's request have been made, and how many are allowed."""
        return attempt.number, self.max_attempts

    def _retry(self, attempt: Attempt) -> RouterEffects:
        """Begin another attempt, at other engines if there are any."""
        aborts = self._close(attempt)
        return aborts + self._begin(attempt.asked, self._next_number(attempt), attempt)

    def _resume(self, attempt: Attempt) -> RouterEffects:
        """Begin an attempt that continues behind what the client has received: with a prompt that ends with it, at the
        engines that a retry would have."""
        effects = self._retry(attempt)
        next_attempt = self.by_request.get(attempt.request)
        if next_attempt is None:
            return effects
        next_attempt.started = True
        return (ResumeAnswer(attempt.request, next_attempt.request_id), *effects)

    def _next_number(self, attempt: Attempt) -> int:
        return attempt.number + 1

    def _first_token_delivered(self, event: FirstTokenDelivered) -> RouterEffects:
        attempt = self.attempts.get(event.request_id)
        if attempt is None:
            return self._late_first_token(event.request)
        attempt.started = True
        return ()

    def _late_first_token(self, request: int) -> RouterEffects:
        """Handle a token that the client has received of an attempt that was aborted since. The attempts under way
        would send it a second start of the answer, so they fail: the answer is resumed, or the request fails."""
        effects: RouterEffects = ()
        for attempt in [attempt for attempt in self.attempts.values() if attempt.request == request]:
            if not attempt.started:
                attempt.started = True
                effects += self._failed(attempt, Code.IO)
        return effects

    def _answer_ended(self, event: AnswerEnded) -> RouterEffects:
        attempt = self.by_request.get(event.request)
        if attempt is None:
            return ()
        return self._over(attempt, "completed" if event.code is Code.NONE else "failed", event.code)

    def _client_gone(self, event: ClientGone) -> RouterEffects:
        attempt = self.by_request.get(event.request)
        return () if attempt is None else self._over(attempt, "cancelled", Code.CANCELLED)

    def _over(
        self, attempt: Attempt, outcome: Literal["completed", "failed", "cancelled"], code: Code
    ) -> RouterEffects:
        return (*self._close(attempt), Reply(attempt.request, outcome, code, attempt.number))

    def _close(self, attempt: Attempt) -> RouterEffects:
        """Forget an attempt and abort its open legs."""
        del self.attempts[attempt.request_id]
        del self.by_request[attempt.request]
        effects: RouterEffects = ()
        reports: RouterEffects = ()
        if attempt.p_open:
            attempt.p_open = False
            self.prefill_choice.ended(attempt.asked, attempt.p)
            effects += (AbortLeg("prefill", attempt.p, attempt.request_id),)
            if attempt.d >= 0 and self.reports_prefill:
                # Perhaps the abort comes too late, and P writes after all: its lease runs from now on at the latest.
                reports = (ReportPrefill(attempt.d, attempt.request_id, True),)
        if attempt.d_open:
            attempt.d_open = False
            self.decode_choice.ended(attempt.asked, attempt.d)
            effects += (AbortLeg("decode", attempt.d, attempt.request_id),)
        return effects + reports

    def _engine_changed(self, event: EngineChanged) -> RouterEffects:
        for engines, choice in ((self.prefill, self.prefill_choice), (self.decode, self.decode_choice)):
            for index, info in enumerate(engines):
                if info.engine == event.engine:
                    choice.up[index] = event.up
                    engines[index] = event.became or info
        return ()

    def _engine_lost(self, event: EngineLost) -> RouterEffects:
        """Give a lost engine no more legs, then fail every attempt with a leg there.

        The state of that leg is unknown: it may have ended well, its answer lost with the connection, or have
        reached the engine that has started in the place of the dead one. So it is aborted like any other, and D gets no
        report that P never writes.
        """
        self._engine_changed(EngineChanged(event.engine, False))
        for engines, choice in ((self.prefill, self.prefill_choice), (self.decode, self.decode_choice)):
            for index, info in enumerate(engines):
                if info.engine == event.engine:
                    choice.forget(index)
        effects: RouterEffects = ()
        for attempt in list(self.attempts.values()):
            prefill_lost = attempt.p_open and self.prefill[attempt.p].engine == event.engine
            if prefill_lost or (attempt.d_open and self.decode[attempt.d].engine == event.engine):
                effects += self._failed(attempt, Code.PEER_DEAD)
        return effects


_ON: dict[type, Callable[[Any, Any], RouterEffects]] = {
    RequestArrived: Router._arrived,
    PrefillAnswered: Router._prefill_answered,
    DecodeEnded: Router._decode_ended,
    ClientGone: Router._client_gone,
    EngineChanged: Router._engine_changed,
    EngineLost: Router._engine_lost,
    FirstTokenDelivered: Router._first_token_delivered,
    AnswerEnded: Router._answer_ended,
}

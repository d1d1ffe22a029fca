"""A router with rules beside its policies: admission limits, prompts that D computes itself, engines that come and go.

A prompt is D's alone if the rule for it says so, or, where failures are answered by recomputing, from the second
attempt on and while no prefill engine is up. Such an attempt has one leg, at D.

Where engines report by heartbeats, these alone decide which are up: a broken connection ends the legs that it carried,
and the engine gets others until its silence is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, Value
from pdflow.routing import router
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.attempt import Attempt
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import DispatchAlone, EngineLeft, EngineSilent, Reply, RouterEffects
from pdflow.routing.events import EngineChanged, EngineJoins, EngineLeaves, EngineReported, RequestArrived, RouterEvent
from pdflow.routing.heartbeats import Roll, Seat
from pdflow.routing.membership import Membership
from pdflow.routing.policy import Choice
from pdflow.routing.router import Dispatch, Router
from pdflow.routing.stalls import StallRule


class Rules(Value, frozen=True, gc=False):
    """The rules of a `GovernedRouter`; by default there are none."""

    admission: AdmissionLimits = AdmissionLimits()
    disaggregation: Disaggregation | None = None
    """Which prompts D computes itself; if None, every prompt goes to P."""
    recomputes: bool = False
    """Whether D computes the prompt itself after a failure."""
    recomputes_last: bool = False
    """Whether D computes the prompt itself in the last attempt that is allowed: what P needs for the others may be
    missing, as a store that is down."""
    silence_ns: int | None = None
    """For how long, in ns, an engine counts as up after its last report. If None, engines do not report, and
    `EngineChanged` decides."""
    abandons_silent: bool = False
    """Whether the legs at an engine that falls silent fail; otherwise they go on."""
    stall: StallRule | None = None
    """When an engine that owes answers and gives none counts as stalled; if None, never (`watching`)."""


class GovernedRouter(Router):
    """A router that applies `Rules`.

    Args: as Router's, and `rules`.
    """

    __slots__ = ("membership", "roll", "rules")

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
        policy = choices[0].policy
        super().__init__(prefill, decode, policy, dispatch, max_attempts, reports_prefill, aggregated, choices, resumes)
        self.rules = rules
        self.membership = Membership(len(prefill))
        self.roll = None if rules.silence_ns is None else Roll(rules.silence_ns)
        if self.roll is not None:
            # Nobody has reported yet.
            for choice in choices:
                choice.up = [False] * len(choice.up)

    def handle(self, event: RouterEvent, now: Instant) -> RouterEffects:
        silent = None if self.roll is None else self._fallen_silent(self.roll, now)
        effects = self._turn(event, now)
        if silent:
            effects = silent + effects
        return effects + self._gone() if self.membership.leaving else effects

    def _turn(self, event: RouterEvent, now: Instant) -> RouterEffects:
        """Handle one event, when silent engines are known."""
        effects: RouterEffects = _ON[type(event)](self, event)
        return effects

    def fork(self) -> Router:
        choices = self.prefill_choice.fork(), self.decode_choice.fork()
        other = type(self)(
            (),
            (),
            self.dispatch,
            choices,
            self.rules,
            max_attempts=self.max_attempts,
            reports_prefill=self.reports_prefill,
            aggregated=self.aggregated,
            resumes=self.resumes,
        )
        self.copied_to(other)
        return other

    def copied_to(self, other: Router) -> None:
        super().copied_to(other)
        assert isinstance(other, GovernedRouter)
        other.membership = self.membership.fork()
        if self.roll is not None:
            other.roll = self.roll.fork()
            for mine, its in ((self.prefill_choice, other.prefill_choice), (self.decode_choice, other.decode_choice)):
                its.up = mine.up.copy()

    def fingerprint(self) -> Hashable:
        roll = None if self.roll is None else self.roll.fingerprint()
        return super().fingerprint(), self.membership.fingerprint(), self.prefill_choice.open_tokens, roll

    def _arrived(self, event: RequestArrived) -> RouterEffects:
        if event.request not in self.by_request:
            why = self._refusal(event)
            if why:
                return (Reply(event.request, "failed", Code.REJECTED, 0, why),)
        return super()._arrived(event)

    def _refusal(self, asked: RequestArrived) -> str:
        """Return why a request is rejected, or "". A prompt that D computes itself does not count for P's queue."""
        rule, choice = self.rules.admission, self.prefill_choice
        bounds_queue = rule.max_queue_tokens is not None and not self._keeps(asked, None)
        queue_tokens = choice.open_tokens if bounds_queue else 0
        return rule.refusal(asked.prompt_tokens, len(self.by_request), queue_tokens, sum(choice.up))

    # Prompts of D's own.

    def _begin(self, asked: RequestArrived, number: int, before: Attempt | None) -> RouterEffects:
        avoid = None if before is None else before.d
        if self._keeps(asked, avoid) or (self.rules.recomputes and self.decode and not any(self.prefill_choice.up)):
            return self._begin_alone(asked, number, avoid)
        return super()._begin(asked, number, before)

    def _keeps(self, asked: RequestArrived, avoid: int | None) -> bool:
        """Whether the decode engine that would be chosen computes this prompt itself."""
        rule = self.rules.disaggregation
        d = None if rule is None else self.decode_choice.pick(asked, avoid)
        if rule is None or d is None:
            return False
        return rule.keeps(asked.prompt_tokens - self.decode_choice.found(asked, d), d, self.decode_choice.loads[d])

    def _begin_alone(self, asked: RequestArrived, number: int, avoid: int | None) -> RouterEffects:
        d = self.decode_choice.choose(asked, avoid)
        if d is None:
            return (Reply(asked.request, "failed", Code.UNREACHABLE, number - 1),)
        attempt = Attempt(asked.request, number, -1, asked, None)
        attempt.p_open, attempt.d, attempt.d_open = False, d, True
        self._open(attempt)
        return (DispatchAlone(d, asked.request, attempt.request_id),)

    def _retry(self, attempt: Attempt) -> RouterEffects:
        last = self.rules.recomputes_last and self._is_last(attempt)
        if not (self.rules.recomputes or last) or not self.decode:
            return super()._retry(attempt)
        blamed = None if attempt.d_open else attempt.d
        aborts = self._close(attempt)
        return aborts + self._begin_alone(attempt.asked, self._next_number(attempt), blamed)

    def _is_last(self, attempt: Attempt) -> bool:
        """Whether the attempt after this one is the last that is allowed."""
        made, allowed = self._counted(attempt)
        return made + 1 >= allowed

    # Engines that leave.

    def _open(self, attempt: Attempt) -> None:
        super()._open(attempt)
        if attempt.p >= 0:
            self.membership.users[attempt.p] += 1

    def _close(self, attempt: Attempt) -> RouterEffects:
        if attempt.p >= 0:
            self.membership.users[attempt.p] -= 1
        return super()._close(attempt)

    def _leaves(self, event: EngineLeaves) -> RouterEffects:
        self.membership.leaves(event.engine)
        return super()._engine_changed(EngineChanged(event.engine, False))

    def _joins(self, event: EngineJoins) -> RouterEffects:
        self.membership.joins(event.engine)
        return super()._engine_changed(EngineChanged(event.engine, self._reports(event.engine)))

    def _engine_changed(self, event: EngineChanged) -> RouterEffects:
        """Mark an engine up or down. One that is leaving gets no legs, even if it is up. Where engines report, this
        event has no effect."""
        if self.roll is not None:
            return ()
        up = event.up and not self.membership.is_out(event.engine)
        if event.became is not None:
            self.membership.renamed(event.engine, event.became.engine)
        return super()._engine_changed(EngineChanged(event.engine, up, event.became))

    def _gone(self) -> RouterEffects:
        gone = self.membership.gone(self.prefill, self.decode, self.decode_choice.loads)
        return tuple([EngineLeft(engine) for engine in gone])

    # Engines that report.

    def _reported(self, event: EngineReported) -> RouterEffects:
        """Record an engine's report. A new incarnation of an engine that is leaving, or has left, gets no legs
        either."""
        if self.roll is None:
            raise LocalProtocolError(f"{event.info.engine} reported, but this router is configured without heartbeats")
        self.roll.reported((event.role, event.engine))
        prefills = event.role == "prefill"
        engines, choice = (self.prefill, self.prefill_choice) if prefills else (self.decode, self.decode_choice)
        before, engines[event.engine] = engines[event.engine], event.info
        if before.engine != event.info.engine:
            self.membership.renamed(before.engine, event.info.engine)
        choice.up[event.engine] = not self.membership.is_out(event.info.engine)
        return ()

    def _reports(self, engine: EngineId) -> bool:
        """Whether an engine has reported lately; True where engines do not report."""
        if self.roll is None:
            return True
        return any(self._info(seat).engine == engine for seat in self.roll.members)

    def _fallen_silent(self, roll: Roll, now: Instant) -> tuple[EngineSilent, ...]:
        gone = roll.pass_to(now)
        for role, index in gone:
            choice = self.prefill_choice if role == "prefill" else self.decode_choice
            choice.up[index] = False
        return tuple([EngineSilent(self._info(seat).engine, self.rules.abandons_silent) for seat in gone])

    def _info(self, seat: Seat) -> EngineInfo:
        role, index = seat
        return self.prefill[index] if role == "prefill" else self.decode[index]


_ON: dict[type, Callable[[Any, Any], RouterEffects]] = {
    **router._ON,
    RequestArrived: GovernedRouter._arrived,
    EngineChanged: GovernedRouter._engine_changed,
    EngineLeaves: GovernedRouter._leaves,
    EngineJoins: GovernedRouter._joins,
    EngineReported: GovernedRouter._reported,
}

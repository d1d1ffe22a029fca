"""A router with rules beside its policies: whom it does not serve, which prompts D computes itself, who is leaving.

A prompt is D's alone if the rule for it says so, or, where failures are answered by recomputing, from the second
attempt on and while no prefill engine is up. Such an attempt has one leg, at D.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, Value
from pdflow.routing import router
from pdflow.routing.admission import Admission
from pdflow.routing.attempt import Attempt
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.membership import Membership
from pdflow.routing.policy import Choice
from pdflow.routing.router import (
    Dispatch,
    DispatchAlone,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLeft,
    Reply,
    RequestArrived,
    Router,
    RouterEffects,
    RouterEvent,
)


class Rules(Value, frozen=True, gc=False):
    """All of them; by default there is none."""

    admission: Admission = Admission()
    disaggregation: Disaggregation | None = None
    """Every prompt goes to P if absent."""
    recomputes: bool = False
    """After a failure D computes the prompt itself."""


class GovernedRouter(Router):
    """Args: as Router's, and `rules`."""

    __slots__ = ("membership", "rules")

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
    ) -> None:
        policy = choices[0].policy
        super().__init__(prefill, decode, policy, dispatch, max_attempts, reports_prefill, aggregated, choices)
        self.rules = rules
        self.membership = Membership(len(prefill))

    def handle(self, event: RouterEvent, now: Instant) -> RouterEffects:
        effects: RouterEffects = _ON[type(event)](self, event)
        return effects + self._gone() if self.membership.leaving else effects

    def fork(self) -> Router:
        choices = self.prefill_choice.fork(), self.decode_choice.fork()
        also = self.max_attempts, self.reports_prefill, self.aggregated
        other = GovernedRouter((), (), self.dispatch, choices, self.rules, *also)
        self.copied_to(other)
        other.membership = self.membership.fork()
        return other

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.membership.fingerprint(), self.prefill_choice.open_tokens

    def _arrived(self, event: RequestArrived) -> RouterEffects:
        if event.request not in self.by_request:
            why = self._refusal(event)
            if why:
                return (Reply(event.request, "failed", Code.REJECTED, 0, why),)
        return super()._arrived(event)

    def _refusal(self, asked: RequestArrived) -> str:
        """A prompt that stays with D is in no queue of P's."""
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
        """Whether the decode engine whose turn it is computes this prompt."""
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

    def _failed(self, attempt: Attempt, code: Code) -> RouterEffects:
        if not self.rules.recomputes or not self.decode or not self._may_retry(attempt):
            return super()._failed(attempt, code)
        blamed = None if attempt.d_open else attempt.d
        aborts = self._close(attempt)
        return aborts + self._begin_alone(attempt.asked, self._next_number(attempt), blamed)

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
        return super()._engine_changed(EngineChanged(event.engine, True))

    def _engine_changed(self, event: EngineChanged) -> RouterEffects:
        """One that is to go stays out, however healthy it is."""
        up = event.up and not self.membership.is_out(event.engine)
        if event.became is not None:
            self.membership.renamed(event.engine, event.became.engine)
        return super()._engine_changed(EngineChanged(event.engine, up, event.became))

    def _gone(self) -> RouterEffects:
        gone = self.membership.gone(self.prefill, self.decode, self.decode_choice.loads)
        return tuple([EngineLeft(engine) for engine in gone])


_ON: dict[type, Callable[[Any, Any], RouterEffects]] = {
    **router._ON,
    RequestArrived: GovernedRouter._arrived,
    EngineChanged: GovernedRouter._engine_changed,
    EngineLeaves: GovernedRouter._leaves,
    EngineJoins: GovernedRouter._joins,
}

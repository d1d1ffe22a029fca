"""Hedging: a second attempt at another engine, beside a first one that has been without a token for long.

Both have ids and destination blocks of their own, so that nothing of one can be taken for the other's. The first
whose answer reaches the client is the answer, and the other is aborted then. A request is hedged once. If one of the
two fails before, the other goes on alone; only the failure of the last one is answered, or tried again if attempts are
left: the hedge is none of those.

`HedgingRouter` is the only router endpoint with deadlines. `FirstTokenDelivered` reports that a request has its first
token, before the deadline is checked: a long answer is no late one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Any, Literal

from pdflow.protocol.events import TimeReached
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant
from pdflow.routing import watching
from pdflow.routing.attempt import Attempt
from pdflow.routing.effects import Reply, RouterEffects
from pdflow.routing.events import FirstTokenDelivered, RequestArrived, RouterEvent
from pdflow.routing.governed import Rules
from pdflow.routing.policy import Choice
from pdflow.routing.router import Dispatch, Router
from pdflow.routing.watching import WatchingRouter


class HedgeDeadlines:
    """The hedging deadlines of open requests, the earliest first. The delay after a request's arrival is the same for
    all."""

    __slots__ = ("due", "heap", "pushed")

    def __init__(self) -> None:
        self.due: dict[int, Instant] = {}
        self.heap: list[tuple[Instant, int, int]] = []
        self.pushed = 0

    def fork(self) -> HedgeDeadlines:
        other = HedgeDeadlines()
        other.due, other.heap, other.pushed = self.due.copy(), self.heap.copy(), self.pushed
        return other

    def push(self, request: int, at: Instant) -> None:
        self.pushed += 1
        self.due[request] = at
        heappush(self.heap, (at, self.pushed, request))

    def late(self, now: Instant) -> list[int]:
        """Return the requests whose deadline has passed, and keep them."""
        found = []
        for request, at in self.due.items():
            if at > now:
                break
            found.append(request)
        return found

    def passed(self, now: Instant) -> list[int]:
        """Remove and return the requests whose deadline has passed: they are to be hedged now."""
        found = []
        while self.heap and self.heap[0][0] <= now:
            request = heappop(self.heap)[2]
            if self.due.pop(request, None) is not None:
                found.append(request)
        return found

    def tidy(self) -> None:
        """Drop entries of requests that are over from the heap's head, so that no wake-up is spent on them."""
        while self.heap and self.heap[0][2] not in self.due:
            heappop(self.heap)


class HedgingRouter(WatchingRouter):
    """A router that hedges late requests.

    Args: as WatchingRouter's, and `hedge_after_ns`, from a request's arrival on.
    """

    timed = True

    __slots__ = ("deadlines", "hedge_after_ns", "last", "pairs")

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
        *,
        hedge_after_ns: int,
    ) -> None:
        super().__init__(prefill, decode, dispatch, choices, rules, max_attempts, reports_prefill, aggregated, resumes)
        self.hedge_after_ns = hedge_after_ns
        self.deadlines = HedgeDeadlines()
        self.pairs: dict[int, list[Attempt]] = {}
        """The two attempts of each hedged request, the older one first, while both are under way."""
        self.last: dict[int, int] = {}
        """The number of the latest attempt of each open request that has been hedged."""

    def _turn(self, event: RouterEvent, now: Instant) -> RouterEffects:
        if type(event) is TimeReached:
            effects = self._hedge_all(now)
        else:
            effects = _ON[type(event)](self, event)
            if type(event) is RequestArrived and event.request in self.by_request:
                self.deadlines.push(event.request, now + self.hedge_after_ns)
        for effect in effects:
            if type(effect) is Reply:
                self.deadlines.due.pop(effect.request, None)
                self.last.pop(effect.request, None)
        self.deadlines.tidy()
        return self._watched() + effects if self.stalled or self.changes else effects

    def wake_at(self) -> Instant | None:
        return self.deadlines.heap[0][0] if self.deadlines.heap else None

    def fork(self) -> Router:
        choices = self.prefill_choice.fork(), self.decode_choice.fork()
        other = HedgingRouter(
            (),
            (),
            self.dispatch,
            choices,
            self.rules,
            max_attempts=self.max_attempts,
            reports_prefill=self.reports_prefill,
            aggregated=self.aggregated,
            resumes=self.resumes,
            hedge_after_ns=self.hedge_after_ns,
        )
        self.copied_to(other)
        other.deadlines = self.deadlines.fork()
        other.pairs = {
            request: [other.attempts[attempt.request_id] for attempt in pair] for request, pair in self.pairs.items()
        }
        other.last = self.last.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state: deadlines in order, without their instants, which the checker chooses."""
        pairs = tuple(tuple(attempt.request_id for attempt in pair) for pair in self.pairs.values())
        return super().fingerprint(), pairs, tuple(self.deadlines.due), tuple(sorted(self.last.items()))

    def _hedge_all(self, now: Instant) -> RouterEffects:
        effects: RouterEffects = ()
        for request in self.deadlines.passed(now):
            effects += self._hedge(self.by_request[request])
        return effects

    def _hedge(self, first: Attempt) -> RouterEffects:
        """Begin a second attempt beside the first, if there is an engine that the first does not wait for: another at
        the same one would be late too."""
        choice, waits_for = (self.prefill_choice, first.p) if first.p >= 0 else (self.decode_choice, first.d)
        if not any(up and engine != waits_for for engine, up in enumerate(choice.up)):
            return ()
        self.last[first.request] = first.number
        # Where there is no engine for it after all, the first attempt goes on alone.
        begun = [e for e in self._begin(first.asked, self._next_number(first), first) if not isinstance(e, Reply)]
        if not begun:
            del self.last[first.request]
        return tuple(begun)

    def _open(self, attempt: Attempt) -> None:
        other = self.by_request.get(attempt.request)
        super()._open(attempt)
        if other is not None:
            self.pairs[attempt.request] = [other, attempt]

    def _first_token_delivered(self, event: FirstTokenDelivered) -> RouterEffects:
        effects = super()._first_token_delivered(event)
        self.deadlines.due.pop(event.request, None)
        pair = self.pairs.get(event.request)
        return effects if pair is None else self._close(pair[0] if pair[1].started else pair[1])

    def _over(
        self, attempt: Attempt, outcome: Literal["completed", "failed", "cancelled"], code: Code
    ) -> RouterEffects:
        request = attempt.request
        pair = self.pairs.get(request)
        if pair is not None and outcome == "failed":
            return self._close(attempt)
        loser: RouterEffects = ()
        if pair is not None:
            loser = self._close(pair[0] if pair[1] is attempt else pair[1])
        made = self.last.get(request, attempt.number)
        return (*loser, *self._close(attempt), Reply(request, outcome, code, made))

    def _failed(self, attempt: Attempt, code: Code) -> RouterEffects:
        return self._close(attempt) if attempt.request in self.pairs else super()._failed(attempt, code)

    def _is_last_resort(self, attempt: Attempt) -> bool:
        return attempt.request not in self.pairs and super()._is_last_resort(attempt)

    def _close(self, attempt: Attempt) -> RouterEffects:
        """Forget an attempt, and make the other one of its pair the request's only attempt."""
        effects = super()._close(attempt)
        pair = self.pairs.pop(attempt.request, None)
        if pair is not None:
            self.by_request[attempt.request] = pair[0] if pair[1] is attempt else pair[1]
        return effects

    def _counted(self, attempt: Attempt) -> tuple[int, int]:
        """Return how many attempts of a request have been made, and how many are allowed: its hedge is one more."""
        made = self.last.get(attempt.request, attempt.number)
        return made, self.max_attempts + (attempt.request in self.last)

    def _next_number(self, attempt: Attempt) -> int:
        if attempt.request not in self.last:
            return attempt.number + 1
        self.last[attempt.request] += 1
        return self.last[attempt.request]


_ON: dict[type, Callable[[Any, Any], RouterEffects]] = {
    **watching._ON,
    FirstTokenDelivered: HedgingRouter._first_token_delivered,
}

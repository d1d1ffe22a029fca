"""Requests that hang at an engine which serves others: it passes them over.

An engine that serves others is not silent, and does not stall (`watching`). Whether it has lost one request shows in
what it does for those that came later. So the checks at which it has passed a request over are counted, and not time:
behind a long queue a request waits, and is not passed over.

- A prompt, or a first token: the engine has ended a wait of the same kind that began later. All such checks of a wait
  count.
- The next tokens: the engine has sent something, and nothing of this answer. Checks in a row count.
- A whole answer may take any time, and later ones may be shorter: it is never passed over.

What is usual depends on the engine: its queue may prefer some requests, and a sequence that is preempted waits. So the
limit follows from what was usual, as that of silences does: in those waits in which requests were passed over, of which
there may be few. It is longer, since an engine that serves others is less suspect than one that is silent.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from pdflow.routing.heartbeats import Seat
from pdflow.routing.stalls import Awaited, StallRule, Usual, Waiting

Queue: TypeAlias = tuple[Seat, Awaited]
"""The waits of one kind for one engine."""


class PassCounts:
    """How often engines pass requests over, and how often that is usual."""

    __slots__ = ("begun", "newest", "usual")

    def __init__(self) -> None:
        self.begun = 0
        """Waits that have begun: their order."""
        self.newest: dict[Queue, int] = {}
        """Of the waits that have ended well since the last check, the number of the one that began last."""
        self.usual: Final = {wait: Usual() for wait in Awaited}

    def fork(self) -> PassCounts:
        other = PassCounts()
        other.begun, other.newest = self.begun, self.newest.copy()
        other.usual.update({wait: usual.fork() for wait, usual in self.usual.items()})
        return other

    def overtaken(self, seat: Seat, waiting: Waiting) -> bool:
        """Whether the engine has ended another wait of this kind since the last check, which began after this one."""
        return self.newest.get((seat, waiting.awaited), 0) > waiting.number

    def begin(self, awaited: Awaited) -> Waiting:
        """Return a wait that begins."""
        self.begun += 1
        return Waiting(awaited, self.begun)

    def ended(self, seat: Seat, waiting: Waiting, prompt_tokens: int) -> None:
        """Record a wait for an engine that has ended well."""
        queue = seat, waiting.awaited
        self.newest[queue] = max(self.newest.get(queue, 0), waiting.number)
        if waiting.teaches and waiting.most_passed:
            self.usual[waiting.awaited].observe(waiting.most_passed, waiting.tokens(prompt_tokens))

    def too_often(
        self, rule: StallRule, seat: Seat, waiting: Waiting, prompt_tokens: int, active: bool, quiet: bool
    ) -> bool:
        """Record a check of a wait for an engine. Returns whether the engine passes it over too often.

        Args: `active`: the engine has sent something; `quiet`: and nothing of this answer, which has begun.
        """
        if waiting.awaited is Awaited.WHOLE:
            return False
        if waiting.awaited is Awaited.NEXT:
            waiting.passed = waiting.passed + active if quiet else 0
        else:
            waiting.passed += self.overtaken(seat, waiting)
        waiting.most_passed = max(waiting.most_passed, waiting.passed)
        usual, tokens = self.usual[waiting.awaited], waiting.tokens(prompt_tokens)
        return waiting.passed > (usual.at_least(rule, rule.passed, tokens) if rule.learns else rule.passed)

    def checked(self) -> None:
        """Begin to record until the next check."""
        self.newest.clear()

"""Waits for engines, and the longest silences that are usual in them.

An attempt waits for one engine at a time: until its prompt is computed, then for the first token, for the next ones, or
for the whole answer of a client that does not stream. Whether that engine is at work is seen from what it sends for any
request: a busy engine keeps sending, whatever a request's place in its queue. So silence is counted, not a request's
own time. It is counted in checks, which the driver makes at a fixed interval: a router that was itself stopped for a
time makes one check after it, and not many.

What silence is usual depends on prompts, batches and hardware. With `learns` the limit follows from the silences that
ended by themselves and were not too long: four times the longest of the last waits of the same kind, for longer prompts
in proportion, and in any case the time of a slow engine for the prompt, since it may have found earlier ones in its
cache.

A whole answer may take any time: its length is unknown, and nothing is sent before its end. So an engine that owes one
is asked whether it responds, and a check at which it has responded does not count as silence, unless the engine says
that it has run no step meanwhile: its process is not stopped, but its GPU may hang. Streams show themselves whether
their engine is at work, so a response counts for whole answers only, and for requests that have no token yet and may be
queued behind one.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final

from pdflow.protocol.values import S, Value

FACTOR: Final = 4
"""How many times a usual silence may be exceeded."""
LEAST: Final = 4
"""Checks without a sign of life that are no silence yet."""
PASSED: Final = 16
"""Checks at which an engine may serve others and not a request (`passes`)."""
ENOUGH: Final = 16
"""Waits that must have ended before a limit is known."""
GENERATION: Final = 64
"""Waits after which an earlier generation of them is forgotten."""
SLOW_TOKENS_PER_S: Final = 2000
"""The rate at which a slow engine computes a prompt, or receives its KV."""


class Awaited(Enum):
    """What an attempt waits for."""

    PROMPT = "prompt"
    """The prompt is computed: P answers, or an engine that serves the request alone sends its first token."""
    FIRST = "first token"
    """D's, when P has computed the prompt."""
    NEXT = "next token"
    WHOLE = "whole answer"
    """The client does not stream: an engine sends nothing before the answer is complete, but responds if asked."""


class StallRule(Value, frozen=True, gc=False):
    """When an engine counts as stalled: after more than `least` checks in a row in which it has sent nothing. A request
    hangs after more than `passed` checks at which its engine has served others (`passes`).

    `check_ns`: the interval of checks; `learns`: the limits are longer where more is usual, and silence has none before
    enough is known. Otherwise they are `least` and `passed`.
    """

    check_ns: int
    least: int = LEAST
    learns: bool = False
    passed: int = PASSED


class Usual:
    """The longest silences in the last waits of one kind: of the last 64 to 128. Or how often requests were passed
    over, in the last waits in which they were."""

    __slots__ = ("known", "newer", "older")

    def __init__(self) -> None:
        self.known = 0
        """Waits of the newer generation; ENOUGH and more also stand for an older one."""
        self.newer = (0, 0)
        """The longest silence of this generation, in checks, and the tokens of the prompt that it was for."""
        self.older = (0, 0)

    def fork(self) -> Usual:
        other = Usual()
        other.known, other.newer, other.older = self.known, self.newer, self.older
        return other

    def fingerprint(self) -> Hashable:
        return self.known, self.newer, self.older

    def observe(self, checks: int, tokens: int) -> None:
        """Record the longest silence of a wait that has ended well. One that no check has seen counts as one check."""
        self.newer = max(self.newer, (max(1, checks), tokens))
        self.known += 1
        if self.known >= ENOUGH + GENERATION:
            self.known, self.older, self.newer = ENOUGH, self.newer, (0, 0)

    def limit(self, rule: StallRule, tokens: int) -> int | None:
        """Return how many silent checks there may be for a prompt of so many tokens; None if too little is known."""
        return None if self.known < ENOUGH else self.at_least(rule, rule.least, tokens)

    def at_least(self, rule: StallRule, least: int, tokens: int) -> int:
        """Return how many checks there may be for a prompt of so many tokens, and `least` for one of none."""
        checks, longest = max(self.newer, self.older)
        if longest:
            checks = -(-checks * max(tokens, longest) // longest)
        return max(least + tokens * S // (SLOW_TOKENS_PER_S * rule.check_ns), FACTOR * checks)


class Waiting:
    """The wait of one attempt, the silence of its engine during it, and how often it was passed over, in checks.
    `number`: their order, by when they began."""

    __slots__ = ("awaited", "has_token", "longest", "most_passed", "number", "passed", "responded", "silent", "teaches")

    def __init__(self, awaited: Awaited, number: int) -> None:
        self.awaited = awaited
        self.number = number
        self.silent = 0
        """Checks in a row up to now."""
        self.longest = 0
        """The most of them in a row so far."""
        self.passed = 0
        """Checks at which the engine has passed this request over."""
        self.most_passed = 0
        """The most of them so far."""
        self.teaches = True
        """False if the engine has been silent for too long meanwhile, whether it stalled or not, or has passed this
        request over too often."""
        self.has_token = False
        """The first token came while P had not answered yet."""
        self.responded = False
        """The engine has responded at a check of this silence."""

    def fork(self) -> Waiting:
        other = Waiting(self.awaited, self.number)
        other.silent, other.longest = self.silent, self.longest
        other.passed, other.most_passed = self.passed, self.most_passed
        other.teaches, other.has_token, other.responded = self.teaches, self.has_token, self.responded
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state, but for its number."""
        passed = self.passed, self.most_passed
        return self.awaited, self.silent, self.longest, *passed, self.teaches, self.has_token, self.responded

    def checked(self, active: bool, responds: bool, may_compute: bool) -> None:
        """Record a check of the engine that is waited for: whether it has sent anything, has responded, and may be
        computing a whole answer, which may take any time. If it runs only such answers, it sends nothing to what is
        queued."""
        counts = may_compute and self.awaited is not Awaited.NEXT
        self.silent = 0 if active or (responds and counts) else self.silent + 1
        self.longest = max(self.longest, self.silent)
        self.responded = self.silent > 0 and (self.responded or responds)

    def teach(self, usual: Usual, prompt_tokens: int) -> None:
        """Record the longest silence of this wait, which has ended well, as a usual one."""
        if self.teaches:
            usual.observe(self.longest, self.tokens(prompt_tokens))

    def limit(self, rule: StallRule, usual: Usual, prompt_tokens: int) -> int | None:
        """Return how many silent checks there may be; None if too little is known."""
        return usual.limit(rule, self.tokens(prompt_tokens)) if rule.learns else rule.least

    def tokens(self, prompt_tokens: int) -> int:
        """Return the tokens on which it depends how long the wait takes."""
        return 0 if self.awaited is Awaited.NEXT else prompt_tokens

"""What the router counts of answers that it relays: their tokens, the times between them, and why they ended.

Nothing is parsed while pieces pass. An event of a stream is one token, unless the engine reports more exactly how many
there are: in the answer's `usage`, or in the token ids that the router keeps for a resumed answer. Of an answer that is
not streamed nothing is known of the times between its tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from pdflow.protocol.values import Instant, S

INTER_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""vLLM's buckets (vllm/v1/metrics/buckets.py)."""
BOUNDS_NS: Final = [int(bound * S) for bound in INTER_TOKEN_S]
EVENT_END: Final = b"\n\n"
NO_TOKENS: Final = 3
"""Events of a stream that may have no token: the first of a chat, the usage, and `[DONE]`."""
RECENT: Final = 4
"""Pieces that are kept: the end of an answer is in the last ones."""
DONE: Final = b"data: [DONE]\n"

# No text of an answer holds these: quotes are escaped there.
COMPLETION_TOKENS: Final = b'"completion_tokens":'
NO_CHOICES: Final = b'"choices":[]'
FINISH_REASON: Final = b'"finish_reason":"'
_number: Final = re.compile(rb"[0-9]+")
_reason: Final = re.compile(rb'[a-z_]+(?=")')


class TokenIntervals:
    """The histogram of the times between tokens, over all answers; a tenth of the cost of prometheus_client's."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts: Final = [0] * (len(INTER_TOKEN_S) + 1)
        self.sum_ns = 0

    def add(self, interval_ns: int, tokens: int) -> None:
        """Add so many tokens that came together, the first so long after the one before."""
        counts = self.counts
        counts[bisect_left(BOUNDS_NS, interval_ns)] += 1
        self.sum_ns += interval_ns
        if tokens > 1:
            counts[0] += tokens - 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, by the upper bound of each bucket."""
        total, found = 0, []
        for bound, count in zip((*map(str, INTER_TOKEN_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class EndedAnswer(NamedTuple):
    """What is known of an answer once it has ended."""

    tokens: int
    reason: str
    """Its finish_reason; empty where the end did not come."""


class PassingAnswer:
    """Counts the tokens of one answer. Args: `intervals`, to which the times between its tokens are added."""

    __slots__ = ("_at_ns", "_events", "_intervals", "_pending", "_pending_ns", "_recent")

    def __init__(self, intervals: TokenIntervals) -> None:
        self._intervals = intervals
        self._at_ns = 0
        """When the latest token passed; 0: none has."""
        self._pending_ns = 0
        """The time before the events of the latest piece, if it was not the first."""
        self._pending = 0
        """How many events these are. They count once others follow: the last ones have no token."""
        self._events = 0
        self._recent: deque[bytes] = deque(maxlen=RECENT)

    def first_token_sent(self, at_ns: Instant) -> None:
        """Record when the client got its first token from P."""
        self._at_ns = at_ns
        self._events += 1

    def add(self, pieces: Sequence[bytes], times: Sequence[Instant]) -> None:
        """Count the tokens of pieces of the answer, which passed at these times."""
        for data, at_ns in zip(pieces, times, strict=True):
            if events := data.count(EVENT_END):
                self._add_events(events, at_ns)
        self._recent.extend(pieces[-RECENT:])

    def _add_events(self, events: int, at_ns: Instant) -> None:
        self._events += events
        if self._at_ns:
            if self._pending:
                self._intervals.add(self._pending_ns, self._pending)
            self._pending_ns = at_ns - self._at_ns
            self._pending = events
        self._at_ns = at_ns

    @property
    def tokens_so_far(self) -> int:
        """At least so many tokens have passed; never more than `ended` returns."""
        return max(0, self._events - NO_TOKENS)

    def ended(self, known_tokens: int = 0, chat: bool = False) -> EndedAnswer:
        """Return what is known now that the answer has ended. Args: `known_tokens`: those whose ids are known;
        `chat`: the first event is the role alone."""
        text = b"".join(self._recent)
        if self._pending:
            tokens = self._pending - text.count(DONE) - text.count(NO_CHOICES)
            if tokens > 0:
                self._intervals.add(self._pending_ns, tokens)
        self._pending = 0
        used = _last(text, COMPLETION_TOKENS, _number)
        tokens = int(used) if used else known_tokens or self._events - (DONE in text) - chat
        return EndedAnswer(max(tokens, self.tokens_so_far), _last(text, FINISH_REASON, _reason).decode())


def _last(text: bytes, key: bytes, value: re.Pattern[bytes]) -> bytes:
    """Return the value behind the last such key; b"" if there is none."""
    at = text.rfind(key)
    found = None if at < 0 else value.match(text, at + len(key))
    return b"" if found is None else found[0]

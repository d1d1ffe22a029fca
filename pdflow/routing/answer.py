"""The answer to one client: which attempt streams it, and which decode legs await P's first token.

Several attempts of a request may bring an answer: a hedge, a retry, an attempt that was taken back too late. The client
receives one of them:

- The first attempt whose answer begins to arrive is the attempt that streams. The answers of the others are dropped.
- With first_token = "prefill" the first token that a P returns is the start of the answer, whichever attempt streams. A
  decode leg that was dispatched before awaits that token, and receives it once. A later one is dispatched with it.
- An engine that computes the prompt too starts an answer with a first token of its own. If a client that streams has
  P's by then, that answer cannot be used, and its leg is cancelled.
- When the answer is whole, or the request has ended, nothing more is passed on.

The driver reports the attempt that streams to the router's endpoint (`FirstTokenDelivered`), which takes the other
attempts back. Whether another attempt follows a failure is decided there (`failure`). Once an attempt streams, another
one can only continue its answer: the endpoint says so (`ResumeAnswer`), and after `resume` nothing of any other attempt
is passed on. A retry that was dispatched before the report was handled is not sent (`is_candidate`).

Legs are named by their attempt's request id: of one attempt, one leg brings the answer. The driver handles the bytes
and the content of an engine's answer.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Literal

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.values import RequestId, Value


class PieceUse(Enum):
    """The action for a piece of an attempt's answer."""

    FIRST = "first"
    """Pass it on, and report that this attempt streams."""
    PASS = "pass"
    """Pass it on."""
    DROP = "drop"
    """Drop it. The leg has not ended: the router's endpoint takes it back."""


class Ending(Enum):
    """The last part of the client's answer, when its request has ended."""

    NOTHING = "nothing"
    """Nothing is sent: the client has its whole answer, or has gone."""
    ERROR = "error"
    """The error is the answer: the client has received nothing."""
    BREAK_OFF = "break off"
    """The client has received the start of an answer, which breaks off with the error."""


class FirstTokenUse(Value, frozen=True, gc=False):
    """The legs to be given P's first token or cancelled, if the client's answer starts with that token."""

    forward: tuple[RequestId, ...]
    """Decode legs that await the token."""
    cancel: tuple[RequestId, ...]
    """Legs of engines that compute the prompt too, and would start the answer again: they fail with CANCELLED."""


class Answer:
    """The state of the answer to one client.

    Args: `streams`: the client receives the answer piece by piece, not whole; `first_from_prefill`: its first token
    is P's (first_token = "prefill").
    """

    __slots__ = (
        "awaiting",
        "continued_by",
        "first_from_prefill",
        "from_start",
        "has_first_token",
        "over",
        "streaming",
        "streams",
    )

    def __init__(self, streams: bool, first_from_prefill: bool) -> None:
        self.streams = streams
        self.first_from_prefill = first_from_prefill
        self.has_first_token = False
        """P's first token is known, and the answer starts with it."""
        self.streaming: RequestId | None = None
        """The attempt that streams."""
        self.awaiting: list[RequestId] = []
        """Decode legs that were dispatched without P's first token."""
        self.from_start: list[RequestId] = []
        """Legs of engines that compute the prompt too, and a first token of their own."""
        self.continued_by: RequestId | None = None
        """The attempt that continues the answer, if it was resumed: the last one that was to."""
        self.over = False
        """Nothing more is passed on."""

    def fork(self) -> Answer:
        """Return an independent copy."""
        other = Answer(self.streams, self.first_from_prefill)
        other.has_first_token, other.streaming, other.over = self.has_first_token, self.streaming, self.over
        other.awaiting, other.from_start = self.awaiting.copy(), self.from_start.copy()
        other.continued_by = self.continued_by
        return other

    def fingerprint(self) -> Hashable:
        legs = tuple(self.awaiting), tuple(self.from_start), *([] if self.continued_by is None else [self.continued_by])
        return self.streams, self.first_from_prefill, self.has_first_token, self.streaming, self.over, *legs

    @property
    def started(self) -> bool:
        """Whether the client has received a part of the answer."""
        return self.streaming is not None or self.is_resumed or (self.has_first_token and self.streams)

    @property
    def is_resumed(self) -> bool:
        return self.continued_by is not None

    def is_candidate(self, attempt: RequestId) -> bool:
        """Whether the answer may still come from this attempt. If not, its legs need not be sent."""
        if self.over or self._starts_again(attempt):
            return False
        candidate = self.streaming if self.continued_by is None else self.continued_by
        return candidate is None or candidate == attempt

    # Legs begin and end.

    def prefill_dispatched(self) -> bool:
        """Record a prefill leg with a decode leg behind or beside it. Returns whether P is asked for its first
        token."""
        return self.first_from_prefill and not self.has_first_token and not self.is_resumed

    def decode_dispatched(self, attempt: RequestId) -> bool:
        """Record a decode leg. Returns whether it awaits P's first token."""
        if not self.first_from_prefill or self.has_first_token or self.is_resumed or not self.is_candidate(attempt):
            return False
        self.awaiting.append(attempt)
        return True

    def alone_dispatched(self, attempt: RequestId) -> bool:
        """Record a leg at an engine that computes the prompt too. Returns whether it continues behind P's first
        token."""
        if not self.has_first_token and self.first_from_prefill and not self.is_resumed:
            self.from_start.append(attempt)
        return self.has_first_token

    def leg_ended(self, role: Literal["prefill", "decode"], attempt: RequestId) -> None:
        """Record the end of a leg: answered, failed or aborted. No piece of an answer comes from it any more."""
        if role == "decode" and attempt in self.awaiting:
            self.awaiting.remove(attempt)
        if attempt in self.from_start:
            self.from_start.remove(attempt)

    # The answer arrives.

    def first_token_received(self, attempt: RequestId, ends: bool) -> FirstTokenUse | None:
        """Record P's first token, which `ends` the answer or not. Returns None if the answer does not start with it.

        If the token ends the answer, the answer is whole, and the driver reports that this attempt streams.
        """
        if not self.first_from_prefill:
            raise LocalProtocolError(f"{attempt}: this router does not use P's first token")
        if self.over or self.has_first_token or self.streaming is not None or self.is_resumed:
            return None
        self.has_first_token = True
        awaiting, self.awaiting = tuple(self.awaiting), []
        if not ends:
            return FirstTokenUse(awaiting, tuple(self.from_start) if self.streams else ())
        self.streaming = attempt
        self.over = True
        return FirstTokenUse((), ())

    def piece_arrived(self, attempt: RequestId) -> PieceUse:
        """Return the action for a piece of this attempt's answer. A driver that passes on whole streams asks once for
        each."""
        if not self.is_candidate(attempt):
            return PieceUse.DROP
        if self.streaming is not None:
            return PieceUse.PASS
        self.streaming = attempt
        return PieceUse.FIRST

    def resume(self, attempt: RequestId) -> None:
        """Let this attempt, and no other, continue the answer behind what has been passed on. An answer that is whole
        by now stays so."""
        if self.streaming is None and not self.is_resumed:
            raise LocalProtocolError(f"{attempt}: no attempt has streamed, so there is nothing to continue")
        self.continued_by = attempt
        if not self.over:
            self.streaming = None

    def whole(self, attempt: RequestId) -> None:
        """Record that the last piece of this attempt's answer has been passed on. It may have been when the answer was
        about to be resumed: then nothing is left to continue."""
        resumed_meanwhile = self.streaming is None and self.is_resumed
        if attempt != self.streaming and not resumed_meanwhile:
            raise LocalProtocolError(f"{attempt} cannot have the whole answer: attempt {self.streaming} streams")
        self.over = True

    def ended(self, outcome: Literal["completed", "failed", "cancelled"]) -> Ending:
        """Record the end of the request (`Reply`), or that its client has gone. Returns what the client still
        receives."""
        self.over = True
        if outcome != "failed":
            return Ending.NOTHING
        return Ending.BREAK_OFF if self.started else Ending.ERROR

    def _starts_again(self, attempt: RequestId) -> bool:
        """Whether this attempt's leg would send a first token of its own behind P's."""
        return self.has_first_token and self.streams and attempt in self.from_start

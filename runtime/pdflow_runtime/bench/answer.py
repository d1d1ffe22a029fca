"""The client's record of one streamed answer: when each token came, the text, and how it ended.

A token is counted when its event is here. An event with token ids counts as so many tokens, which came together; one
without as a single token, as `vllm bench serve` counts, except the event that only opens a chat (a role, and no text).
How many tokens there were in all the server says at the end (`usage`), if it does. Knows no clock and no socket.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdflow.errors import PdflowError
from pdflow.results import formatting

LONGEST_LINE: Final = 16 << 20
"""Bytes of one event."""
LONGEST_REASON: Final = 200
"""Characters; what a server says beyond is cut off."""


class BrokenAnswerError(PdflowError):
    """The server answered, but not with what was asked for; the message says with what."""


class AnswerReader:
    """Reads the body of a streamed answer: call `feed` with each piece as it comes, and `end` when no more will
    come."""

    __slots__ = ("_reported_tokens", "_rest", "done", "finish", "pieces", "prompt_tokens", "times", "token_ids")

    def __init__(self) -> None:
        self.times: Final[list[int]] = []
        """When each token came."""
        self.pieces: Final[list[str]] = []
        """The text, in pieces."""
        self.token_ids: Final[list[int]] = []
        """Empty where the server does not return them."""
        self.prompt_tokens: int | None = None
        """As the server counts them."""
        self.finish: str | None = None
        self.done = False
        """The end of the stream has come ([DONE])."""
        self._reported_tokens: int | None = None
        self._rest = b""

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the server reports, or else the number that was received."""
        return len(self.times) if self._reported_tokens is None else self._reported_tokens

    def feed(self, data: bytes, now: int) -> None:
        """Take the next bytes of the body, received at `now`. BrokenAnswerError if they are not an answer, or hold an
        error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise BrokenAnswerError(f"the answer has an event of more than {LONGEST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def end(self) -> None:
        """Raise BrokenAnswerError if what came is no whole answer."""
        if not self.times:
            raise BrokenAnswerError("the answer ended without a token")
        if not self.done and self.finish is None:
            raise BrokenAnswerError("the answer was cut off")
        if not self.output_tokens:
            raise BrokenAnswerError("the server's usage reports no token")

    def _event(self, data: bytes, now: int) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswerError(
                f"the answer has an event that is not in OpenAI's format: {plain(str(error))}"
            ) from None
        if event.error is not None:
            raise BrokenAnswerError(error_text(event.error))
        if event.usage is not None:
            self._reported_tokens = event.usage.completion_tokens
            self.prompt_tokens = event.usage.prompt_tokens
        for choice in event.choices:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: int) -> None:
        delta = choice.delta or _NO_DELTA
        text = choice.text or delta.content or delta.reasoning_content or delta.reasoning or ""
        if choice.token_ids is not None:
            count = len(choice.token_ids)
            self.token_ids.extend(choice.token_ids)
        else:
            count = 0 if delta.role is not None and not text and choice.finish_reason is None else 1
        self.times.extend([now] * count)
        if text:
            self.pieces.append(text)
        self.finish = choice.finish_reason or self.finish


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_NO_DELTA: Final = _Delta()
_decode = msgspec.json.Decoder(_Event).decode
_decode_any = msgspec.json.Decoder().decode


def refusal(status: int, body: bytes) -> str:
    """Return the text of an HTTP error response."""
    try:
        decoded = _decode_any(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        decoded = body.decode("utf-8", "replace").strip()
    message = error_text(decoded.get("error", decoded) if isinstance(decoded, dict) else decoded)
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def error_text(error: Any) -> str:
    """Return the message of OpenAI's error object, or of whatever stands in its place."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return plain(str(message))


def plain(text: str) -> str:
    """Return a text from the server as one short line."""
    line = formatting.plain(text.replace("\n", " "))
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"

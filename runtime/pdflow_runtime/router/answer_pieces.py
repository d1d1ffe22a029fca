"""The pieces of an answer that the router passes on, and what it learns from them: which engine sends, how many tokens,
how the answer ended, what another engine needs to continue it.

A piece is kept as it comes, and looked at together with others, every 2 KiB or when the result is needed: between two
pieces a processor does other things, and with cold caches, looking at each as it comes took a quarter of the time that
passing it on takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant
from pdflow_runtime.clock import stopwatch_ns
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.observe.passing_answers import EndedAnswer, PassingAnswer, TokenIntervals
from pdflow_runtime.router.passed import PassedAnswer

LOOK_BYTES: Final = 2 << 10
"""Bytes of pieces that are kept before they are looked at."""
EVENT: Final = b"data: "
ERROR: Final = EVENT + b'{"error":'
"""The beginning of an engine's error in a stream of events. No text of an answer holds it: quotes are escaped there."""


class AnswerPieces:
    """Args: `intervals`: the times between tokens of all answers; `passed`: what the client has received, if another
    attempt may continue the answer."""

    def __init__(self, intervals: TokenIntervals, passed: PassedAnswer | None) -> None:
        self.passed: Final = passed
        self.active: set[EngineId] = set()
        """Engines that have sent anything: the router's, in which each is noted."""
        self.arrived = False
        """Whether any have arrived since this was last set to False."""
        self.source: EngineId = ""
        """The engine whose answer is passed on."""
        self.first: Callable[[], None] | None = None
        """Called at the first piece of the answer, and no other."""
        self._counts: Final = PassingAnswer(intervals)
        self._error: Final = _EngineError()
        self._pieces: list[bytes] = []
        self._times: list[Instant] = []
        self._bytes = 0

    def add(self, data: bytes) -> None:
        """Add a piece, before the client gets it."""
        self._pieces.append(data)
        self._times.append(stopwatch_ns())
        self._bytes += len(data)
        if self.first is not None:
            self.begin()
        if self._bytes > LOOK_BYTES:
            self.look()

    def add_first_token(self, token: int, answer_id: str, created: int) -> None:
        """Add P's first token, and the name of the answer, which the client gets in a stream."""
        if self.passed is not None:
            self.passed.begin(token, answer_id, created)
        self.begin()
        self._counts.first_token_sent(stopwatch_ns())

    def begin(self) -> None:
        """Take note that the answer begins, if it has not begun."""
        if self.first is not None:
            first, self.first = self.first, None
            first()

    def sent_by(self, engine: EngineId) -> None:
        """Note that what comes from here on is sent by that engine."""
        self.look()
        self.source = engine

    def look(self) -> None:
        """Look at the pieces that have been kept."""
        if not self._pieces:
            return
        self.arrived = True
        if self.source:
            self.active.add(self.source)
        pieces, self._pieces = self._pieces, []
        times, self._times = self._times, []
        self._bytes = 0
        self._counts.add(pieces, times)
        text = b"".join(pieces)
        self._error.add(text)
        if self.passed is not None:
            self.passed.add(text)

    @property
    def tokens_so_far(self) -> int:
        """At least so many tokens have passed; never more than `ended` returns."""
        self.look()
        return self._counts.tokens_so_far

    def ended(self, chat: bool) -> EndedAnswer:
        """Return what is known of the answer, of which nothing more is passed on. Args: `chat`: it is a stream of chat
        events, the first of which has no token."""
        self.look()
        return self._counts.ended(0 if self.passed is None else self.passed.count, chat)

    def failure(self) -> Code:
        """Return the code of the error with which the engine ended the answer; NONE if there is none."""
        self.look()
        return self._error.code()


class _EngineError:
    """Finds an engine's error in an answer that had begun."""

    def __init__(self) -> None:
        self._found = b""
        """From where it begins."""
        self._tail = b""
        """The last bytes of what has come, where an error may begin in them."""

    def add(self, data: bytes) -> None:
        if self._found:
            self._found += data
        elif ERROR in data or (self._tail and ERROR in self._tail + data[: len(ERROR)]):
            self._found = ERROR + (self._tail + data).partition(ERROR)[2]
        elif data.endswith(b"\n"):
            self._tail = b""
        else:
            self._tail = (self._tail + data[-len(ERROR) :])[-len(ERROR) :]

    def code(self) -> Code:
        if not self._found:
            return Code.NONE
        error = OpenAIError.from_response(502, self._found[len(EVENT) :].partition(b"\n")[0])
        return Code.IO if error is None else Code.__members__.get(str(error.code), Code.IO)

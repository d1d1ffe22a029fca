"""Incremental detokenization of an answer: whole characters only, and nothing that may be a stop string's beginning.

Tokens are not characters: one may end in the middle of one, and what a token says may depend on its neighbours. So a
token is always decoded with a few before it, and the new part of that is returned; characters that are not whole yet
wait for the next token. Source of the window: vLLM's detokenizer_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

BROKEN: Final = "\ufffd"
HELD: Final = 3
"""Broken characters at the end that may still become one: all bytes of one but its last."""
WINDOW: Final = 32
"""Tokens that are decoded again at most, however long the answer stays in the middle of a character."""


class Decoder(Protocol):
    def decode(self, tokens: Sequence[int], /) -> str: ...


class Detokenizer:
    """Turns the tokens of one answer into text. `stop`: strings that end it, and are no part of it unless
    `include_stop`."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._decoder: Final = decoder
        self._stop: Final = tuple(filter(None, stop))
        self._include_stop: Final = include_stop
        self._window: list[int] = []
        self._context = 0
        """Characters of the window's text that have been returned already."""
        self._waiting = ""
        """Text that may be a stop string's beginning."""
        self.stopped: str | None = None
        """The stop string that has come, if one has. The answer is over then."""

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add a token, and return the text that can be released now. With `may_stop` false, no stop string that ends
        with this token counts."""
        return self._let_out(self._characters(token), may_stop)

    def flush(self) -> str:
        """End the answer without a stop string, and return the text that was held back."""
        rest = self._waiting + self._decoder.decode(self._window)[self._context :]
        self._waiting, self._window, self._context = "", [], 0
        return rest if self.stopped is None else ""

    def _characters(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._decoder.decode(window)
        whole = text.rstrip(BROKEN)
        if len(whole) < len(text) and len(window) < WINDOW:
            new = text[self._context : max(len(whole), len(text) - HELD)]
            self._context += len(new)
            return new
        new = text[self._context :]
        self._window = [token]
        self._context = len(self._decoder.decode(self._window))
        return new

    def _let_out(self, new: str, may_stop: bool) -> str:
        text = self._waiting + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0] if may_stop else []
        if found:
            at, self.stopped = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._waiting = ""
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the stop string's first."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

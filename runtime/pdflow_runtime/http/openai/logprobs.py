"""Log probabilities of tokens, in each API's shape."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import msgspec

LEAST: Final = -9999.0
"""The number that stands for minus infinity in JSON, as in vLLM."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token as text, the logarithm of its probability, and the likeliest tokens in its place, likeliest first."""

    text: str
    logprob: float | None
    """None for a prompt's first token, which is after nothing. Chats have no prompt's tokens."""
    top: tuple[tuple[str, float], ...] = ()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenWithTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenWithTop]


def of_completion(tokens: Seq[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Return the logprobs in the shape of /v1/completions. `offset`: characters of the text before these tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        offsets,
        [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        [token.text for token in tokens],
        [None if token.logprob is None else _by_text(token.top) for token in tokens],
    )


def _by_text(top: Seq[tuple[str, float]]) -> dict[str, float]:
    """Return the logprobs by text: of tokens with the same text, such as broken characters, that of the likeliest."""
    found: dict[str, float] = {}
    for text, logprob in top:
        found.setdefault(text, _finite(logprob))
    return found


def of_chat(tokens: Seq[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenWithTop(
                token.text,
                _finite(token.logprob or 0.0),
                list(token.text.encode()),
                [ChatToken(text, _finite(logprob), list(text.encode())) for text, logprob in token.top],
            )
            for token in tokens
        ]
    )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

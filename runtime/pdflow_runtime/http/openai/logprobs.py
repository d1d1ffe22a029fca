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
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


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
        [_finite(token.logprob) for token in tokens],
        [token.text for token in tokens],
        [{text: _finite(logprob) for text, logprob in token.top} for token in tokens],
    )


def of_chat(tokens: Seq[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenWithTop(
                token.text,
                _finite(token.logprob),
                list(token.text.encode()),
                [ChatToken(text, _finite(logprob), list(text.encode())) for text, logprob in token.top],
            )
            for token in tokens
        ]
    )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

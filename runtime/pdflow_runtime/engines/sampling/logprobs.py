"""Log probabilities of tokens: of those that are chosen, and of a prompt's own, which are collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from pdflow.protocol.values import Value


class Logprobs(Value, frozen=True, gc=False):
    """The natural logarithm of a token's probability by the model, before temperature and top-p; `top`: the likeliest
    tokens."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class PromptScores:
    """Where the steps of one sequence write its prompt's logprobs. Args: `tokens` is the prompt, `top` how many of the
    likeliest tokens to keep with each. A prompt that is computed again after a preemption is scored again."""

    def __init__(self, tokens: Seq[int], top: int) -> None:
        self.tokens: Final = tokens
        self.top: Final = top
        self.logprobs: Final[list[Logprobs | None]] = [None] * len(tokens)
        """Of each token, given those before it. The first one has none."""

    def rows(self, start: int, end: int) -> range:
        """Return the positions from `start` to `end` whose logits score a token: all but that of the last token."""
        return range(start, min(end, len(self.tokens) - 1))

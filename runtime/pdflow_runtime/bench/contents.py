"""Contents of prompts: tokens made up from the seed, the same ones wherever the workload says that they are shared.

Workloads say lengths and names of shared blocks, not texts. Every token is one of 128 that any vocabulary has and no
tokenizer gives a meaning of its own (in those of the usual families, single bytes). Nothing here depends on when a
request is sent, so the same seed sends the same prompts.
"""

from __future__ import annotations

from typing import Final

from pdflow.workload.request import Request
from pdflow.workload.rng import Rng

FIRST_TOKEN: Final = 64
_SPREAD: Final = 127
"""Token ids are from FIRST_TOKEN to FIRST_TOKEN + _SPREAD."""
_PER_DRAW: Final = 8

VOCABULARY_WORDS: Final = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"),
    *("he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you"),
)
"""Each a token by itself in large vocabularies, behind a space."""


class Contents:
    """Makes up the tokens of prompts. Args: `block_tokens` is the number of tokens that one name of the workload's
    prefixes stands for."""

    def __init__(self, seed: int, block_tokens: int) -> None:
        self._rng: Final = Rng(seed)
        self._block_tokens: Final = block_tokens

    def made(self, name: str, count: int) -> list[int]:
        """Return the first `count` tokens of the sequence of that name."""
        draw = self._rng.stream(f"content/{name}").u64
        data = b"".join([draw().to_bytes(_PER_DRAW, "little") for _ in range(-(-count // _PER_DRAW))])
        return [FIRST_TOKEN + (byte & _SPREAD) for byte in data[:count]]

    def prompt(self, number: int, request: Request) -> list[int]:
        """Return the prompt of the `number`th request, which is in no session."""
        tokens: list[int] = []
        for name in request.prefix:
            tokens += self.made(f"block/{name}", min(self._block_tokens, request.input_tokens - len(tokens)))
        return tokens + self.made(f"prompt/{number}", request.input_tokens - len(tokens))


class Conversation:
    """The tokens of one session so far: each prompt is all of them, and new ones.

    An answer whose token ids the server returns is kept as it was; where it returns none, or the answer ended early,
    the missing tokens are made up, so that prompts are as long as they were drawn.
    """

    def __init__(self, contents: Contents, session: int, system_prompt_tokens: int) -> None:
        self._contents: Final = contents
        self._name: Final = f"session/{session}"
        self._tokens: Final = contents.made("system", system_prompt_tokens)

    def ask(self, turn: int, request: Request) -> list[int]:
        """Return the prompt of that turn."""
        new = request.input_tokens - len(self._tokens)
        self._tokens.extend(self._contents.made(f"{self._name}/{turn}", new))
        return list(self._tokens)

    def add_answer(self, turn: int, answer: list[int], expected: int) -> None:
        """Add the answer of a turn; `expected` is how many tokens the workload says that it has."""
        kept = answer[:expected]
        missing = self._contents.made(f"{self._name}/{turn}/answer", expected - len(kept))
        self._tokens.extend(kept + missing)


def as_text(tokens: list[int]) -> str:
    """Return a text of as many words, for an API that takes no tokens."""
    return " ".join(VOCABULARY_WORDS[token % len(VOCABULARY_WORDS)] for token in tokens)

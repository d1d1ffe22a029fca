"""What a request forbids or favours among the next tokens: penalties, biases, tokens that may not come.

All of it follows from the request and the tokens so far, so P, D and an engine alone constrain the same token alike, a
preempted sequence too. The order is vLLM's (v1/sample/sampler.py): the tokens that may not come, then biases, then the
penalties for repetition, frequency and presence. Repetition counts the prompt's tokens, the others the answer's alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import attrs
from attrs import validators

from pdflow.protocol.values import Value


@attrs.frozen(kw_only=True)
class Constraints:
    """A request's rules for its next tokens. None of them does anything by default."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has it."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the answer has."""
    repetition_penalty: float = attrs.field(default=1.0, validator=validators.gt(0))
    """The logit of a token that is in the prompt or the answer is divided by it if positive, else multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""
    allowed: tuple[int, ...] | None = None
    """The only tokens that may come, at least one; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer may not have: the last token of one may not follow the others."""
    min_tokens: int = attrs.field(default=0, validator=validators.ge(0))
    """The answer's first tokens, of which none may be one that ends it."""
    allowed_flags: bytes = attrs.field(init=False, repr=False, eq=False)
    """A byte for each token up to the last allowed one: 1 if it is allowed. All of a vocabulary may be."""
    prepared: dict[str, Any] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    """What the sampler has made of the rules that are the same for all of the answer's tokens, by device."""

    @allowed_flags.default
    def _flags(self) -> bytes:
        flags = bytearray(max(self.allowed, default=-1) + 1 if self.allowed else 0)
        for token in self.allowed or ():
            flags[token] = 1
        return bytes(flags)

    def allows(self, token: int) -> bool:
        """True if the token may come, as far as `allowed` says."""
        return self.allowed is None or (token < len(self.allowed_flags) and self.allowed_flags[token] == 1)


NO_CONSTRAINTS = Constraints()


class History(Value, frozen=True, gc=False):
    """A constrained sequence so far. `tokens` is the list of its engine, which grows only between steps; the answer
    begins at the index `begins`. `endings` are the tokens that would end it."""

    tokens: Seq[int]
    begins: int
    endings: frozenset[int]

    @property
    def answer(self) -> Seq[int]:
        return self.tokens[self.begins :]


def forbidden(constraints: Constraints, history: History, vocab_size: int) -> set[int]:
    """Return the tokens that may not come next, besides those that are not among `allowed`. If a request forbids every
    token, bad words and `min_tokens` do not count: some token has to come."""
    length = len(history.tokens) - history.begins
    found = {token for token in history.endings if token < vocab_size} if length < constraints.min_tokens else set()
    for phrase in constraints.bad_words:
        before = len(phrase) - 1
        if before <= length and tuple(history.tokens[len(history.tokens) - before :]) == phrase[:-1]:
            found.add(phrase[-1])
    most = vocab_size if constraints.allowed is None else len(constraints.allowed)
    return found if sum(map(constraints.allows, found)) < most else set()

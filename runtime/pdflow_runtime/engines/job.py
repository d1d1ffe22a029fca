"""What an engine is asked, what it computes in a step, and what comes of it: words that all engines share.

A `Job` is asked for. Of those that the scheduler puts into a step, each gives a `Work`: some of its tokens, where their
KV goes, and whether the next token is wanted. A `Runner` computes a step; `Token`s are what the caller hears.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, Protocol, TypeAlias

import attrs
from attrs import validators

from pdflow.engine import Sequence
from pdflow.protocol.values import Instant, Value

Ending: TypeAlias = Literal["stop", "length"]
"""Why an answer ends, in OpenAI's words: a token that says so, or as many tokens as were asked for."""


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen, and how long the answer may be."""

    max_tokens: int = attrs.field(default=16, validator=validators.ge(1))
    """What the sequence's `output_tokens` are to begin with."""
    temperature: float = attrs.field(default=0.0, validator=validators.ge(0))
    """0: the likeliest token."""
    top_p: float = attrs.field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    top_k: int = attrs.field(default=0, validator=validators.ge(0))
    """0: all."""
    seed: int = 0
    """What is drawn follows from it and from how far the answer is, from nothing else."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """How many of the likeliest tokens to tell with each that is chosen, and how likely; None: nothing of it."""


GREEDY = Sampling()


@attrs.define(eq=False)
class Job:
    """A sequence with its tokens. `seq.prompt_tokens` is the number of `tokens`."""

    seq: Sequence
    tokens: Seq[int]
    sampling: Sampling = GREEDY
    given: int = 0
    """How many of the tokens, at their end, are the answer's beginning already: P's, where it has told some. They may
    be named as late as its KV: `LiveEngine.loaded` looks again."""
    returns_first_token: bool = False
    """Of a prompt that is computed for others: the answer's first token is told, too."""


class Logprobs(Value, frozen=True, gc=False):
    """The natural logarithm of what the model gives a token, before temperature and top-p; `top`: the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Sampled(Value, frozen=True, gc=False):
    token: int
    logprobs: Logprobs | None = None


class Token(Value, frozen=True, gc=False):
    """The next token of a sequence. While this is told, `LiveEngine.finish` makes it the last."""

    seq: Sequence
    token: int
    logprobs: Logprobs | None
    ending: Ending | None
    """Why it is the last one, if it is."""


class TokenRequest(Value, frozen=True, gc=False):
    """A request to sample one token after a `Work`: the answer's `index`th, from 0."""

    sampling: Sampling
    index: int


class Work(Value, frozen=True, gc=False):
    """One sequence's part of a step: compute `tokens`, which stand at the positions from `start` on.

    KV of what comes before is in `blocks` already; theirs goes there.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    token_request: TokenRequest | None
    decodes: bool = False
    """Whether it is a decoding sequence's one token, for the cost of a step, and no part of a prompt."""
    loaded: bool = False
    """Whether KV that was computed elsewhere is looked at here for the first time."""


LayerDone: TypeAlias = Callable[[int, Instant], None]
"""Which layer, and when it was there: whoever is told of it may be busy then."""


class Runner(Protocol):
    """Computes steps, one at a time."""

    async def step(self, works: Seq[Work], layer_done: LayerDone | None = None) -> list[Sampled | None]:
        """What comes of each, in order: a token where one is wanted. May take as long as it likes.

        `layer_done` is told in trio's thread of each layer, in their order, whose KV of this step is in its blocks.
        """
        ...

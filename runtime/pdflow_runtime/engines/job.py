"""The interface of an engine: what it is given to compute, the work of one step, and the results.

A `Job` is submitted. Of those that the scheduler puts into a step, each gives a `Work`: some of its tokens, where their
KV goes, and whether the next token is wanted. A `Runner` computes a step; `Token`s are reported to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, Protocol, TypeAlias

import attrs
from attrs import validators

from pdflow.engine import Sequence
from pdflow.protocol.values import Instant, Value
from pdflow_runtime.engines.sampling.constraints import NO_CONSTRAINTS, Constraints, History
from pdflow_runtime.engines.sampling.logprobs import Logprobs, PromptScores
from pdflow_runtime.engines.step_load import StepLoad

Ending: TypeAlias = Literal["stop", "length"]
"""Why an answer ends, in OpenAI's words: a token that says so, or as many tokens as were asked for."""


def _effective(constraints: Constraints | None) -> Constraints | None:
    return None if constraints == NO_CONSTRAINTS else constraints


@attrs.frozen(kw_only=True)
class Sampling:
    """The parameters by which the next token is chosen, and how long the answer may be."""

    max_tokens: int = attrs.field(default=16, validator=validators.ge(1))
    """The initial value of the sequence's `output_tokens`."""
    temperature: float = attrs.field(default=0.0, validator=validators.ge(0))
    """0: the likeliest token."""
    top_p: float = attrs.field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    top_k: int = attrs.field(default=0, validator=validators.ge(0))
    """0: all."""
    min_p: float = attrs.field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Only tokens that are at least this times as likely as the likeliest may come; 0: all."""
    seed: int = 0
    """The sampled token depends on the logits, on this seed and on its index in the answer, on nothing else."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """How many of the likeliest tokens to return with each that is chosen, with their logprobs; None: no logprobs."""
    constraints: Constraints | None = attrs.field(default=None, converter=_effective)
    """None if there are none, so that a request without them costs no step anything."""
    is_plain: bool = attrs.field(init=False, repr=False, eq=False)
    """True if the likeliest token is all that is wanted."""

    @is_plain.default
    def _is_plain(self) -> bool:
        return self.temperature == 0 and self.logprobs is None and self.constraints is None


GREEDY = Sampling()


@attrs.define(eq=False)
class Job:
    """A sequence with its tokens. `seq.prompt_tokens` is the number of `tokens`."""

    seq: Sequence
    tokens: Seq[int]
    sampling: Sampling = GREEDY
    given: int = 0
    """How many of the tokens, at their end, are the answer's beginning already: P's, where it has returned some. They
    may become known as late as its KV: `LiveEngine.loaded` looks again."""
    returns_first_token: bool = False
    """Whether an engine that computes the prompt for another one returns the answer's first token, too."""
    scores: PromptScores | None = None
    """Where the logprobs of the prompt's tokens are written, if they are wanted."""


class Sampled(Value, frozen=True, gc=False):
    token: int
    logprobs: Logprobs | None = None


class Token(Value, frozen=True, gc=False):
    """The next token of a sequence. While this is being reported, `LiveEngine.finish` makes it the last."""

    seq: Sequence
    token: int
    logprobs: Logprobs | None
    ending: Ending | None
    """Why it is the last one, if it is."""


class TokenRequest(Value, frozen=True, gc=False):
    """A request to sample one token after a `Work`: the answer's `index`th, from 0."""

    sampling: Sampling
    index: int
    history: History | None = None
    """The tokens so far, where `sampling` has constraints."""


class Work(Value, frozen=True, gc=False):
    """The part of one sequence in a step: compute `tokens`, which stand at the positions from `start` on.

    The KV of earlier positions is in `blocks` already; that of `tokens` is written there.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    token_request: TokenRequest | None
    decodes: bool = False
    """Whether this is the one token of a decoding sequence, not a part of a prompt: steps cost accordingly."""
    loaded: tuple[int, ...] = ()
    """The blocks whose KV was computed on another engine and is read here for the first time."""
    in_step: bool = False
    """Whether KV is still copied into these blocks while the step computes: see `StepLoad`."""
    scores: PromptScores | None = None
    """Where the logprobs of these tokens are written, if they are wanted."""


LayerDone: TypeAlias = Callable[[int, Instant], None]
"""Called with the layer, and the instant at which it was there: the call itself may come later."""


class Runner(Protocol):
    """Computes steps, one at a time."""

    async def step(
        self, works: Seq[Work], layer_done: LayerDone | None = None, load: StepLoad | None = None
    ) -> list[Sampled | None]:
        """Compute all works; return the sampled token of each, in order, None where none is wanted. May take as long as
        it likes.

        `layer_done` is called in trio's thread for each layer, in order, once its KV of this step is in its blocks.
        `load`: the copies that the step makes while it computes; it waits for each layer before it computes it.
        LoadFailedError if one fails.
        """
        ...

"""The fields that the router and the engines exchange about an answer, under the key "pdflow": never to or from a
client.

With `first_token = "prefill"` an answer begins at P and goes on at D. P makes its token into the event that
the client gets, as D would have; D receives the token and goes on behind it, under the answer's id. An answer whose D
dies goes on at another D in the same way: the tokens that the client has are the end of that D's prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow_runtime.http.openai.fields import invalid


class FirstToken(msgspec.Struct, frozen=True):
    """The first token of an answer, computed by P, and the id of the answer."""

    token: int
    id: str
    created: int
    logprob: float | None = None
    """The token's logprob, where the client wants logprobs; then `top` are the likeliest tokens."""
    top: tuple[tuple[int, float], ...] = ()


class GivenTokens(msgspec.Struct, frozen=True):
    """The beginning of an answer that continues at another engine."""

    tokens: int
    """How many tokens at the end of the prompt belong to the answer."""
    id: str
    created: int


class Between(msgspec.Struct, frozen=True):
    """The fields that the router sends with a leg."""

    returns_first_token: bool = msgspec.field(default=False, name="tells_first")
    """To P: answer with the first token, too."""
    decodes: bool = False
    """To P: a decode leg is under way already."""
    first: FirstToken | None = None
    """To D: the first token, which the client has already."""
    first_follows: bool = False
    """To D: the client has a first token, or will have; it is sent to D by a POST to /first_token."""
    given: GivenTokens | None = None
    """To D: the client has the beginning of the answer, which another engine generated."""
    returns_token_ids: bool = False
    """To D: name the token ids in each event, so that another engine can continue the answer."""

    @property
    def given_tokens(self) -> int:
        """How many tokens at the end of the prompt belong to the answer."""
        return 0 if self.given is None else self.given.tokens


class FirstAnswer(msgspec.Struct, frozen=True):
    """The first token in P's answer, beside its kv_transfer_params."""

    first: FirstToken
    text: str
    """To the client: the beginning of a stream; all of an answer that ends here."""
    ends: bool
    """There is no second token."""


def read_between(value: Any) -> Between:
    """Read the field of a request. OpenAIError."""
    if value is None:
        return NOTHING
    try:
        return msgspec.convert(value, Between)
    except msgspec.ValidationError as error:
        raise invalid("pdflow", str(error)) from None


NOTHING = Between()

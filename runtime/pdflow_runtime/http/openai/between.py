"""What the router and the engines say to each other of an answer, under the key "pdflow": never to or by a client.

With `first_token = "prefill"` an answer begins at P and goes on at D. P makes of its token what the client is told, as
D would have; D is told the token and goes on behind it, under the answer's name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow_runtime.http.openai.fields import invalid


class FirstToken(msgspec.Struct, frozen=True):
    """An answer's first token, which P has computed, and what the answer is called."""

    token: int
    id: str
    created: int
    logprob: float | None = None
    """Of the token, where the client wants such; then `top` are the likeliest."""
    top: tuple[tuple[int, float], ...] = ()


class Between(msgspec.Struct, frozen=True):
    """With a leg."""

    returns_first_token: bool = msgspec.field(default=False, name="tells_first")
    """To P: answer with the first token, too."""
    decodes: bool = False
    """To P: a decode leg is under way already."""
    first: FirstToken | None = None
    """To D: the client has this one."""
    first_follows: bool = False
    """To D: the client has one, or will have; it is told by a POST to /first_token."""


class FirstAnswer(msgspec.Struct, frozen=True):
    """P's, beside its kv_transfer_params."""

    first: FirstToken
    text: str
    """To the client: the beginning of a stream; all of an answer that ends here."""
    ends: bool
    """There is no second token."""


def read_between(value: Any) -> Between:
    """Of a request's field. OpenAIError."""
    if value is None:
        return NOTHING
    try:
        return msgspec.convert(value, Between)
    except msgspec.ValidationError as error:
        raise invalid("pdflow", str(error)) from None


NOTHING = Between()

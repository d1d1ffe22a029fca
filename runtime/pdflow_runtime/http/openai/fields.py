"""The fields of a request body: JSON read with its types; a mistake in it is an error that names the field.

The fields are also kept as they came (`Fields`): a router sends a request on with a few of them exchanged, and copies
the others, known or not, without looking into them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

import msgspec

from pdflow_runtime.http.errors import OpenAIError

Fields: TypeAlias = dict[str, msgspec.Raw]

T = TypeVar("T")

_fields = msgspec.json.Decoder(Fields)
_LOCATION = " - at `$"


def read_fields(body: bytes) -> Fields:
    """Return the fields of a body. OpenAIError if it is no JSON object."""
    return decoded(_fields, body)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, at: str = "") -> T:
    """Decode JSON. OpenAIError if it is malformed or has other types; `at` is the field that `body` is the value of."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, location = str(error).partition(_LOCATION)
        param = (at + location.rstrip("`")).lstrip(".") or None
        raise invalid(param, what[:1].lower() + what[1:]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OpenAIError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise OpenAIError(400, "the body is nested too deeply") from None


def rewritten(fields: Fields, *, drop: Iterable[str] = (), put: dict[str, Any] | None = None) -> bytes:
    """Return the body again, without some fields and with others."""
    dropped = frozenset(drop)
    kept: dict[str, Any] = {name: value for name, value in fields.items() if name not in dropped}
    return msgspec.json.encode(kept | (put or {}))


def invalid(param: str | None, problem: str) -> OpenAIError:
    return OpenAIError(400, f"{param}: {problem}" if param else problem, param=param)

"""How many JSON values a request's body may have, counted before it is parsed.

A value of two bytes takes the parser up to 0.4 us and 60 bytes of memory, and a number like `1.5e300` 8 us (msgspec
0.22). Parsing holds the interpreter, so a thread would not help: 16 MiB of small values would stop the server for
seconds. Commas and opening brackets are counted instead, at 2 ms a MiB. Those within texts count too, as telling them
apart would be parsing.

Only the fields that hold a prompt, or name tokens of a vocabulary, need many values. They have types, so that a number
of another type ends the parsing.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.fields import decoded
from pdflow_runtime.http.openai.parameters import BOTH, REFUSED

OTHER_VALUES: Final = 4_096
"""Of all fields but the long ones together. The longest of them, `logit_bias`, has 1,024 entries."""
NEUTRAL_BYTES: Final = 1_024
"""More than a value takes with which an unsupported field asks for nothing."""
OTHER_BYTES: Final = 1 << 20
"""Of the same fields. 16 stop strings of 1,000 characters with all their escapes take 96 KiB."""

_NONE: Final = msgspec.Raw(b"")


class _LongFields(msgspec.Struct, frozen=True):
    """The fields that may be long, unparsed: other fields are skipped, and no object is made of them."""

    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt_token_ids: msgspec.Raw = _NONE
    allowed_token_ids: msgspec.Raw = _NONE
    tokens: msgspec.Raw = _NONE


_REFUSED: Final = {field.name: field for field in REFUSED if field.apis == BOTH}
_refused_fields: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("_RefusedFields", [(name, msgspec.Raw, _NONE) for name in _REFUSED], frozen=True)
)
_long_fields = msgspec.json.Decoder(_LongFields)


def check_values(body: bytes, most: int) -> None:
    """Raise OpenAIError for a body with more than `most` values, or with too much outside of its long fields.
    A body that is not JSON may pass."""
    if len(body) <= OTHER_VALUES:
        return
    values = _values(body)
    if values > most:
        raise OpenAIError(
            413,
            f"the body has {values} commas and opening brackets, at most {most} are allowed: send several requests",
        )
    if values <= OTHER_VALUES and len(body) <= OTHER_BYTES:
        return
    found = decoded(_long_fields, body)
    fields = [bytes(getattr(found, name)) for name in _LongFields.__struct_fields__]
    values -= sum(map(_values, fields))
    nbytes = len(body) - sum(map(len, fields))
    if values > OTHER_VALUES or nbytes > OTHER_BYTES:
        _refuse_unsupported(body)
        names = ", ".join(_LongFields.__struct_fields__)
        raise OpenAIError(
            413,
            f"the body has {values} commas and opening brackets and {nbytes} bytes in fields other than {names}: at "
            f"most {OTHER_VALUES} and {OTHER_BYTES} are allowed",
        )


def _refuse_unsupported(body: bytes) -> None:
    """Raise OpenAIError for a long field that this server does not support: this error helps its sender."""
    found = decoded(_refused_fields, body)
    for name, field in _REFUSED.items():
        if len(bytes(getattr(found, name))) > NEUTRAL_BYTES:
            raise field.refusal()


def _values(data: bytes) -> int:
    """Return how many values the data has at most, but one."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")

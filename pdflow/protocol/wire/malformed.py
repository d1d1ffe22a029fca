"""Bytes that are no message, as a value: what a decoder returns instead of raising (R32 to R34)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdflow.protocol.values import Value
from pdflow.protocol.wire.limits import MAX_REASON_CHARS

T = TypeVar("T")


class Malformed(Value, frozen=True, gc=False):
    """These bytes are not what they should be. Touches nothing but the stream or notification that carried them."""

    reason: str


def malformed(reason: str) -> Malformed:
    """A reason that is safe to log: parts of it may be the peer's own words."""
    return Malformed("".join(c if c.isprintable() else "?" for c in reason[:MAX_REASON_CHARS]))


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T | Malformed:
    """Typed msgpack. ValueError is every error of msgspec and UTF-8; RecursionError is nesting without end."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        return malformed(str(error))

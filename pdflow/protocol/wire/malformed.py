"""The result of a decoder for bytes that are no message, returned instead of raising (R32 to R34)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdflow.protocol.values import Value
from pdflow.protocol.wire.limits import MAX_REASON_CHARS

T = TypeVar("T")


class Malformed(Value, frozen=True, gc=False):
    """Bytes that could not be decoded, and why. Affects only the stream or notification that carried them."""

    reason: str


def malformed(reason: str) -> Malformed:
    """Return a `Malformed` whose reason is safe to log: parts of it may be the peer's own text."""
    return Malformed("".join(c if c.isprintable() else "?" for c in reason[:MAX_REASON_CHARS]))


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T | Malformed:
    """Decode typed msgpack. ValueError is every error of msgspec and UTF-8; RecursionError is nesting without end."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        return malformed(str(error))

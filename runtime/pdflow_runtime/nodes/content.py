"""Names of content: what a prompt's KV was computed from (S4, spec 2.12)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def digest_of(tokens: Sequence[int], weights: int, besides: bytes = b"") -> int:
    """64 bits over the token ids, in order, the version of the weights, and whatever KV depends on besides."""
    key = blake2b(besides, digest_size=32).digest() if besides else b""
    salt = weights.to_bytes(8, "little")
    hashed = blake2b(array("q", tokens).tobytes(), digest_size=8, salt=salt, key=key)
    return int.from_bytes(hashed.digest(), "little")

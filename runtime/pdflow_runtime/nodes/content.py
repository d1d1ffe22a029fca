"""Names of content: what a prompt's KV was computed from (S4, PROTOCOL 7.3)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def digest_of(tokens: Sequence[int], weights: int) -> int:
    """64 bits over the token ids, in order, and the version of the weights."""
    hashed = blake2b(array("q", tokens).tobytes(), digest_size=8, salt=weights.to_bytes(8, "little"))
    return int.from_bytes(hashed.digest(), "little")

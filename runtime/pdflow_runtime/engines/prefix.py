"""Names for a prompt's prefix blocks: each stands for its tokens and for all before them, so equal names, equal KV.

128 bits of a chained blake2b, as vLLM chains its block hashes. What else the KV depends on goes in as `salt`; two
engines of one model need no common names, for none leaves its engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b


def block_names(tokens: Seq[int], span_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
    """Return a name for each full block of `span_tokens` tokens."""
    names = []
    before = salt
    for start in range(0, len(tokens) - span_tokens + 1, span_tokens):
        before = blake2b(before + array("I", tokens[start : start + span_tokens]).tobytes(), digest_size=16).digest()
        names.append(int.from_bytes(before, "little"))
    return tuple(names)

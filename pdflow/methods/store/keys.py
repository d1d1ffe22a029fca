"""The keys under which a store has KV: hashes of the content and of everything that makes engines' bytes equal.

A key is a pure function of what it names: every process makes the same one, so P and D need not exchange it, and
a get of it finds those bytes or none. Each block's key is chained to the one before it: it stands for all tokens
up to its end, since their KV depends on all of them. The demo of PR #12957 used Python's `hash`, which each process
salts: there, what one process has stored no other finds.

Which node of several has a prompt follows from the key of its first block, so that prompts that begin the same meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeAlias

Key: TypeAlias = str

_DIGEST_BYTES = 16


def origin(model: str, tp_rank: int, tp: int, salt: int = 0) -> Key:
    """Return the key with which every chain of one rank's keys begins. `salt` is 0 but for the guard against salted
    keys."""
    return _hashed(f"{model}@tp_rank:{tp_rank}/{tp}@{salt}".encode())


def chained(before: Key, contents: Iterable[int]) -> Key:
    """Return the key of what follows `before`: token ids, or numbers that stand for as much."""
    text = ",".join(map(str, contents))
    return _hashed(f"{before}:{text}".encode())


def block_keys(before: Key, blocks: Iterable[Iterable[int]]) -> tuple[Key, ...]:
    """Return one key for each block of a prompt, in order."""
    keys = []
    for block in blocks:
        before = chained(before, block)
        keys.append(before)
    return tuple(keys)


def home(key: Key, nodes: int) -> int:
    """Return the number of the node that has a key."""
    return int(key[:_DIGEST_BYTES], 16) % nodes


def _hashed(content: bytes) -> Key:
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()

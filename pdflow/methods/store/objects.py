"""The objects of a prompt at a store, from its start on.

By the prompt it is one object, all of its content. By the block, each block at its start that has a name of its own is
one, and what follows them another. Such a block ends where a KV block of everybody's does, and the last token of a
prompt is in none, as it is always computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdflow.methods.store.keys import Key, block_keys, chained
from pdflow.methods.store.memory import Item


def most_named(tokens: int, unit_tokens: int) -> int:
    """Return how many blocks of a prompt may have a name."""
    return (tokens - 1) // unit_tokens


def objects_of(
    start: Key, tokens: int, block_size: int, unit_tokens: int, named: Sequence[Iterable[int]], rest: Iterable[int]
) -> tuple[Item, ...]:
    """Return the objects of a prompt.

    Args:
        start: what all chains of keys begin with.
        block_size: of the store.
        unit_tokens: of a block that has a name.
        named: what stands for the content of each of these; none by the prompt.
        rest: what stands for the content behind them.
    """
    each = unit_tokens // block_size
    keys = block_keys(start, named)
    last = keys[-1] if keys else start
    behind = Item(chained(last, rest), -(-tokens // block_size) - each * len(keys))
    return (*[Item(key, each) for key in keys], behind)

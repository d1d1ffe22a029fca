"""References on vLLM's KV blocks, so that vLLM's own free never makes blocks usable that a writer may still reach.

vLLM counts references on a block and gives it out again when there are none. For each grant at D the connector holds
one of its own from the moment that the protocol knows of the grant until it frees it or the KV is committed; so
quarantine needs nothing more, whatever vLLM does with the request meanwhile. `reset_prefix_cache` fails as long as any
is held, as it must: a WRITE may still land there.
"""

from __future__ import annotations

from typing import Any, Final

from pdflow.protocol.values import Allocation


class BlockReferences:
    """The references that are held on blocks of one vLLM BlockPool, by generation."""

    def __init__(self) -> None:
        self._held: Final[dict[int, list[Any]]] = {}
        self._quarantined: Final[set[int]] = set()

    def __len__(self) -> int:
        """Return how many grants are held."""
        return len(self._held)

    @property
    def blocks(self) -> int:
        """The number of blocks that are held."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def quarantined(self) -> int:
        """The number of blocks that are held though their request is over, since a writer may still reach them."""
        return sum(len(self._held[generation]) for generation in self._quarantined)

    def holds(self, allocation: Allocation) -> bool:
        """Whether these blocks are held, in quarantine or not."""
        return allocation.generation in self._held

    def is_quarantined(self, allocation: Allocation) -> bool:
        return allocation.generation in self._quarantined

    def hold(self, pool: Any, allocation: Allocation) -> None:
        blocks = [pool.blocks[number] for number in allocation.blocks]
        pool.touch(blocks)
        self._held[allocation.generation] = blocks

    def quarantine(self, allocation: Allocation) -> None:
        """Note that the request of these blocks is over. They are held on."""
        self._quarantined.add(allocation.generation)

    def release(self, pool: Any, allocation: Allocation) -> None:
        self._quarantined.discard(allocation.generation)
        pool.free_blocks(reversed(self._held.pop(allocation.generation)))

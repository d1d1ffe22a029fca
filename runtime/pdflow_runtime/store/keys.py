"""The store's objects of a prompt and their home node, as a prefill engine works them out from the prompt's token ids.
Keys are of the content and of the weights that KV was computed with, so every engine makes the same."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdflow.methods.store.keys import Key, home, origin
from pdflow.methods.store.memory import Item
from pdflow.methods.store.objects import most_named, objects_of
from pdflow.wiring.stores import StoreWiring


@attrs.frozen
class StoreKeys:
    """The rule by which prompts become keys. Args: `start` is what all chains of keys begin with; `unit_tokens` of an
    object within a prompt, 0 if prompts are one object each."""

    start: Key
    block_size: int
    blocks: int
    """The blocks of one node."""
    unit_tokens: int
    nodes: int

    @classmethod
    def of(cls, wiring: StoreWiring, blocks: int, weights: int) -> StoreKeys:
        transfer, shards = wiring.transfer, wiring.shards
        start = origin(wiring.engines.scenario.model.name, 0, shards.tp, weights)
        unit = wiring.unit_tokens(1) if transfer.store_granularity == "block" else 0
        return cls(start, shards.block_size, blocks, unit, transfer.store_nodes)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt whose KV fits a node."""
        return self.blocks * self.block_size

    def objects(self, tokens: Sequence[int]) -> tuple[Item, ...]:
        unit, count = self.unit_tokens, len(tokens)
        behind = most_named(count, unit) * unit if unit else 0
        named = [tokens[at : at + unit] for at in range(0, behind, unit)] if unit else ()
        return objects_of(self.start, count, self.block_size, unit, named, tokens[behind:])

    def home(self, items: Sequence[Item]) -> int:
        """Return the number of the node that keeps these objects."""
        return home(items[0].key, self.nodes)

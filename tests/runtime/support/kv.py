"""An engine's KV, in whatever way its ranks cut it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pdflow.layout.shapes import heads_of_rank
from pdflow_runtime.nodes.engine_node import LiveEngineNode


def kv(node: LiveEngineNode, blocks: Sequence[int], tokens: int) -> Any:
    """A copy, `[layers, 2, heads, tokens, cell_bytes]`."""
    shape = node.config.shape
    found = np.empty((shape.num_layers, 2, shape.stored_heads, tokens, shape.cell_bytes), np.uint8)
    for heads, view in _views(node):
        mine = view[:, :, list(blocks)].transpose(0, 1, 3, 2, 4, 5)
        found[:, :, heads.start : heads.stop] = mine.reshape(*mine.shape[:3], -1, mine.shape[-1])[:, :, :, :tokens]
    return found


def put_kv(node: LiveEngineNode, blocks: Sequence[int], whole: Any) -> None:
    """The same the other way; `whole` fills these blocks."""
    size = node.config.shape.block_size
    for heads, view in _views(node):
        shard = whole[:, :, heads.start : heads.stop]
        reshaped = shard.reshape(*shard.shape[:3], len(blocks), size, shard.shape[-1])
        view[:, :, list(blocks)] = reshaped.transpose(0, 1, 3, 2, 4, 5)


def _views(node: LiveEngineNode) -> Iterator[tuple[range, Any]]:
    """`[layers, 2, blocks, heads, tokens, cell_bytes]` of each rank, and which heads those are."""
    shape = node.config.shape
    for number, rank in enumerate(node.computed_in()):
        memory = rank.memory
        view = np.frombuffer(rank.view, np.uint8, rank.kv_bytes).reshape(
            memory.num_layers, 2, memory.num_blocks, memory.num_heads, memory.block_size, memory.cell_bytes
        )
        yield heads_of_rank(shape.stored_heads, node.config.info.shards.tp, number), view

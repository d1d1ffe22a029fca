"""The layers and heads that each rank of an engine keeps, with all ranks of all pipeline stages in one process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape, heads_of_rank, stage_layers


class Shard(NamedTuple):
    layers: range
    heads: range


def shards(shape: KvShape, memories: Seq[RankMemory]) -> list[Shard]:
    """Return a shard for each memory. Memories are in the order of ranks: stage by stage, and in each by TP rank."""
    # Each layer is kept by the TP ranks of its stage.
    tp = sum(memory.num_layers for memory in memories) // shape.num_layers
    stages = stage_layers(shape.num_layers, len(memories) // tp)
    return [Shard(layers, heads_of_rank(shape.stored_heads, tp, rank)) for layers in stages for rank in range(tp)]

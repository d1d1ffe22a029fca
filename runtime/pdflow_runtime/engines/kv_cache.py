"""An engine's KV cache as tensors over registered memory, laid out for each rank as in `pdflow/layout/descriptors.py`.

All ranks of an engine live in its process. Each keeps the layers and heads that are its own, in a memory of its own, so
that a transfer sees what it would see of separate ranks; the arithmetic sees all at once, so tokens don't depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape
from pdflow_runtime.engines.device import Cpu, Device
from pdflow_runtime.engines.shards import shards


class KvCache:
    """The cache `[num_layers, 2, num_blocks, kv_heads, block_size, head_dim]`, divided among the ranks."""

    def __init__(
        self,
        shape: KvShape,
        memories: Seq[RankMemory],
        regions: Seq[memoryview | Tensor],
        dtype: torch.dtype,
        device: Device | None = None,
    ):
        """`regions`: each rank's registered memory, in whose bytes its `RankMemory` counts; a tensor of uint8, or
        something with a buffer, which is then shared. `device`: where they lie, a CPU unless it is given."""
        self.block_size = shape.block_size
        self.block_bytes = shape.block_size * shape.tensors_per_layer * shape.stored_heads * shape.cell_bytes
        """Of all heads in one layer."""
        self.dtype = dtype
        self.device: Device = device or Cpu()
        self.num_blocks = min(memory.num_blocks for memory in memories)
        self._ranks = [_Rank(memory, region, dtype) for memory, region in zip(memories, regions, strict=True)]
        self._shards = shards(shape, memories)
        # Where ranks outnumber heads, several keep the same one: all are written, one is read.
        kept = [
            [rank for rank, shard in enumerate(self._shards) if at in shard.layers] for at in range(shape.num_layers)
        ]
        self._written = kept
        self._read = [[*{self._shards[rank].heads.start: rank for rank in ranks}.values()] for ranks in kept]

    def slot_mapping(self, blocks: Tensor, offsets: Tensor) -> list[Tensor]:
        """Return the slots to which `write` puts these tokens' KV, in every layer."""
        return [rank.cells(blocks, offsets) for rank in self._ranks]

    def write(self, layer: int, slot_mapping: Seq[Tensor], kv: Tensor) -> None:
        """Write `kv` `[tokens, 2, kv_heads, head_dim]` to these slots of the layer."""
        for rank in self._written[layer]:
            layers, heads = self._shards[rank]
            shard = kv if len(heads) == kv.shape[2] else kv[:, :, heads.start : heads.stop]
            cells = self._ranks[rank].layer(layer - layers.start, 0)
            cells.index_copy_(0, slot_mapping[rank], shard.reshape(-1, kv.shape[-1]))

    def tables(self, blocks: Tensor) -> list[Tensor]:
        """Return the tables with which `gather` reads `[sequences, blocks]`, in every layer."""
        return [rank.runs(blocks) for rank in self._ranks]

    def gather(self, layer: int, tables: Seq[Tensor]) -> Tensor:
        """Return the layer's KV `[2, sequences, kv_heads, positions, head_dim]`: a copy."""
        shards = [
            self._ranks[rank].gather(layer - self._shards[rank].layers.start, tables[rank])
            for rank in self._read[layer]
        ]
        return shards[0] if len(shards) == 1 else torch.cat(shards, 2)

    def clear(self, blocks: Tensor, offsets: Tensor, layer: int | None = None) -> None:
        """Make these tokens' KV zero, in one layer or in all."""
        for rank, (layers, _) in zip(self._ranks, self._shards, strict=True):
            if layer is None:
                rank.clear(blocks, offsets, range(len(layers)))
            elif layer in layers:
                rank.clear(blocks, offsets, range(layer - layers.start, layer - layers.start + 1))

    def pages(self, layer: int) -> list[Pages]:
        """Return the layer's pages, of each rank that is read. ValueError if heads do not lie apart in a block."""
        return [
            self._ranks[rank].pages(layer - self._shards[rank].layers.start, self._shards[rank].heads)
            for rank in self._read[layer]
        ]


class Pages(NamedTuple):
    """One layer's KV at one rank. A page is one head's part of a block: page `block * step + head` has `block_size`
    rows of K, and as many of V."""

    k: Tensor
    """`[pages * block_size, head_dim]`"""
    v: Tensor
    heads: range
    """The KV heads of the model that the rank keeps."""
    step: int
    """The pages from a block to the next."""


class _Rank:
    """The KV memory of one rank as rows. A cell is a head's part of one token's K or V; where a block's cells of one
    head are neighbours (HND), a row for reading is all of them."""

    def __init__(self, memory: RankMemory, region: memoryview | Tensor, dtype: torch.dtype) -> None:
        self.num_layers = memory.num_layers
        self._memory = memory
        self._width = memory.cell_bytes // dtype.itemsize
        self._read = memory.block_size if memory.order == "HND" else 1
        flat = region.view(dtype) if isinstance(region, Tensor) else torch.frombuffer(region, dtype=dtype)
        flat = flat[memory.region_bases[0] // dtype.itemsize :]
        flat = flat[: len(flat) // (self._read * self._width) * self._read * self._width]
        planes = [
            memory.plane_address(layer, tensor, 0) - memory.region_bases[0]
            for layer in range(memory.num_layers)
            for tensor in range(memory.tensors_per_layer)
        ]
        self._plane = planes[1]
        unit = memory.cell_bytes * self._read
        if planes != [*range(0, planes[1] * len(planes), planes[1])] or memory.block_stride % unit or planes[1] % unit:
            raise ValueError(
                "the regions of a rank's KV must have equal distances, which are multiples of its block size"
            )
        self._cells = flat.view(-1, self._width)
        self._runs = flat.view(-1, self._read * self._width)

    def layer(self, layer: int, read: int) -> Tensor:
        """Return the rows from this layer's first on: cells, or rows for reading if `read`."""
        at = layer * self._memory.tensors_per_layer * self._plane // self._memory.cell_bytes
        return self._runs[at // self._read :] if read else self._cells[at:]

    def pages(self, layer: int, heads: range) -> Pages:
        memory, size = self._memory, self._memory.block_size
        if memory.order != "HND":
            raise ValueError(f"KV in the order {memory.order} has no pages of one head; HND has")
        step = memory.block_stride // (size * memory.cell_bytes)
        count = step * (memory.num_blocks - 1) + memory.num_heads
        k = self.layer(layer, 0)
        v = k[self._plane // memory.cell_bytes :]
        return Pages(k[: count * size], v[: count * size], heads, step)

    def clear(self, blocks: Tensor, offsets: Tensor, layers: range) -> None:
        step = self._memory.tensors_per_layer * self._plane // self._memory.cell_bytes
        at = torch.arange(layers.start, layers.stop, device=blocks.device)[:, None] * step
        self._cells.index_fill_(0, (self.cells(blocks, offsets) + at).flatten(), 0)

    def cells(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return the row numbers of cells in the first layer, for `[tokens, 2, heads]`, flat."""
        memory = self._memory
        cell = memory.cell_bytes
        heads = torch.arange(memory.num_heads, device=blocks.device)
        tensors = torch.arange(memory.tensors_per_layer, device=blocks.device) * (self._plane // cell)
        at = blocks * (memory.block_stride // cell)
        if memory.order == "HND":
            within = (at + offsets)[:, None] + heads * memory.block_size
        else:
            within = (at + offsets * memory.num_heads)[:, None] + heads
        return (within[:, None] + tensors[:, None]).flatten()

    def runs(self, blocks: Tensor) -> Tensor:
        """Return the numbers of the rows for reading in the first layer, `[2, sequences, heads, blocks or
        positions]`."""
        memory = self._memory
        unit = memory.cell_bytes * self._read
        at = blocks[:, None] * (memory.block_stride // unit)
        heads = torch.arange(memory.num_heads, device=blocks.device)[:, None]
        if memory.order == "NHD":
            tokens = torch.arange(memory.block_size, device=blocks.device) * memory.num_heads
            at = (at[..., None] + tokens).flatten(-2)
        tensors = torch.arange(memory.tensors_per_layer, device=blocks.device) * (self._plane // unit)
        return tensors[:, None, None, None] + (at + heads)

    def gather(self, layer: int, table: Tensor) -> Tensor:
        rows = self.layer(layer, 1).index_select(0, table.flatten())
        return rows.view(*table.shape[:3], -1, self._width)

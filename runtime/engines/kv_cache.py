"""An engine's KV cache as tensors over registered memory: where each rank keeps it is `pdflow/layout/descriptors.py`.

All TP ranks of an engine live in its process. Each keeps the heads that are its own, in a memory of its own, so that a
transfer sees what it would see of separate ranks; the arithmetic sees all heads at once, so tokens don't depend on TP.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape, heads_of_rank


class KvCache:
    """`[num_layers, 2, num_blocks, kv_heads, block_size, head_dim]`, in parts by rank."""

    def __init__(
        self, shape: KvShape, memories: Seq[RankMemory], regions: Seq[memoryview | Tensor], dtype: torch.dtype
    ):
        """`regions`: each rank's registered memory, in whose bytes its `RankMemory` counts; a tensor of uint8, or
        something with a buffer, which is then shared."""
        tp = len(memories)
        self.block_size = shape.block_size
        self._views = [_view(memory, region, dtype) for memory, region in zip(memories, regions, strict=True)]
        self._heads = [heads_of_rank(shape.stored_heads, tp, rank) for rank in range(tp)]
        # Where ranks outnumber heads, several keep the same one: all are written, the first is read.
        firsts = {heads.start: view for heads, view in zip(reversed(self._heads), reversed(self._views), strict=True)}
        self._read = [firsts[start] for start in sorted(firsts)]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
        """Put `kv` `[tokens, 2, kv_heads, head_dim]` at these places."""
        for view, heads in zip(self._views, self._heads, strict=True):
            part = kv if len(heads) == kv.shape[2] else kv[:, :, heads.start : heads.stop]
            view[layer][:, blocks, :, offsets] = part

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """`[2, kv_heads, len(blocks) * block_size, head_dim]`: a copy."""
        parts = [view[layer].index_select(1, blocks) for view in self._read]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole.transpose(1, 2).flatten(2, 3)


def _view(memory: RankMemory, region: memoryview | Tensor, dtype: torch.dtype) -> Tensor:
    """`[layers, 2, blocks, heads, block_size, head_dim]` of one rank, as strides over its bytes."""
    flat = region.view(dtype) if isinstance(region, Tensor) else torch.frombuffer(region, dtype=dtype)
    size = dtype.itemsize
    width = memory.cell_bytes // size
    tensors, heads, tokens = memory.tensors_per_layer, memory.num_heads, memory.block_size
    plane = memory.plane_address(0, 0, 0)
    planes = [memory.plane_address(layer, tensor, 0) for layer in range(memory.num_layers) for tensor in range(tensors)]
    step = planes[1] - planes[0]
    if planes != [plane + index * step for index in range(len(planes))] or (plane | step | memory.block_stride) % size:
        raise ValueError("the regions of a rank's KV must lie at equal distances, at multiples of a value's size")
    head, token = (tokens * width, width) if memory.order == "HND" else (width, heads * width)
    return flat.as_strided(
        (memory.num_layers, tensors, memory.num_blocks, heads, tokens, width),
        (tensors * step // size, step // size, memory.block_stride // size, head, token, 1),
        plane // size,
    )

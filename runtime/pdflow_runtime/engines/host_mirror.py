"""A copy of an engine's KV blocks in host memory, for transports that move host memory only (`kv_buffer_device =
"cpu"`, as in vLLM).

A prefill engine stores each layer there as soon as it is computed; a decode engine loads the blocks that have landed
there before it first reads them. The host memory is pinned, so a GPU gathers and scatters the blocks of a layer by two
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from torch import Tensor

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape
from pdflow_runtime.engines.device import Device
from pdflow_runtime.engines.shards import shards
from pdflow_runtime.gpu.pieces import as_rows


class HostMirror:
    """The blocks of every rank: on the device, and in host memory. Args: `kept`, each rank's KV memory on the device,
    and `mirrors`, the same in host memory, as the device reaches it: tensors of uint8."""

    def __init__(
        self, shape: KvShape, memories: Seq[RankMemory], kept: Seq[Tensor], mirrors: Seq[Tensor], device: Device
    ) -> None:
        self._device: Final = device
        self._block_size: Final = shape.block_size
        self._ranks: Final = [
            (shard.layers, _RankMirror(memory, here, there, device))
            for shard, memory, here, there in zip(shards(shape, memories), memories, kept, mirrors, strict=True)
        ]

    def blocks(self, spans: Iterable[tuple[Seq[int], int, int]]) -> Tensor:
        """Return the numbers of the blocks that hold the positions from `start` to `stop` of these block tables."""
        size = self._block_size
        found = {block for table, start, stop in spans for block in table[start // size : -(-stop // size)]}
        return self._device.tensor(sorted(found))

    def store(self, layer: int, blocks: Tensor) -> None:
        """Copy these blocks of a layer to host memory."""
        for layers, rank in self._ranks:
            if layer in layers:
                rank.store(layer - layers.start, blocks)

    def load(self, blocks: Tensor, layer: int | None = None) -> None:
        """Copy these blocks from host memory, in one layer or in all."""
        for layers, rank in self._ranks:
            for own in layers if layer is None else (layer,):
                if own in layers:
                    rank.load(own - layers.start, blocks)


class _RankMirror:
    """The blocks of one rank as rows: blocks of one plane, planes one after the other."""

    def __init__(self, memory: RankMemory, kept: Tensor, mirror: Tensor, device: Device) -> None:
        if memory.nesting != "layer-major" or memory.block_stride != memory.plane_bytes:
            raise ValueError("only memory that lies layer by layer has a copy in host memory")
        self._kept, self._mirror = (_as_blocks(memory, region) for region in (kept, mirror))
        self._planes: Final = memory.tensors_per_layer
        self._num_blocks: Final = memory.num_blocks
        self._offsets: Final = device.tensor(range(self._planes))[:, None] * memory.num_blocks

    def store(self, layer: int, blocks: Tensor) -> None:
        rows = self._rows(layer, blocks)
        self._mirror.index_copy_(0, rows, self._kept.index_select(0, rows))

    def load(self, layer: int, blocks: Tensor) -> None:
        rows = self._rows(layer, blocks)
        self._kept.index_copy_(0, rows, self._mirror.index_select(0, rows))

    def _rows(self, layer: int, blocks: Tensor) -> Tensor:
        return (blocks + layer * self._planes * self._num_blocks + self._offsets).flatten()


def _as_blocks(memory: RankMemory, region: Tensor) -> Tensor:
    planes, nbytes = memory.num_layers * memory.tensors_per_layer, memory.plane_bytes
    base = memory.region_bases[0]
    rows: Tensor = as_rows(region[base : base + planes * memory.num_blocks * nbytes], nbytes)
    return rows

"""vLLM's KV tensors as the memory of a rank: where blocks, heads and tokens lie, and in which allocations.

A layer's tensor has the logical shape [num_blocks, num_kv_heads, block_size, content], in a layout of vLLM's that its
strides tell; an MLA layer has one head. The meaning of a cell's content is the attention backend's. Served are those
backends of which it is known (INTERIORS): cells that hold K and V of one token, from which any run of tokens may be
cut; or, on CPUs, heads of blocks that are packed for the instructions of the CPU, and go whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from pdflow.layout.shapes import KvShape, LayoutError
from pdflow.layout.strided import strided_memory
from pdflow_runtime.nodes.rank_memory import AdoptedMemory
from pdflow_runtime.transports.adopting import Segment
from pdflow_runtime.vllm.instance import KvGroup
from pdflow_runtime.vllm.options import UnsupportedError

Interior: TypeAlias = Literal["cells", "whole heads"]

INTERIORS: Final[Mapping[str, Interior]] = {
    "CPU_ATTN": "whole heads",
    "CPU_MLA": "cells",
    "FLASH_ATTN": "cells",
    "FLASHINFER": "cells",
    "TRITON_ATTN": "cells",
    "FLASH_ATTN_MLA": "cells",
    "FLASHINFER_MLA": "cells",
    "FLASHMLA": "cells",
    "CUTLASS_MLA": "cells",
    "TRITON_MLA": "cells",
}
"""By the name of a backend of vLLM's. CPU_ATTN: csrc/cpu/cpu_attn, K of all tokens of a head and then V, in groups of
32 tokens. The others: vLLM RFC #42082, whose content is K and V of one token, or MLA's latent."""


def in_model_order(caches: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by the numbers in the names of their layers: of several KV cache groups, vLLM has them group by
    group. P and D must count layers alike, and the first ones are computed first."""
    return {name: caches[name] for name in sorted(caches, key=_numbers)}


def _numbers(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def layer_groups(layers: Iterable[str], groups: Sequence[KvGroup]) -> tuple[int, ...]:
    """Return the number of the KV cache group of each layer; nothing if there is one group."""
    if len(groups) == 1:
        return ()
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return tuple([numbers[layer] for layer in layers])


def adopted_memory(
    caches: Mapping[str, Any],
    shape: KvShape,
    tp: int,
    backend: str,
    packing: str,
    num_blocks: int,
    layer_groups: tuple[int, ...] = (),
) -> AdoptedMemory:
    """Return the memory of a rank whose layers have these tensors, in the order of the model's layers.

    Args:
        backend: the name of the attention backend of all layers.
        packing: names what the interior of a block depends on besides the backend, such as the CPU's instructions.
        num_blocks: of vLLM's block pool. Kernel blocks that are smaller than those are not served.
        layer_groups: the number of each layer's KV cache group, if there are several. Layers of different groups may
            share a tensor.

    UnsupportedError for a backend, a layout or a shape that is not served.
    """
    interior = INTERIORS.get(backend)
    if interior is None:
        raise UnsupportedError(f"attention backend {backend} is not supported; {', '.join(INTERIORS)} are")
    tensors = [_four_axes(name, tensor) for name, tensor in caches.items()]
    if len(tensors) != shape.num_layers:
        raise UnsupportedError(f"{len(tensors)} layers have KV tensors, but the model has {shape.num_layers} layers")
    first = tensors[0]
    for name, tensor in zip(caches, tensors, strict=True):
        if tensor.shape != first.shape or tensor.stride() != first.stride() or tensor.dtype != first.dtype:
            raise UnsupportedError(f"the KV of layer {name} differs in shape or layout from that of the first layer")
    blocks, heads, block_size, content = first.shape
    if (blocks, block_size) != (num_blocks, shape.block_size):
        raise UnsupportedError(
            f"the attention backend has {blocks} blocks of {block_size} tokens, vLLM's scheduler {num_blocks} of "
            f"{shape.block_size}: set --block-size {block_size}"
        )
    segments, bases = _allocations(tensors)
    item = first.element_size()
    block_stride, head_stride, token_stride = (stride * item for stride in first.stride()[:3])
    try:
        memory = strided_memory(
            bases,
            block_stride,
            head_stride,
            token_stride,
            num_blocks=blocks,
            block_size=block_size,
            num_heads=heads,
            cell_bytes=content * item,
            opaque=interior == "whole heads",
            layer_groups=layer_groups,
        )
    except LayoutError as error:
        raise UnsupportedError(
            f"this KV cache layout is not supported: {error}; set VLLM_KV_CACHE_LAYOUT=HND"
        ) from None
    expected = shape.cell_bytes, max(1, shape.stored_heads // tp)
    if (memory.cell_bytes, heads) != expected:
        raise UnsupportedError(
            f"a rank keeps {heads} heads of {memory.cell_bytes} bytes a token, expected {expected[1]} of {expected[0]} "
            "bytes: quantised KV with scales in its cells is not supported"
        )
    return AdoptedMemory(memory, segments, " ".join(filter(None, (backend, str(first.dtype), packing))))


def _four_axes(name: str, tensor: Any) -> Any:
    """Return a layer's tensor as [num_blocks, num_kv_heads, block_size, content]; an MLA layer's may have no axis of
    heads."""
    if isinstance(tensor, list | tuple) or tensor.dim() not in (3, 4):
        raise UnsupportedError(
            f"the KV of layer {name} is not one tensor of 4 axes: models with recurrent state are not supported"
        )
    four = tensor if tensor.dim() == 4 else tensor.unsqueeze(1)
    if four.stride(3) != 1:
        raise UnsupportedError(
            f"the KV of layer {name} is not contiguous in its last axis, which no layout of vLLM has"
        )
    return four


def _allocations(tensors: list[Any]) -> tuple[tuple[Segment, ...], list[int]]:
    """Return the allocations that tensors lie in, and where each tensor begins, counted through the allocations."""
    segments: dict[int, Segment] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        gpu = tensor.device.index if tensor.device.type == "cuda" else None
        segments[storage.data_ptr()] = Segment(storage.data_ptr(), storage.nbytes(), gpu)
    starts, total = {}, 0
    for address, segment in segments.items():
        starts[address] = total
        total += segment.nbytes
    bases = [
        starts[tensor.untyped_storage().data_ptr()] + tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        for tensor in tensors
    ]
    return tuple(segments.values()), bases

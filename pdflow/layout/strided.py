"""The memory of a rank that another engine has laid out, from its strides, as torch tells them of a tensor.

vLLM 0.32 names the axes of a KV cache L (layer), B (block), H (head), N (token in a block) and C (K and V of one token
and head, or MLA's latent), and orders them as it likes (vllm/v1/kv_cache_layout.py). What can be moved is a block whose
heads and tokens lie together: LBHNC and BLHNC (order HND), LBNHC and BLNHC (NHD). In LHBNC and BHLNC the heads of a
block lie apart, unless there is one head, or only one block or layer between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.layout.descriptors import PlaneOrder, RankMemory
from pdflow.layout.shapes import LayoutError


def strided_memory(
    bases: Sequence[int],
    block_stride: int,
    head_stride: int,
    token_stride: int,
    *,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    cell_bytes: int,
    tensors_per_layer: int = 1,
    opaque: bool = False,
    layer_groups: tuple[int, ...] = (),
) -> RankMemory:
    """Return the memory of a rank whose blocks, heads and tokens lie at these distances from each other, in bytes.

    `bases` are the addresses of block 0 of each layer; with several tensors per layer, of each of them, layer by layer.
    The `cell_bytes` of one token and head must lie together. `opaque`: what lies inside a head of a block is not known,
    so only whole ones are moved. `layer_groups`: as a RankMemory has them. LayoutError for a layout with gaps inside a
    block.
    """
    for name, value in (
        ("num_blocks", num_blocks),
        ("block_size", block_size),
        ("num_heads", num_heads),
        ("cell_bytes", cell_bytes),
        ("tensors_per_layer", tensors_per_layer),
    ):
        if value < 1:
            raise LayoutError(f"{name} is {value}: it must be 1 or more")
    if not bases or len(bases) % tensors_per_layer or min(bases) < 0:
        raise LayoutError(
            f"{len(bases)} regions of {tensors_per_layer} per layer, the first at {min(bases, default=0)}: "
            "each layer needs all of its regions, at addresses of 0 or more"
        )
    if layer_groups and len(layer_groups) * tensors_per_layer != len(bases):
        raise LayoutError(f"{len(layer_groups)} layers are in KV cache groups, and {len(bases)} regions are given")
    order = _order(head_stride, token_stride, block_size, num_heads, cell_bytes, opaque)
    plane_bytes = block_size * num_heads * cell_bytes
    if num_blocks > 1 and block_stride < plane_bytes:
        raise LayoutError(f"blocks of {plane_bytes} bytes lie {block_stride} bytes apart: they would overlap")
    return RankMemory(
        region_bases=tuple(bases),
        block_stride=max(block_stride, plane_bytes),
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=len(bases) // tensors_per_layer,
        tensors_per_layer=tensors_per_layer,
        num_heads=num_heads,
        cell_bytes=cell_bytes,
        nesting="layer-major",
        order=order,
        layer_groups=layer_groups,
    )


def _order(
    head_stride: int, token_stride: int, block_size: int, num_heads: int, cell_bytes: int, opaque: bool
) -> PlaneOrder:
    """Return the order inside a plane. A stride that nothing has, as of one head only, may be anything."""
    if _is_dense(((num_heads, head_stride), (block_size, token_stride)), cell_bytes):
        return "opaque" if opaque else "HND"
    if not opaque and _is_dense(((block_size, token_stride), (num_heads, head_stride)), cell_bytes):
        return "NHD"
    raise LayoutError(
        f"in a block of {block_size} tokens and {num_heads} heads, at {cell_bytes} bytes each, heads lie {head_stride} "
        f"bytes apart and tokens {token_stride}: "
        + (
            "a block whose inside is opaque is moved head by head, so choose a layout with each head's tokens together "
            "(LBHNC or BLHNC)"
            if opaque
            else "a block with gaps cannot be moved, so choose a layout with its heads and tokens together (LBHNC, "
            "LBNHC, BLHNC or BLNHC)"
        )
    )


def _is_dense(axes: Sequence[tuple[int, int]], cell_bytes: int) -> bool:
    """True if axes of these (sizes, strides), the outer one first, have no gaps."""
    dense = cell_bytes
    for size, stride in reversed(axes):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return True

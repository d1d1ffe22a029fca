"""Descriptor lists: the (address, length) pairs that a transport is handed for one pair of ranks.

This module decides addresses and how finely a transfer is cut; the runs of tokens come from `pairing`, the slice of
layers and heads from `ranks`. The count has a closed form, because the cost of a transfer is per descriptor as much as
per byte (vLLM RFC #50913) and a simulator must not build the lists.

Two orders of nesting, each with K and V as separate planes (a plane: one of K or V, of one layer, of one block):

- `layer-major` (vLLM's LBHNC): a region per layer and K/V, `[num_blocks, plane]`. At equal TP, one descriptor per
  block, layer and K/V.
- `block-major` (BLHNC): one region, `[num_blocks, num_layers, 2, plane]`. At equal TP, one descriptor per block.

Three orders inside a plane:

- `HND`, `[num_kv_heads, block_size, head_dim]`: a slice of heads of a whole block is contiguous, which is why NIXL
  asks for it when TP differs; a part of a block (a partial last block, or unequal block sizes) is one piece per head.
- `NHD`, `[block_size, num_kv_heads, head_dim]`: a part of a block is contiguous if all heads go; a slice of heads is
  one piece per token.
- `opaque`, as HND, but what lies inside `[block_size, head_dim]` of one head is not known: a part of a block is moved
  whole. vLLM's attention on CPU keeps K of a head's tokens, then V, packed by the ISA in groups of 32 tokens.

A memory with one head, or one token, in a block is in the orders HND and NHD at once.

For unequal block sizes vLLM sends raw pieces of HND planes, and the receiver permutes them afterwards; here bytes
always arrive where they belong. The count of vLLM's raw pieces is that of `NHD` without a head split.

Sources: spec 3.6 (agent metadata: base addresses, block lengths and strides) and spec 1.5; vLLM 0.32's
vllm/v1/attention/backends/cpu_attn.py for `opaque`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from pdflow.layout.pairing import TokenRun, split_size
from pdflow.layout.ranks import Pair
from pdflow.layout.shapes import KvShape, LayoutError, heads_per_rank, stage_layers
from pdflow.protocol.values import Value

Nesting: TypeAlias = Literal["layer-major", "block-major"]
PlaneOrder: TypeAlias = Literal["HND", "NHD", "opaque"]


class RankMemory(Value, frozen=True, gc=False, omit_defaults=True):
    """The memory in which one rank keeps its KV: `num_layers * tensors_per_layer` regions if layer-major, one if
    block-major.

    `block_stride` is the distance in bytes from one block to the next within a region, at least the block's length
    there: a layer-major memory may have each layer's blocks between those of others. Regions of one rank may lie
    anywhere.
    """

    region_bases: tuple[int, ...]
    block_stride: int
    num_blocks: int
    block_size: int
    num_layers: int
    tensors_per_layer: int
    num_heads: int
    cell_bytes: int
    nesting: Nesting
    order: PlaneOrder
    layer_groups: tuple[int, ...] = ()
    """The KV cache group of each layer, which says whose block table it has; empty if there is one group. Layers of
    different groups may share a region, as a block belongs to one group at a time."""

    @property
    def plane_bytes(self) -> int:
        """Bytes of K or V of one layer of one block, all of this rank's heads."""
        return self.block_size * self.num_heads * self.cell_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes from the first byte of a region to its last one."""
        planes = 1 if self.nesting == "layer-major" else self.num_layers * self.tensors_per_layer
        return (self.num_blocks - 1) * self.block_stride + planes * self.plane_bytes

    def groups_of(self, layer: int, num_layers: int) -> tuple[int, ...]:
        """Return the KV cache groups of so many layers, from this one of the rank's on."""
        return self.layer_groups[layer : layer + num_layers] or (0,) * num_layers

    def plane_address(self, layer: int, tensor: int, block: int) -> int:
        """Return the address of a plane; `layer` counts from this rank's first, `tensor` is 0 for K and 1 for V."""
        plane = layer * self.tensors_per_layer + tensor
        if self.nesting == "layer-major":
            return self.region_bases[plane] + block * self.block_stride
        return self.region_bases[0] + block * self.block_stride + plane * self.plane_bytes


class Descriptor(NamedTuple):
    """Bytes to copy from P's memory to D's."""

    source_address: int
    target_address: int
    length: int


class DescriptorCounter(Value, frozen=True, gc=False):
    """Counts the descriptors that a range of tokens takes between two ranks, from coefficients that never change.

    A run of `unit` tokens takes `per_unit`; a shorter one at the end takes `per_tail + tail_tokens * per_tail_token`.
    Where neighbours are merged, two blocks that follow each other on both sides save `per_joint`. Layers that move the
    last `window_tokens` tokens only take `windowed / of` of that for these tokens, and the others `whole / of`.
    """

    unit: int
    per_unit: int
    per_tail: int
    per_tail_token: int
    per_joint: int = 0
    of: int = 1
    whole: int = 1
    windowed: int = 0
    window_tokens: int = 0
    states: int = 0
    """Descriptors in addition, of states whose size does not depend on tokens."""

    def count(self, num_tokens: int, joints: int = 0) -> int:
        count = self._of_all(num_tokens) - joints * self.per_joint
        if self.windowed:
            # A joint outside the windows saves nothing there; so many blocks are rarely neighbours.
            kept = self._of_all(self.window_tokens) if num_tokens > self.window_tokens else count
            count = (count * self.whole + kept * self.windowed) // self.of
        return count + self.states

    def _of_all(self, num_tokens: int) -> int:
        """Return the descriptors of all layers, nothing merged."""
        full, tail = divmod(num_tokens, self.unit)
        count = full * self.per_unit
        if tail:
            count += self.per_tail + tail * self.per_tail_token
        return count


def joints(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
    """Return how many pairs of blocks, paired by position in the two lists, directly follow the pair before."""
    pairs = zip(source_blocks, source_blocks[1:], target_blocks, target_blocks[1:], strict=False)
    return sum(1 for a, b, c, d in pairs if b - a == 1 == d - c)


def rank_memory(
    shape: KvShape,
    num_blocks: int,
    tp: int,
    pp: int = 1,
    pp_rank: int = 0,
    *,
    nesting: Nesting = "layer-major",
    order: PlaneOrder = "HND",
    base_address: int = 0,
) -> RankMemory:
    """Return the memory of one rank, without gaps from `base_address` on, regions one after the other."""
    layers = len(stage_layers(shape.num_layers, pp)[pp_rank])
    heads = heads_per_rank(shape.stored_heads, tp)
    planes = layers * shape.tensors_per_layer
    plane_bytes = shape.block_size * heads * shape.cell_bytes
    if nesting == "layer-major":
        bases = tuple(base_address + plane * num_blocks * plane_bytes for plane in range(planes))
        stride = plane_bytes
    else:
        bases = (base_address,)
        stride = planes * plane_bytes
    return RankMemory(
        region_bases=bases,
        block_stride=stride,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_layers=layers,
        tensors_per_layer=shape.tensors_per_layer,
        num_heads=heads,
        cell_bytes=shape.cell_bytes,
        nesting=nesting,
        order=order,
    )


def descriptors(
    pair: Pair, source: RankMemory, target: RankMemory, runs: Iterable[TokenRun], *, coalesce: bool = False
) -> list[Descriptor]:
    """Return every descriptor of one pair, region by region if either side is layer-major, else block by block.

    With `coalesce`, neighbours that follow each other on both sides become one (blocks that happen to be consecutive,
    in practice), but none across the border of a region, which may be the border of an allocation. Raises LayoutError
    if the two memories cannot exchange this pair, or a block does not exist.
    """
    order = _check(pair, source, target)
    found = list(_split(pair, source, target, _checked_runs(runs, source, target, order), order))
    if not coalesce:
        return found
    one_region = source.nesting == target.nesting == "block-major"
    return _coalesced(found, len(found) // (1 if one_region else pair.num_layers * source.tensors_per_layer))


def descriptor_counter(pair: Pair, source: RankMemory, target: RankMemory) -> DescriptorCounter:
    """Return the closed form of `len(descriptors(...))`.

    Of coalescing, it counts the descriptors that consecutive blocks of equal size save. Pieces of blocks of unequal
    size may be consecutive too in the order NHD, which is not counted.
    """
    order = _check(pair, source, target)
    unit = split_size(source.block_size, target.block_size)
    planes = pair.num_layers * source.tensors_per_layer
    if order == "NHD" and not _all_heads(pair, source, target):
        return DescriptorCounter(unit, planes * unit, 0, planes)
    per_tail = planes if order == "NHD" else planes * pair.num_heads
    if source.block_size != target.block_size:
        return DescriptorCounter(unit, per_tail, per_tail, 0)
    all_heads = _all_heads(pair, source, target)
    whole = all_heads and source.nesting == target.nesting == "block-major"
    per_unit = 1 if whole else planes
    piece = source.plane_bytes * planes // per_unit
    follow = all_heads and source.block_stride == target.block_stride == piece
    if order == "opaque":
        per_tail = per_unit
    return DescriptorCounter(unit, per_unit, per_tail, 0, per_unit if follow else 0)


def descriptor_count(pair: Pair, source: RankMemory, target: RankMemory, num_tokens: int) -> int:
    """Return `len(descriptors(...))` in O(1) for a range of tokens that starts on a border of both sides' blocks."""
    return descriptor_counter(pair, source, target).count(num_tokens)


def order_between(source: RankMemory, target: RankMemory) -> PlaneOrder:
    """Return the order in which two memories exchange blocks. LayoutError if they have none in common, or blocks of
    unequal size whose inside is not known."""
    found = [memory.order for memory in (source, target) if memory.order == "opaque" or not _is_in_both_orders(memory)]
    if len(set(found)) > 1 or found == ["opaque"]:
        raise LayoutError(
            f"order is {source.order} on prefill and {target.order} on decode: both must run the same model with the "
            "same cache layout"
        )
    order = found[0] if found else source.order
    if order == "opaque" and source.block_size != target.block_size:
        raise LayoutError(
            f"block_size is {source.block_size} on prefill and {target.block_size} on decode: blocks whose inside is "
            "opaque are moved whole, so both must have one size"
        )
    return order


def _is_in_both_orders(memory: RankMemory) -> bool:
    return memory.num_heads == 1 or memory.block_size == 1


def _split(
    pair: Pair, source: RankMemory, target: RankMemory, runs: list[TokenRun], order: PlaneOrder
) -> Iterator[Descriptor]:
    planes = [
        (pair.source_layer + layer, pair.target_layer + layer, tensor)
        for layer in range(pair.num_layers)
        for tensor in range(source.tensors_per_layer)
    ]
    if not source.nesting == target.nesting == "block-major":
        for source_layer, target_layer, tensor in planes:
            for run in runs:
                source_base = source.plane_address(source_layer, tensor, run.source_block)
                target_base = target.plane_address(target_layer, tensor, run.target_block)
                for source_at, target_at, length in _plane_pieces(pair, source, target, run, order):
                    yield Descriptor(source_base + source_at, target_base + target_at, length)
        return
    for run in runs:
        source_base = source.plane_address(pair.source_layer, 0, run.source_block)
        target_base = target.plane_address(pair.target_layer, 0, run.target_block)
        if _all_heads(pair, source, target) and _is_whole(run, source, target, order):
            yield Descriptor(source_base, target_base, len(planes) * source.plane_bytes)
            continue
        for plane in range(len(planes)):
            for source_at, target_at, length in _plane_pieces(pair, source, target, run, order):
                yield Descriptor(
                    source_base + plane * source.plane_bytes + source_at,
                    target_base + plane * target.plane_bytes + target_at,
                    length,
                )


def _is_whole(run: TokenRun, source: RankMemory, target: RankMemory, order: PlaneOrder) -> bool:
    """True if the run takes a whole block of either side."""
    return order == "opaque" or run.tokens == source.block_size == target.block_size


def _plane_pieces(
    pair: Pair, source: RankMemory, target: RankMemory, run: TokenRun, order: PlaneOrder
) -> list[tuple[int, int, int]]:
    """The contiguous pieces of one run within one plane: (source offset, target offset, length), in bytes."""
    cell = source.cell_bytes
    if order != "NHD":
        source_row = source.block_size * cell
        target_row = target.block_size * cell
        if _is_whole(run, source, target, order):
            return [(pair.source_head * source_row, pair.target_head * target_row, pair.num_heads * source_row)]
        return [
            (
                (pair.source_head + head) * source_row + run.source_offset * cell,
                (pair.target_head + head) * target_row + run.target_offset * cell,
                run.tokens * cell,
            )
            for head in range(pair.num_heads)
        ]
    source_row = source.num_heads * cell
    target_row = target.num_heads * cell
    if _all_heads(pair, source, target):
        return [(run.source_offset * source_row, run.target_offset * target_row, run.tokens * source_row)]
    return [
        (
            (run.source_offset + token) * source_row + pair.source_head * cell,
            (run.target_offset + token) * target_row + pair.target_head * cell,
            pair.num_heads * cell,
        )
        for token in range(run.tokens)
    ]


def _all_heads(pair: Pair, source: RankMemory, target: RankMemory) -> bool:
    """True if the pair carries every head that either rank stores, so that whole planes match."""
    return pair.num_heads == source.num_heads == target.num_heads


def _coalesced(found: list[Descriptor], per_region: int) -> list[Descriptor]:
    merged: list[Descriptor] = []
    for at, descriptor in enumerate(found):
        if at % per_region:
            last = merged[-1]
            if (
                last.source_address + last.length == descriptor.source_address
                and last.target_address + last.length == descriptor.target_address
            ):
                merged[-1] = last._replace(length=last.length + descriptor.length)
                continue
        merged.append(descriptor)
    return merged


def _check(pair: Pair, source: RankMemory, target: RankMemory) -> PlaneOrder:
    """Return the order in which the two memories exchange blocks. LayoutError if they cannot exchange this pair."""
    for name in ("cell_bytes", "tensors_per_layer"):
        if getattr(source, name) != getattr(target, name):
            raise LayoutError(
                f"{name} is {getattr(source, name)} on prefill and {getattr(target, name)} on decode: "
                "both must run the same model with the same cache dtype and layout"
            )
    for side, memory, layer, head in (
        ("prefill", source, pair.source_layer, pair.source_head),
        ("decode", target, pair.target_layer, pair.target_head),
    ):
        if layer + pair.num_layers > memory.num_layers or head + pair.num_heads > memory.num_heads:
            raise LayoutError(
                f"pair {pair.p_rank} -> {pair.d_rank} reaches beyond the {memory.num_layers} layers and "
                f"{memory.num_heads} heads of its {side} rank"
            )
    return order_between(source, target)


def _checked_runs(
    runs: Iterable[TokenRun], source: RankMemory, target: RankMemory, order: PlaneOrder
) -> list[TokenRun]:
    checked = list(runs)
    for run in checked:
        if not (0 <= run.source_block < source.num_blocks and 0 <= run.target_block < target.num_blocks):
            raise LayoutError(
                f"block {run.source_block} -> {run.target_block}: prefill has {source.num_blocks} blocks "
                f"and decode {target.num_blocks}"
            )
        if order == "opaque" and (run.source_offset or run.target_offset):
            raise LayoutError(
                f"a run begins {run.source_offset} tokens into a block of prefill and {run.target_offset} into one of "
                "decode: blocks whose inside is opaque are moved whole"
            )
    return checked

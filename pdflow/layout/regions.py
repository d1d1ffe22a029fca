"""Location of a prompt in staging memory (memory beside the KV blocks), as peers have to know it.

Such memory holds prompts in blocks, too, one after the other from token 0, so that bytes go from and to it by the rules
of `pairing` and `descriptors`. Of `pages`, a prompt has some, each with all layers, as of the engine's own. In a `ring`
it has one part for each layer, with its blocks side by side: first all of K, then all of V.

`pdflow/methods/staging.py` decides which prompt has room when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import LayoutError
from pdflow.protocol.values import Value

KvRegionKind: TypeAlias = Literal["pages", "ring"]


class KvRegion(Value, frozen=True, gc=False):
    """Staging memory of one rank. `pages` are blocks of `memory`. For a ring, `memory` says where it begins and how a
    block of one layer is laid out; `ring_bytes` is its length, and parts begin at multiples of `step_bytes`."""

    kind: KvRegionKind
    memory: RankMemory
    ring_bytes: int = 0
    step_bytes: int = 1


def lying(region: KvRegion, extents: Sequence[int], num_tokens: int) -> tuple[RankMemory, Sequence[int]]:
    """Return where a prompt's blocks are: a memory, and which of its blocks, from token 0 on.

    `extents` are page numbers, or steps from the ring's start, one for each layer or more. LayoutError for fewer, and
    for a ring of no length.
    """
    if region.kind == "pages":
        return region.memory, extents
    memory = region.memory
    if region.ring_bytes < 1 or len(extents) < memory.num_layers:
        raise LayoutError(
            f"{len(extents)} parts in a ring of {region.ring_bytes} bytes, for {memory.num_layers} layers"
        )
    count = -(-num_tokens // memory.block_size)
    plane = memory.plane_bytes
    base = memory.region_bases[0]
    bases = tuple(
        [
            base + step * region.step_bytes % region.ring_bytes + tensor * count * plane
            for step in extents[: memory.num_layers]
            for tensor in range(memory.tensors_per_layer)
        ]
    )
    there = RankMemory(
        region_bases=bases,
        block_stride=plane,
        num_blocks=count,
        block_size=memory.block_size,
        num_layers=memory.num_layers,
        tensors_per_layer=memory.tensors_per_layer,
        num_heads=memory.num_heads,
        cell_bytes=memory.cell_bytes,
        nesting="layer-major",
        order=memory.order,
    )
    return there, range(count)

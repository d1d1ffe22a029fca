"""The metadata by which ranks know each other's memory, and which of it a rank accepts from a peer.

It comes in a peer's HELLO. What no engine of this model has is refused there, and harms nobody later.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdflow.layout.descriptors import RankMemory, order_between
from pdflow.layout.regions import KvRegion
from pdflow.layout.shapes import LayoutError
from pdflow.protocol.ids import Shards
from pdflow.protocol.values import Address
from pdflow.protocol.wire.checks import shards_problem
from pdflow.protocol.wire.limits import MAX_NAME_BYTES


class RankMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The description of a rank's memory for a peer: its layout, and how the transport reaches it."""

    memory: RankMemory
    shards: Shards
    words_at: int
    slots: int
    """The number of slots of lease words."""
    transport: str
    reach: bytes
    kv_region: KvRegion | None = None
    """The memory that its prompts are sent from or land in, unless that is the blocks."""
    dtype: str = ""
    """The dtype of its KV; "" if it is not known."""
    void_generation: int = -1
    """The newest generation that the peer which reads this was fenced from: it posts no WRITE into that or an older
    one. Given where the transport's fences close, as these do not refuse what is posted over a later connection."""
    interior: str = ""
    """The layout inside its blocks, where another engine's attention backend decides it (`AdoptedMemory`)."""
    interior_digest: bytes = b""
    """A digest of a block of known content, by which peers see that their interiors are alike; b"" if there is none."""


_decoder: Final = msgspec.msgpack.Decoder(RankMetadata)


def read_metadata(peer: Address, metadata: bytes, rank: Address, ours: RankMetadata) -> RankMetadata:
    """Return a peer's metadata as this rank can use it. ValueError if it does not describe a memory that can be used
    from here, in words that say what to change."""
    try:
        theirs = _decoder.decode(metadata)
    except msgspec.MsgspecError as cause:
        raise ValueError(f"the HELLO of {peer} does not describe its memory: {cause}") from None
    if theirs.transport != ours.transport:
        raise ValueError(
            f"{peer} uses transport {theirs.transport}, {rank} uses {ours.transport}: give both one serve.transport"
        )
    no_engine = f"{peer} describes a KV memory that does not fit this model: give both engines one model"
    if not all(len(text) <= MAX_NAME_BYTES and text.isprintable() for text in (theirs.dtype, theirs.interior)):
        raise ValueError(no_engine)
    _check_dtype(peer, theirs, rank, ours)
    if theirs.interior != ours.interior:
        raise ValueError(
            f"blocks differ inside: {peer} has those of {_named(theirs.interior)}, {rank} of {_named(ours.interior)}: "
            "give both engines one attention backend, KV dtype and kind of CPU"
        )
    if theirs.memory.layer_groups != ours.memory.layer_groups:
        raise ValueError(
            f"{peer} and {rank} have different KV cache groups: give both engines one model "
            "and one setting of the hybrid KV cache manager"
        )
    memories = [theirs.memory] if theirs.kv_region is None else [theirs.memory, theirs.kv_region.memory]
    possible = all(_may_be(memory, ours.memory) for memory in memories)
    if theirs.slots < 1 or shards_problem(theirs.shards) or not possible:
        raise ValueError(no_engine)
    for memory in memories:
        _check_order(peer, memory, rank, ours.memory)
    if theirs.interior_digest and ours.interior_digest and theirs.interior_digest != ours.interior_digest:
        raise ValueError(
            f"{peer} and {rank} store the same keys and values as different bytes: give both engines one version of "
            "vLLM and one kind of CPU or GPU"
        )
    return theirs


def _named(interior: str) -> str:
    return interior or "pdflow's own engine"


def _check_dtype(peer: Address, theirs: RankMetadata, rank: Address, ours: RankMetadata) -> None:
    """Raise ValueError if the peer's KV is of another dtype or size than ours."""
    fix = "give all engines one model.kv_dtype, or model folders with the same dtype in config.json"
    if theirs.dtype and ours.dtype and theirs.dtype != ours.dtype:
        raise ValueError(f"{peer} keeps KV in {theirs.dtype}, {rank} in {ours.dtype}: {fix}")
    cells = theirs.memory.cell_bytes, ours.memory.cell_bytes
    if cells[0] != cells[1]:
        in_dtypes = [f" ({dtype})" if dtype else "" for dtype in (theirs.dtype, ours.dtype)]
        raise ValueError(
            f"{peer} keeps {cells[0]} bytes{in_dtypes[0]} of KV for each token and head, {rank} {cells[1]}"
            f"{in_dtypes[1]}: {fix}, and one head_dim"
        )


def _may_be(theirs: RankMemory, ours: RankMemory) -> bool:
    """True if layouts can be worked out for the peer's memory. Addresses may be anything: a transport knows what lies
    in a region."""
    same = (theirs.tensors_per_layer, theirs.cell_bytes) == (ours.tensors_per_layer, ours.cell_bytes)
    planes = theirs.num_layers * theirs.tensors_per_layer
    bases = len(theirs.region_bases) == (planes if theirs.nesting == "layer-major" else 1)
    return same and bases and min(theirs.block_size, theirs.num_blocks, theirs.num_layers, theirs.num_heads) >= 1


def _check_order(peer: Address, theirs: RankMemory, rank: Address, ours: RankMemory) -> None:
    """Raise ValueError if blocks of the two memories are laid out so that none can be moved between them."""
    try:
        order_between(theirs, ours)
    except LayoutError:
        raise ValueError(
            f"{peer} keeps blocks of {theirs.block_size} tokens in the order {theirs.order}, {rank} of "
            f"{ours.block_size} in {ours.order}: give both engines one KV cache layout, and one block size if that is "
            "opaque"
        ) from None

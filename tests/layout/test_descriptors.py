"""Descriptors applied to byte arrays: D's memory must hold exactly the right cells, and nothing else may change."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdflow.layout.descriptors import (
    Descriptor,
    Nesting,
    PlaneOrder,
    RankMemory,
    descriptor_count,
    descriptor_counter,
    descriptors,
    joints,
    rank_memory,
)
from pdflow.layout.pairing import runs
from pdflow.layout.ranks import Pair, Rule, by_consumer, by_producer, check_tp, writers
from pdflow.layout.shapes import KvShape, LayoutError, MlaDims, heads_of_rank, stage_layers

UNTOUCHED = 0xEE
NUM_BLOCKS = 9


def cell_address(memory: RankMemory, layer: int, tensor: int, block: int, token: int, head: int) -> int:
    """The definition of both nestings and both orders, one cell at a time."""
    plane = layer * memory.tensors_per_layer + tensor
    inner = head * memory.block_size + token if memory.order == "HND" else token * memory.num_heads + head
    if memory.nesting == "layer-major":
        start = memory.region_bases[plane] + block * memory.block_stride
    else:
        start = memory.region_bases[0] + block * memory.block_stride
        start += plane * memory.block_size * memory.num_heads * memory.cell_bytes
    return start + inner * memory.cell_bytes


def content(cell_bytes: int, layer: int, tensor: int, position: int, head: int) -> bytes:
    """Unlike for every cell (fewer than 128 of each), and every byte unlike UNTOUCHED."""
    return bytes((layer, tensor, position, head))[:cell_bytes].ljust(cell_bytes, b"\x7f")


class Transfer:
    """One prompt's KV in the ranks of P, a range of it to be copied to the ranks of D."""

    def __init__(self, draw: st.DrawFn) -> None:
        # Weighted towards what has most to get wrong: head slices, and TP sizes that differ.
        mla = draw(st.sampled_from([False, False, False, True]))
        layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([8, 4, 4, 2, 1]))
        p_size, d_size = draw(st.sampled_from([(4, 4), (3, 3), (2, 4), (4, 2), (3, 1), (1, 1)]))
        dims = MlaDims(3, 1) if mla else None
        self.p_shape = KvShape(layers, heads, 4, 1, p_size, dims)
        self.d_shape = KvShape(layers, heads, 4, 1, d_size, dims)
        self.p_tp, self.d_tp = draw(st.sampled_from([(2, 1), (1, 2), (4, 1), (1, 4), (2, 4), (4, 8), (8, 2), (2, 2)]))
        self.p_pp = draw(st.integers(1, min(3, layers)))
        self.order: PlaneOrder = draw(st.sampled_from(["HND", "NHD"]))
        p_nesting, d_nesting = (draw(st.sampled_from(["layer-major", "block-major"])) for _ in range(2))
        self.start = draw(st.integers(0, 2)) * d_size
        self.num_tokens = draw(st.integers(0, min(NUM_BLOCKS * p_size - self.start, NUM_BLOCKS * d_size)))
        ids = st.permutations(range(NUM_BLOCKS))
        self.p_blocks = draw(ids)[: -(-(self.start + self.num_tokens) // p_size)]
        self.d_blocks = draw(ids)[: -(-self.num_tokens // d_size)]
        self.p_memory = [
            self.spread(draw, rank_memory(self.p_shape, NUM_BLOCKS, self.p_tp, self.p_pp, rank, **how))
            for how in [{"nesting": p_nesting, "order": self.order, "base_address": 24}]
            for rank in range(self.p_pp)
        ]
        self.d_memory = self.spread(
            draw, rank_memory(self.d_shape, NUM_BLOCKS, self.d_tp, nesting=d_nesting, order=self.order)
        )

    def spread(self, draw: st.DrawFn, memory: RankMemory) -> RankMemory:
        """Perhaps pad the blocks, as a real allocator may, and turn the regions round."""
        padding = draw(st.sampled_from([0, 0, 8]))
        stride = memory.block_stride + padding
        bases = [at * stride * NUM_BLOCKS + memory.region_bases[0] for at in range(len(memory.region_bases))]
        if padding:
            bases.reverse()
        return RankMemory(
            tuple(bases),
            stride,
            *(getattr(memory, name) for name in RankMemory.__struct_fields__[2:]),
        )

    def source_bytes(self, p_rank: int) -> bytearray:
        stage = stage_layers(self.p_shape.num_layers, self.p_pp)[p_rank // self.p_tp]
        held = heads_of_rank(self.p_shape.stored_heads, self.p_tp, p_rank % self.p_tp)
        memory = self.p_memory[p_rank // self.p_tp]
        data = bytearray([0xDD]) * (max(memory.region_bases) + NUM_BLOCKS * memory.block_stride)
        size, cell = memory.block_size, memory.cell_bytes
        for at, layer in enumerate(stage):
            for tensor in range(memory.tensors_per_layer):
                for slot, head in enumerate(held):
                    for position in range(len(self.p_blocks) * size):
                        block = self.p_blocks[position // size]
                        address = cell_address(memory, at, tensor, block, position % size, slot)
                        data[address : address + cell] = content(cell, layer, tensor, position, head)
        return data

    def expected(self, d_rank: int) -> bytearray:
        memory = self.d_memory
        data = bytearray([UNTOUCHED]) * (max(memory.region_bases) + NUM_BLOCKS * memory.block_stride)
        size, cell = memory.block_size, memory.cell_bytes
        for layer in range(memory.num_layers):
            for tensor in range(memory.tensors_per_layer):
                for slot, head in enumerate(heads_of_rank(self.d_shape.stored_heads, self.d_tp, d_rank)):
                    for at in range(self.num_tokens):
                        address = cell_address(memory, layer, tensor, self.d_blocks[at // size], at % size, slot)
                        data[address : address + cell] = content(cell, layer, tensor, self.start + at, head)
        return data

    def lists(self, pair: Pair, coalesce: bool = False) -> list[Descriptor]:
        source = self.p_memory[pair.p_rank // self.p_tp]
        paired = runs(
            self.p_blocks, source.block_size, self.d_blocks, self.d_memory.block_size, self.start, self.num_tokens
        )
        return descriptors(pair, source, self.d_memory, paired, coalesce=coalesce)


transfers = st.composite(Transfer)()


@settings(deadline=None, max_examples=400)
@given(transfer=transfers, coalesce=st.booleans(), rule=st.sampled_from(["exactly-once", "vllm"]))
def test_d_holds_exactly_the_right_cells(transfer: Transfer, coalesce: bool, rule: Rule) -> None:
    try:
        check_tp(transfer.p_shape, transfer.p_tp, transfer.d_tp, rule=rule)
    except LayoutError:
        rule = "exactly-once"
    pairs = writers(transfer.p_shape, transfer.p_tp, transfer.p_pp, transfer.d_tp, rule=rule)
    sources = {p_rank: transfer.source_bytes(p_rank) for p_rank in by_producer(pairs)}
    moved = 0
    for d_rank, own in by_consumer(pairs).items():
        expected = transfer.expected(d_rank)
        memory = bytearray([UNTOUCHED]) * len(expected)
        for pair in own:
            found = transfer.lists(pair, coalesce)
            size = sum(descriptor.length for descriptor in found)
            assert size == transfer.num_tokens * pair.bytes_per_token
            moved += size
            for source, target, length in found:
                memory[target : target + length] = sources[pair.p_rank][source : source + length]
        assert memory == expected
    if rule == "exactly-once":
        assert moved == transfer.num_tokens * transfer.d_shape.engine_bytes_per_token(transfer.d_tp)


@settings(deadline=None, max_examples=200)
@given(transfer=transfers)
def test_the_closed_form_counts_the_list(transfer: Transfer) -> None:
    for pair in writers(transfer.p_shape, transfer.p_tp, transfer.p_pp, transfer.d_tp):
        source = transfer.p_memory[pair.p_rank // transfer.p_tp]
        found = transfer.lists(pair)
        assert descriptor_count(pair, source, transfer.d_memory, transfer.num_tokens) == len(found)
        merged = transfer.lists(pair, coalesce=True)
        assert len(merged) <= len(found)
        assert [byte for one in merged for byte in range(one.source_address, one.source_address + one.length)] == [
            byte for one in found for byte in range(one.source_address, one.source_address + one.length)
        ]


@settings(deadline=None, max_examples=400)
@given(transfer=transfers, data=st.data())
def test_the_closed_form_counts_what_is_merged(transfer: Transfer, data: st.DataObject) -> None:
    """Blocks of one size. Nothing is merged where one region runs into the next."""
    assume(transfer.p_shape.block_size == transfer.d_shape.block_size)
    skip = transfer.start // transfer.d_shape.block_size
    for side in ("p_blocks", "d_blocks"):
        blocks = getattr(transfer, side)
        start = data.draw(st.integers(0, NUM_BLOCKS - len(blocks)))
        if data.draw(st.booleans()):
            setattr(transfer, side, list(range(start, start + len(blocks))))
    followers = joints(transfer.p_blocks[skip:], transfer.d_blocks)
    for pair in writers(transfer.p_shape, transfer.p_tp, transfer.p_pp, transfer.d_tp):
        counter = descriptor_counter(pair, transfer.p_memory[pair.p_rank // transfer.p_tp], transfer.d_memory)
        assert counter.count(transfer.num_tokens, followers) == len(transfer.lists(pair, coalesce=True))


def count(shape: KvShape, tp: int, tokens: int, nesting: Nesting, d_tp: int | None = None) -> tuple[int, int]:
    """(descriptors, bytes of the first) of one pair, the tokens rounded up to whole blocks."""
    d_tp = d_tp or tp
    pair = writers(shape, tp, 1, d_tp)[0]
    blocks = -(-tokens // shape.block_size)
    source = rank_memory(shape, blocks, tp, nesting=nesting)
    target = rank_memory(shape, blocks, d_tp, nesting=nesting)
    whole = blocks * shape.block_size
    one = descriptors(pair, source, target, runs([0], shape.block_size, [0], shape.block_size, 0, shape.block_size))
    return descriptor_count(pair, source, target, whole), one[0].length


def test_a_5k_token_pull_is_tens_of_thousands_of_8_kb_descriptors() -> None:
    """vLLM RFC #50913: block size 16 is the trouble, 64 the remedy; block-major needs one descriptor per block."""
    two_heads_per_rank = KvShape(32, 8, 128, 2, 16)  # Llama-3.1-8B at TP4
    assert count(two_heads_per_rank, 4, 5_000, "layer-major") == (313 * 32 * 2, 8192)
    one_head_per_rank = KvShape(80, 8, 128, 2, 16)  # Llama-3.1-70B at TP8
    assert count(one_head_per_rank, 8, 5_000, "layer-major") == (313 * 80 * 2, 4096)
    larger = KvShape(80, 8, 128, 2, 64)
    assert count(larger, 8, 5_000, "layer-major") == (79 * 80 * 2, 16_384)
    assert count(one_head_per_rank, 8, 5_000, "block-major") == (313, 80 * 2 * 4096)


def test_a_head_split_needs_one_descriptor_per_block_layer_and_kv_in_either_nesting() -> None:
    shape = KvShape(32, 8, 128, 2, 16)
    for nesting in ("layer-major", "block-major"):
        assert count(shape, 2, 1_600, nesting, d_tp=4) == (100 * 32 * 2, 2 * 16 * 128 * 2)


def test_consecutive_blocks_coalesce() -> None:
    shape = KvShape(2, 1, 4, 1, 4)
    pair = writers(shape, 1, 1, 1)[0]
    source, target = rank_memory(shape, 8, 1), rank_memory(shape, 8, 1, base_address=1000)
    # Blocks 2, 3 and 4 follow each other on both sides, 6 only on D's: 4 runs become 2 in each of 4 planes.
    paired = list(runs([2, 3, 4, 6], 4, [0, 1, 2, 3], 4, 0, 16))
    assert len(descriptors(pair, source, target, paired)) == 16
    assert len(descriptors(pair, source, target, paired, coalesce=True)) == 8


def test_a_pair_of_pipeline_stages_is_one_piece_of_a_block_major_block() -> None:
    shape = KvShape(8, 1, 4, 1, 4)
    pairs = writers(shape, 1, 2, 1)
    source = [rank_memory(shape, 2, 1, 2, stage, nesting="block-major") for stage in range(2)]
    target = rank_memory(shape, 2, 1, nesting="block-major")
    half = 4 * 2 * 4 * 4
    assert [descriptors(pair, source[pair.p_rank], target, runs([0], 4, [1], 4, 0, 4)) for pair in pairs] == [
        [Descriptor(0, 2 * half, half)],
        [Descriptor(0, 3 * half, half)],
    ]


def test_counter_coefficients_of_unequal_blocks() -> None:
    p_shape, d_shape = KvShape(3, 4, 8, 2, 64), KvShape(3, 4, 8, 2, 16)
    pair = writers(p_shape, 1, 1, 1)[0]
    for order, per_unit in (("HND", 3 * 2 * 4), ("NHD", 3 * 2)):
        source, target = rank_memory(p_shape, 4, 1, order=order), rank_memory(d_shape, 16, 1, order=order)
        counter = descriptor_counter(pair, source, target)
        assert (counter.unit, counter.per_unit, counter.count(40)) == (16, per_unit, 3 * per_unit)


def test_memories_that_do_not_fit_are_named() -> None:
    shape = KvShape(2, 2, 4, 1, 4)
    pair = writers(shape, 1, 1, 1)[0]
    memory = rank_memory(shape, 2, 1)
    fp16 = rank_memory(KvShape(2, 2, 4, 2, 4), 2, 1)
    with pytest.raises(LayoutError, match="cell_bytes is 4 on prefill and 8 on decode"):
        descriptors(pair, memory, fp16, [])
    with pytest.raises(LayoutError, match="order is HND on prefill and NHD on decode"):
        descriptor_count(pair, memory, rank_memory(shape, 2, 1, order="NHD"), 4)
    with pytest.raises(LayoutError, match="beyond the 2 layers and 1 heads of its decode rank"):
        descriptors(pair, memory, rank_memory(shape, 2, 2), [])
    with pytest.raises(LayoutError, match="block 5 -> 0: prefill has 2 blocks"):
        descriptors(pair, memory, memory, runs([5], 4, [0], 4, 0, 4))

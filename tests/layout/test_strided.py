"""Blocks copied between numpy arrays of every layout that vLLM has: D's must hold P's content, and nothing else."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.layout.descriptors import RankMemory, descriptor_counter, descriptors, joints
from pdflow.layout.pairing import runs
from pdflow.layout.ranks import by_consumer, writers
from pdflow.layout.shapes import KvShape, LayoutError, MlaDims, heads_of_rank
from pdflow.layout.strided import strided_memory

LAYOUTS: Final = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vllm/v1/kv_cache_layout.py: the logical axes [L, B, H, N, C] in their physical order."""
HND: Final = ("LBHNC", "BLHNC")
NHD: Final = ("LBNHC", "BLNHC")
UNTOUCHED: Final = 0xEE
BLOCKS: Final = 7
CELL: Final = 4


class Cache:
    """The KV of one rank as an engine allocates it: bytes, and a view of them, [L, B, H, N, C]."""

    def __init__(self, layout: str, layers: int, heads: int, block_size: int, *, gap: int = 0, base: int = 0) -> None:
        """`gap`: layers that others have between ours, or behind them."""
        logical = (layers + gap, BLOCKS, heads, block_size, CELL)
        order = LAYOUTS[layout]
        count = int(np.prod(logical))
        self.bytes = np.full(base + count, UNTOUCHED, np.uint8)
        physical = self.bytes[base:].reshape([logical[axis] for axis in order])
        self.view = physical.transpose(np.argsort(order))[:layers]
        self.bases = [base + layer * self.view.strides[0] for layer in range(layers)]

    def memory(self, *, opaque: bool = False) -> RankMemory:
        _, blocks, heads, size, cell = self.view.shape
        _, block, head, token, _ = self.view.strides
        sizes = {"num_blocks": blocks, "block_size": size, "num_heads": heads, "cell_bytes": cell}
        return strided_memory(self.bases, block, head, token, opaque=opaque, **sizes)


def cells(layers: int, heads: range, positions: range) -> Any:
    """The content of these cells, [L, H, positions, C]: unlike for each, and never UNTOUCHED (below 128 each)."""
    found = np.zeros((layers, len(heads), len(positions), CELL), np.uint8)
    found[..., 0] = np.arange(layers)[:, None, None]
    found[..., 1] = np.array(heads)[None, :, None]
    found[..., 2] = np.array(positions)[None, None, :]
    return found


class Transfer:
    """A prompt in the ranks of P, of which D lacks the tokens from `start` on."""

    def __init__(self, draw: st.DrawFn, *, opaque: bool = False) -> None:
        mla = draw(st.booleans())
        self.p_tp, self.d_tp = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (2, 4)]))
        heads = 1 if mla else draw(st.sampled_from([4, 8, 2, 1]))
        self.layers = draw(st.integers(1, 3))
        sizes = [(4, 4), (1, 1), (2, 2)] + ([] if opaque else [(2, 4), (4, 2), (8, 2), (1, 4)])
        p_size, d_size = draw(st.sampled_from(sizes))
        family = draw(st.sampled_from([HND] if opaque else [HND, NHD]))
        self.opaque = opaque
        dims, width = (MlaDims(3, 1), 9) if mla else (None, CELL // 2)
        self.p_shape, self.d_shape = (
            KvShape(self.layers, heads, width, 1, size, dims, packed=not mla) for size in (p_size, d_size)
        )
        self.start = min(draw(st.integers(0, 2)), BLOCKS * p_size // d_size) * d_size
        self.num_tokens = draw(st.integers(0, min(BLOCKS * p_size - self.start, BLOCKS * d_size)))
        ids = st.permutations(range(BLOCKS)) | st.just(list(range(BLOCKS)))
        self.p_blocks = draw(ids)[: -(-(self.start + self.num_tokens) // p_size)]
        self.d_blocks = draw(ids)[: -(-self.num_tokens // d_size)]
        p_layout, d_layout = draw(st.sampled_from(family)), draw(st.sampled_from(family))
        how = {"gap": draw(st.integers(0, 1)), "base": draw(st.sampled_from([0, 24]))}
        self.p = [self.filled(p_layout, rank, how) for rank in range(self.p_tp)]
        self.d = [
            Cache(d_layout, self.layers, len(heads_of_rank(heads, self.d_tp, rank)), d_size)
            for rank in range(self.d_tp)
        ]
        self.pairs = writers(self.p_shape, self.p_tp, 1, self.d_tp)

    def filled(self, layout: str, rank: int, how: dict[str, int]) -> Cache:
        held = heads_of_rank(self.p_shape.stored_heads, self.p_tp, rank)
        size = self.p_shape.block_size
        cache = Cache(layout, self.layers, len(held), size, **how)
        for at, block in enumerate(self.p_blocks):
            inside = cells(self.layers, held, range(at * size, (at + 1) * size))
            # Opaque: the same bytes, but no cell is where anybody would look for it.
            cache.view[:, block] = inside[..., ::-1, ::-1] if self.opaque else inside
        return cache

    def expected(self, rank: int) -> Any:
        """What the bytes of this rank of D must be."""
        cache, size = self.d[rank], self.d_shape.block_size
        held = heads_of_rank(self.d_shape.stored_heads, self.d_tp, rank)
        before = cache.bytes.copy()
        for at, block in enumerate(self.d_blocks):
            begin = at * size
            end = begin + size if self.opaque else min(begin + size, self.num_tokens)
            inside = cells(self.layers, held, range(self.start + begin, self.start + end))
            cache.view[:, block, :, : end - begin] = inside[..., ::-1, ::-1] if self.opaque else inside
        expected = cache.bytes.copy()
        cache.bytes[:] = before
        return expected


transfers = st.composite(Transfer)()
opaque_transfers = st.composite(lambda draw: Transfer(draw, opaque=True))()


@settings(deadline=None, max_examples=400)
@given(transfer=transfers | opaque_transfers, coalesce=st.booleans())
def test_d_holds_the_content_of_p_whatever_the_layouts(transfer: Transfer, coalesce: bool) -> None:
    followers = joints(transfer.p_blocks[transfer.start // transfer.d_shape.block_size :], transfer.d_blocks)
    for d_rank, own in by_consumer(transfer.pairs).items():
        expected = transfer.expected(d_rank)
        there = transfer.d[d_rank]
        target = there.memory(opaque=transfer.opaque)
        for pair in own:
            here = transfer.p[pair.p_rank]
            source = here.memory(opaque=transfer.opaque)
            found = descriptors(
                pair,
                source,
                target,
                runs(
                    transfer.p_blocks,
                    source.block_size,
                    transfer.d_blocks,
                    target.block_size,
                    transfer.start,
                    transfer.num_tokens,
                ),
                coalesce=coalesce,
            )
            counter = descriptor_counter(pair, source, target)
            if not coalesce:
                assert len(found) == counter.count(transfer.num_tokens)
            elif source.block_size == target.block_size:
                assert len(found) == counter.count(transfer.num_tokens, followers)
            for at, to, length in found:
                there.bytes[to : to + length] = here.bytes[at : at + length]
        assert (there.bytes == expected).all()


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    block_size=st.integers(1, 3),
    opaque=st.booleans(),
)
def test_a_layout_is_moved_or_refused_by_where_its_heads_lie(
    layout: str, layers: int, heads: int, block_size: int, opaque: bool
) -> None:
    cache = Cache(layout, layers, heads, block_size)
    one_head, one_token = heads == 1, block_size == 1
    in_heads = one_head or layout in HND or (layout in NHD and one_token) or (layout == "BHLNC" and layers == 1)
    if in_heads:
        assert cache.memory(opaque=opaque).order == ("opaque" if opaque else "HND")
    elif layout in NHD and not opaque:
        assert cache.memory().order == "NHD"
    else:
        with pytest.raises(LayoutError, match="bytes apart and tokens") as caught:
            cache.memory(opaque=opaque)
        assert "\n" not in str(caught.value)
        assert ("opaque" in str(caught.value)) == opaque


def test_layers_between_each_other_s_blocks_have_a_base_each_and_one_stride() -> None:
    memory = Cache("BLHNC", 3, 2, 4, base=8).memory()
    plane = 2 * 4 * CELL
    assert memory.region_bases == (8, 8 + plane, 8 + 2 * plane)
    assert (memory.block_stride, memory.plane_bytes, memory.nesting) == (3 * plane, plane, "layer-major")


def test_k_and_v_may_be_tensors_of_their_own() -> None:
    memory = strided_memory(
        [0, 1000, 2000, 3000],
        32,
        4,
        8,
        num_blocks=2,
        block_size=4,
        num_heads=2,
        cell_bytes=4,
        tensors_per_layer=2,
    )
    assert (memory.num_layers, memory.order, memory.plane_address(1, 1, 1)) == (2, "NHD", 3032)


def test_one_head_is_in_either_order() -> None:
    """A rank with one head is described as HND, though its engine orders blocks as NHD: a wider peer's are in that."""
    narrow, wide = (Cache("LBNHC", 1, heads, 4) for heads in (1, 4))
    assert (narrow.memory().order, wide.memory().order) == ("HND", "NHD")
    pair = writers(KvShape(1, 4, 2, 1, 4, packed=True), 4, 1, 1)[2]
    paired = list(runs([0], 4, [1], 4, 0, 3))
    found = descriptors(pair, narrow.memory(), wide.memory(), paired)
    assert [(at, to - wide.bases[0]) for at, to, _ in found] == [
        (token * CELL, (16 + token * 4 + 2) * CELL) for token in range(3)
    ]


SIZES: Final = {"num_blocks": 2, "block_size": 4, "num_heads": 2, "cell_bytes": 4}


@pytest.mark.parametrize(
    ("bases", "strides", "sizes", "message"),
    [
        ([], (32, 16, 4), {}, "0 regions of 1 per layer"),
        ([0, 64, 128], (32, 16, 4), {"tensors_per_layer": 2}, "3 regions of 2 per layer"),
        ([-1], (32, 16, 4), {}, "the first at -1"),
        ([0], (31, 16, 4), {}, "blocks of 32 bytes lie 31 bytes apart: they would overlap"),
        ([0], (-32, 16, 4), {}, "they would overlap"),
        ([0], (64, 32, 4), {}, "heads lie 32 bytes apart and tokens 4: a block with gaps cannot be moved"),
        ([0], (64, 16, -4), {}, "tokens -4: a block with gaps"),
        ([0], (32, 16, 4), {"num_heads": 0}, "num_heads is 0"),
        ([0], (32, 16, 4), {"block_size": -4}, "block_size is -4"),
    ],
)
def test_what_cannot_be_moved_is_one_sentence(
    bases: list[int], strides: tuple[int, int, int], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        strided_memory(bases, *strides, **(SIZES | sizes))


def test_opaque_blocks_are_moved_whole_or_not_at_all() -> None:
    pair = writers(KvShape(1, 2, 2, 1, 4, packed=True), 1, 1, 1)[0]
    here = Cache("LBHNC", 1, 2, 4)
    opaque, known = here.memory(opaque=True), here.memory()
    shorter = Cache("LBHNC", 1, 2, 2).memory(opaque=True)
    one_head = Cache("LBHNC", 1, 1, 4)
    with pytest.raises(LayoutError, match=r"block_size is 4 on prefill and 2 on decode: blocks whose inside is opaque"):
        descriptor_counter(pair, opaque, shorter)
    with pytest.raises(LayoutError, match="order is opaque on prefill and HND on decode"):
        descriptor_counter(pair, opaque, known)
    with pytest.raises(LayoutError, match="order is HND on prefill and opaque on decode"):
        descriptor_counter(writers(KvShape(1, 1, 2, 1, 4, packed=True), 1, 1, 1)[0], one_head.memory(), opaque)
    with pytest.raises(LayoutError, match="a run begins 2 tokens into a block of prefill and 0 into one of decode"):
        descriptors(pair, opaque, opaque, runs([0, 1], 4, [0], 2, 2, 2))

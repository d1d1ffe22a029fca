"""Several KV cache groups: each layer's cells must land by its own group's tables, and nothing else may change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.layout.descriptors import PlaneOrder, RankMemory, rank_memory
from pdflow.layout.groups import runs_kept, table_descriptors
from pdflow.layout.pairing import TokenRun
from pdflow.layout.ranks import by_consumer, by_producer, of_layer, writers
from pdflow.layout.shapes import KvShape, LayoutError, heads_of_rank
from pdflow.layout.strided import strided_memory
from pdflow.protocol.values import NO_BLOCK
from tests.layout.test_descriptors import UNTOUCHED, cell_address, content

NUM_BLOCKS = 40
TOKENS = 24


@dataclass(frozen=True)
class Grouped:
    """One prompt at both sides. `windows`: how many of its last tokens each group keeps at D, and P at least."""

    groups: tuple[int, ...]
    """Of each layer."""
    sizes: tuple[int, int]
    """Block sizes of P and D."""
    tps: tuple[int, int]
    order: PlaneOrder
    shares: bool
    """The n-th layers of all groups share their regions, as in vLLM."""
    start: int
    num_tokens: int
    p_tables: tuple[tuple[int, ...], ...]
    d_tables: tuple[tuple[int, ...], ...]

    def shape(self, side: int) -> KvShape:
        return KvShape(len(self.groups), 4, 4, 1, self.sizes[side])

    def memory(self, side: int) -> RankMemory:
        memory = rank_memory(self.shape(side), NUM_BLOCKS, self.tps[side], order=self.order, base_address=8)
        bases = list(memory.region_bases)
        if self.shares:
            seen = [0] * len(self.groups)
            for layer, group in enumerate(self.groups):
                nth, seen[group] = seen[group], seen[group] + 1
                bases[2 * layer : 2 * layer + 2] = memory.region_bases[2 * nth : 2 * nth + 2]
        groups = self.groups if max(self.groups) else ()
        return msgspec.structs.replace(memory, region_bases=tuple(bases), layer_groups=groups)


@st.composite
def grouped(draw: st.DrawFn) -> Grouped:
    count = draw(st.integers(1, 3))
    groups = tuple(draw(st.permutations([*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=2))])))
    p_size, d_size = sizes = draw(st.sampled_from([(2, 2), (4, 4), (4, 2), (2, 4), (3, 1)]))
    start = draw(st.integers(0, 2)) * d_size
    num_tokens = draw(st.integers(1, TOKENS - start))
    p_ids, d_ids = (list(draw(st.permutations(range(NUM_BLOCKS)))) * 2 for _ in range(2))
    p_tables, d_tables = [], []
    for _ in range(count):
        d_count, p_count = -(-num_tokens // d_size), -(-(start + num_tokens) // p_size)
        d_holes = draw(st.integers(0, d_count - 1))
        p_holes = draw(st.integers(0, (start + d_holes * d_size) // p_size))
        p_tables.append((*[NO_BLOCK] * p_holes, *[p_ids.pop() for _ in range(p_count - p_holes)]))
        d_tables.append((*[NO_BLOCK] * d_holes, *[d_ids.pop() for _ in range(d_count - d_holes)]))
    return Grouped(
        groups,
        sizes,
        draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])),
        draw(st.sampled_from(["HND", "NHD"])),
        draw(st.booleans()),
        start,
        num_tokens,
        tuple(p_tables),
        tuple(d_tables),
    )


def filled(case: Grouped, side: int, rank: int, background: int) -> bytearray:
    """The memory of a rank that has what its tables say: P all of the prompt, D what lies behind `start`."""
    memory = case.memory(side)
    data = bytearray([background]) * (max(memory.region_bases) + NUM_BLOCKS * memory.block_stride)
    size, start = memory.block_size, case.start if side else 0
    tables = case.d_tables if side else case.p_tables
    for layer, group in enumerate(case.groups):
        for tensor in range(memory.tensors_per_layer):
            for slot, head in enumerate(heads_of_rank(4, case.tps[side], rank)):
                for position in range(start, case.start + case.num_tokens):
                    block = tables[group][(position - start) // size]
                    if block != NO_BLOCK:
                        at = cell_address(memory, layer, tensor, block, (position - start) % size, slot)
                        data[at : at + 4] = content(4, layer, tensor, position, head)
    return data


@settings(deadline=None, max_examples=300)
@given(case=grouped(), data=st.data())
def test_d_holds_exactly_the_right_cells(case: Grouped, data: st.DataObject) -> None:
    """Whole, and in pieces of a layer and some tokens each."""
    pairs = writers(case.shape(0), case.tps[0], 1, case.tps[1])
    sources = {rank: filled(case, 0, rank, 0xDD) for rank in by_producer(pairs)}
    stop = case.start + case.num_tokens
    border = data.draw(st.integers(case.start, stop))
    for rank, own in by_consumer(pairs).items():
        expected = filled(case, 1, rank, UNTOUCHED)
        whole, pieces = bytearray([UNTOUCHED]) * len(expected), bytearray([UNTOUCHED]) * len(expected)
        how = case.memory(0), case.memory(1), case.p_tables, case.d_tables, case.start
        for pair in own:
            for at, to, length in table_descriptors(pair, *how, case.start, stop):
                whole[to : to + length] = sources[pair.p_rank][at : at + length]
            for layer in range(pair.num_layers):
                for first, last in ((case.start, border), (border, stop)):
                    for at, to, length in table_descriptors(of_layer(pair, layer), *how, first, last):
                        pieces[to : to + length] = sources[pair.p_rank][at : at + length]
        assert whole == expected
        assert pieces == expected


TWO = Grouped((0, 1), (4, 4), (1, 1), "HND", True, 0, 12, ((1, 2, 3), (NO_BLOCK, 4, 5)), ((6, 7, 8), (NO_BLOCK, 9, 10)))


def moved(case: Grouped, **changes: Any) -> list[Any]:
    (pair,) = writers(case.shape(0), *(case.tps[0], 1, case.tps[1]))
    p, d = changes.pop("p", case.memory(0)), changes.pop("d", case.memory(1))
    case = replace(case, **changes)
    return list(table_descriptors(pair, p, d, case.p_tables, case.d_tables, 0, 0, case.num_tokens))


def test_blocks_of_both_groups_go_once() -> None:
    """K and V of 3 blocks of one layer and 2 of the other, neighbours merged."""
    memory = TWO.memory(0)
    assert memory.layer_groups == (0, 1)
    assert memory.region_bases[:2] == memory.region_bases[2:]
    found = moved(TWO)
    assert [descriptor.length // memory.plane_bytes for descriptor in found] == [3, 3, 2, 2]


def test_what_only_p_keeps_is_not_moved() -> None:
    assert moved(TWO, p_tables=((1, 2, 3), (11, 4, 5))) == moved(TWO)


def test_a_hole_at_p_where_d_has_a_block_is_an_error() -> None:
    with pytest.raises(LayoutError, match="decode keeps the tokens from 4 on in block 9, and prefill has no block"):
        moved(TWO, p_tables=((1, 2, 3), (NO_BLOCK, NO_BLOCK, 5)))


@pytest.mark.parametrize(
    "changes",
    [
        {"d_tables": ((6, 7, 8),)},
        {"p_tables": ((1, 2, 3),)},
        {"p_tables": ((1, 2, 3),), "d_tables": ((6, 7, 8),)},
        {"d": replace(TWO, groups=(1, 0)).memory(1)},
        {"d": msgspec.structs.replace(TWO.memory(1), layer_groups=())},
        {"p": msgspec.structs.replace(TWO.memory(0), layer_groups=(0,)),
         "d": msgspec.structs.replace(TWO.memory(1), layer_groups=(0,))},
    ],
)  # fmt: skip
def test_tables_and_layers_must_agree(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="KV cache groups"):
        moved(TWO, **changes)


def test_a_table_that_is_too_short_is_an_error() -> None:
    with pytest.raises(LayoutError, match="do not cover"):
        moved(TWO, d_tables=((6, 7, 8), (NO_BLOCK, 9)))


def test_one_table_may_have_holes() -> None:
    assert runs_kept((NO_BLOCK, 3), 4, (NO_BLOCK, 5), 4, 0, 0, 7) == [TokenRun(3, 0, 5, 0, 3)]


def test_strides_have_a_group_for_each_layer_or_none() -> None:
    how = {"num_blocks": 2, "block_size": 4, "num_heads": 1, "cell_bytes": 8}
    assert strided_memory((0, 0), 32, 32, 8, layer_groups=(0, 1), **how).layer_groups == (0, 1)
    with pytest.raises(LayoutError, match="1 layers are in KV cache groups, and 2 regions"):
        strided_memory((0, 0), 32, 32, 8, layer_groups=(0,), **how)

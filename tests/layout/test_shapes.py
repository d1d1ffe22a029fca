"""Bytes and shapes against figures that are published for real models."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.shapes import KvShape, LayoutError, MlaDims, heads_of_rank, stage_layers

LLAMA_8B = KvShape(32, 8, 128, 2, 16)
LLAMA_70B = KvShape(80, 8, 128, 2, 16)
QWEN3_235B = KvShape(94, 4, 128, 2, 16)
DEEPSEEK_V3 = KvShape(61, 128, 128, 2, 64, MlaDims(512, 64))


def test_bytes_per_token_of_known_models() -> None:
    assert LLAMA_8B.bytes_per_token == 128 * 1024
    assert LLAMA_70B.bytes_per_token == 320 * 1024
    assert DEEPSEEK_V3.bytes_per_token == 70_272


def test_more_ranks_than_heads_double_what_is_stored() -> None:
    # Measured: 2 x 6.31 GB at 32,768 tokens.
    assert QWEN3_235B.bytes_per_token * 32_768 == pytest.approx(6.31e9, rel=1e-3)
    assert QWEN3_235B.engine_bytes_per_token(4) == QWEN3_235B.bytes_per_token
    assert QWEN3_235B.engine_bytes_per_token(8) == 2 * QWEN3_235B.bytes_per_token


def test_mla_is_stored_whole_by_every_rank() -> None:
    assert DEEPSEEK_V3.rank_bytes_per_token(8) == DEEPSEEK_V3.bytes_per_token
    assert DEEPSEEK_V3.engine_bytes_per_token(8) == 8 * DEEPSEEK_V3.bytes_per_token


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_235B, DEEPSEEK_V3])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("pp", [1, 3, 4])
def test_a_rank_s_tensor_weighs_what_its_blocks_weigh(shape: KvShape, tp: int, pp: int) -> None:
    total = 0
    for pp_rank in range(pp):
        dims = shape.rank_tensor_shape(10, tp, pp, pp_rank)
        assert math.prod(dims) * shape.bytes_per_value == 10 * shape.rank_block_bytes(tp, pp, pp_rank)
        total += tp * shape.rank_bytes_per_token(tp, pp, pp_rank)
    assert total == shape.engine_bytes_per_token(tp)


def test_packed_cells_hold_k_and_v_and_weigh_as_much() -> None:
    packed = msgspec.structs.replace(LLAMA_8B, packed=True)
    assert (packed.tensors_per_layer, packed.cell_bytes) == (1, 2 * 128 * 2)
    assert packed.bytes_per_token == LLAMA_8B.bytes_per_token
    assert packed.rank_block_bytes(4) == LLAMA_8B.rank_block_bytes(4)
    assert packed.rank_tensor_shape(100, 2) == (32, 1, 100, 16, 4, 256)


def test_tensor_shapes() -> None:
    assert LLAMA_8B.rank_tensor_shape(100, 2) == (32, 2, 100, 16, 4, 128)
    assert QWEN3_235B.rank_tensor_shape(100, 8) == (94, 2, 100, 16, 1, 128)
    assert DEEPSEEK_V3.rank_tensor_shape(100, 8) == (61, 1, 100, 64, 1, 576)


@pytest.mark.parametrize(
    ("num_layers", "pp", "bounds"),
    [
        # The cases of vLLM's own test of get_pp_indices, and its documented 61 layers over 2 and 4.
        (2, 2, [(0, 1), (1, 2)]),
        (3, 2, [(0, 2), (2, 3)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (4, 3, [(0, 1), (1, 3), (3, 4)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),
        (61, 2, [(0, 31), (31, 61)]),
        (61, 4, [(0, 15), (15, 30), (30, 46), (46, 61)]),
    ],
)
def test_uneven_stages_are_vllm_s(num_layers: int, pp: int, bounds: list[tuple[int, int]]) -> None:
    assert [(layers.start, layers.stop) for layers in stage_layers(num_layers, pp)] == bounds


@given(num_layers=st.integers(1, 200), data=st.data())
def test_stages_cover_every_layer_in_order(num_layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, num_layers))
    stages = stage_layers(num_layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_heads_of_ranks() -> None:
    assert [list(heads_of_rank(8, 4, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(heads_of_rank(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: KvShape(0, 8, 128, 2, 16), "num_layers is 0"),
        (lambda: KvShape(1, 8, 128, 2, 16, MlaDims(0, 64)), "MLA dimensions"),
        (lambda: KvShape(1, 8, 128, 2, 16, MlaDims(512, 64), packed=True), "MLA keeps no K and V that could be packed"),
        (lambda: stage_layers(4, 5), "each stage needs at least one layer"),
        (lambda: LLAMA_8B.rank_bytes_per_token(3), "one of the two must divide"),
        (lambda: LLAMA_8B.rank_bytes_per_token(0), "must be 1 or more"),
    ],
)
def test_impossible_shapes_are_named(act: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        act()  # type: ignore[operator]

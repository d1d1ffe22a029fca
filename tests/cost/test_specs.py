"""Sizes derived from a model's dimensions, against numbers published with the models."""

from __future__ import annotations

import cattrs
import pytest

from pdflow.cost.specs import GpuSpec, MlaSpec, ModelSpec
from tests.cost.hardware import LLAMA_8B, LLAMA_70B, QWEN3_32B


def test_parameter_counts_are_those_of_the_model_cards() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_70B.parameters == 70_553_706_496
    # The card says 32,762,123,264; the difference is the query and key norms, 2 * 64 * 128, which are not counted.
    assert QWEN3_32B.parameters == 32_762_123_264 - 2 * 64 * 128
    assert LLAMA_8B.weight_bytes == 2 * 8_030_261_248


def test_kv_bytes_per_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131072
    assert LLAMA_70B.kv_bytes_per_token == 327680
    assert LLAMA_8B.kv_bytes_per_token_per_rank(1) == 131072
    assert LLAMA_8B.kv_bytes_per_token_per_rank(8) == 16384
    # 16 ranks, 8 heads: every head stands on two ranks, and the cluster holds twice the bytes.
    assert LLAMA_8B.kv_bytes_per_token_per_rank(16) == 16384
    assert LLAMA_8B.kv_bytes_per_token_per_rank(2, pp=3) == 131072 // 2 // 32 * 11


def test_mla_keeps_one_latent_vector_on_every_rank() -> None:
    deepseek = ModelSpec(
        name="deepseek-v3-attention",
        num_layers=61,
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
        num_kv_heads=128,
        head_dim=128,
        vocab_size=129280,
        mla=MlaSpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
    )
    assert deepseek.kv_bytes_per_token == 61 * 576 * 2
    assert deepseek.kv_bytes_per_token_per_rank(8) == deepseek.kv_bytes_per_token
    # 187.1 million per layer: the attention share of the published 671 B.
    assert deepseek.attention_parameters_per_layer == 187_105_280


@pytest.mark.parametrize(
    ("tp", "pp", "message"), [(3, 1, "attention heads"), (0, 1, "at least 1"), (1, 33, "32 layers")]
)
def test_impossible_parallelism_is_named(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLAMA_8B.check_parallel(tp, pp)


def test_kv_heads_that_tp_neither_divides_nor_multiplies() -> None:
    odd = ModelSpec(
        name="odd",
        num_layers=2,
        hidden_size=96,
        intermediate_size=96,
        num_heads=12,
        num_kv_heads=6,
        head_dim=8,
        vocab_size=100,
    )
    with pytest.raises(ValueError, match="6 KV heads"):
        odd.kv_bytes_per_token_per_rank(4)


def test_cattrs_reads_both_from_plain_tables() -> None:
    converter = cattrs.Converter(forbid_extra_keys=True)
    gpu = converter.structure(
        {
            "name": "h100-sxm",
            "bf16_flops": 989e12,
            "fp8_flops": 1979e12,
            "hbm_bytes_per_s": 3.35e12,
            "device_bytes": 85_900_000_000,
            "nvlink_bytes_per_s": 450e9,
        },
        GpuSpec,
    )
    assert gpu.ec == 0.65
    model = converter.structure({**converter.unstructure(LLAMA_8B)}, ModelSpec)
    assert model == LLAMA_8B

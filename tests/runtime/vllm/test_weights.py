"""Which instances exchange KV: those whose weights number is the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdflow_runtime.vllm.options import Options
from pdflow_runtime.vllm.weights import weights_of

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def weights(max_model_len: int = 4096, dtype: str = "float16", version: str = "1", **config: Any) -> int:
    hf = {"hidden_size": 64, "max_position_embeddings": 131_072, "_name_or_path": "/somewhere"} | config
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: hf), dtype=dtype, quantization=None, max_model_len=max_model_len
    )
    vllm_config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"))
    return weights_of(vllm_config, Options(weights_version=version))


def test_weights_configuration_and_dtype_count() -> None:
    assert len({weights(), weights(version="2"), weights(dtype="float32"), weights(hidden_size=65)}) == 4


def test_neither_the_folder_nor_the_longest_text_counts() -> None:
    assert weights() == weights(_name_or_path="/elsewhere", max_model_len=8192, max_position_embeddings=8192)
    assert weights(rope_parameters={"rope_type": "default"}) == weights(
        rope_parameters={"rope_type": "default"}, max_model_len=8192, max_position_embeddings=8192
    )


def test_longrope_has_other_keys_where_longer_texts_are_served() -> None:
    short, other, long = (weights(length, rope_parameters=LONGROPE) for length in (2048, 4096, 16_384))
    assert short == other != long
    nested = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert weights(4096, rope_parameters=nested, original_max_position_embeddings=4096) != weights(
        16_384, rope_parameters=nested, original_max_position_embeddings=4096
    )


def test_scaled_rotary_embeddings_depend_on_the_number_of_positions() -> None:
    assert weights(rope_scaling=DYNAMIC) != weights(rope_scaling=DYNAMIC, max_position_embeddings=4096)
    assert weights(4096, rope_scaling=DYNAMIC) == weights(8192, rope_scaling=DYNAMIC)

"""The models that the instances serve: tiny random weights, on disk, the same for the same seed.

| name | is | KV cache |
| --- | --- | --- |
| llama | pdflow's own tiny Llama (4 layers of 256, 4 query and 2 KV heads of 64, vocabulary 512) | full attention |
| gemma | Gemma 3: of three layers, two have a sliding window of 256 tokens | two groups, one with a sliding window |
| deepseek | DeepSeek-V2 with dense layers | one latent of 576 values a token (MLA) |

Fewer positions than pdflow's own models have keep vLLM's start short.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, TypeAlias

Model: TypeAlias = Literal["llama", "gemma", "deepseek"]
MODELS: Final[tuple[Model, ...]] = ("llama", "gemma", "deepseek")

MAX_MODEL_LEN: Final = 2048
VOCABULARY: Final = 512
FIRST_TOKEN: Final = 2
"""Ids below are the beginning and the end of a text."""
BLOCK_SIZES: Final[dict[Model, int]] = {"llama": 128, "gemma": 128, "deepseek": 16}
"""The default block size. vLLM's attention for MLA on CPUs knows 16 alone."""
SPREAD: Final = 0.15
"""The standard deviation of weights: greedy answers wander rather than repeat one token."""

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GEMMA: Final[dict[str, Any]] = _COMMON | {
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
DEEPSEEK: Final[dict[str, Any]] = _COMMON | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
}


def write_model(folder: Path, seed: int = 0, model: Model = "llama") -> Path:
    """Write the model of this name and seed below `folder`, unless it is there, and return its path."""
    path = folder / f"tiny-{model}-{seed}"
    if (path / "config.json").is_file():
        return path
    if model == "llama":
        from pdflow_runtime.engines.tiny import tiny_model  # imports torch: seconds, and only the first time

        tiny_model(path, seed, max_position_embeddings=MAX_MODEL_LEN)
    else:
        tokenizer = write_model(folder, seed)
        _write(path, model, seed)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, path)
    return path


def _write(path: Path, model: Model, seed: int) -> None:
    """Write a model of a class of transformers'."""
    import torch
    import transformers

    torch.manual_seed(seed)
    if model == "gemma":
        made = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA))
    else:
        made = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**DEEPSEEK))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, SPREAD)
    made.save_pretrained(path)


def prompt(tokens: int, seed: int | str) -> list[int]:
    """Return a random prompt of so many token ids, the same for the same seed."""
    random = Random(f"{seed}/{tokens}")
    return [random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(tokens)]

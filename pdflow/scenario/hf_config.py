"""The values of [model] from a Hugging Face `config.json`, over the model families' different keys.

It decides names only. What does not follow from the file (a tokenizer's padding, tensors left in 16 bits by a recipe)
is left to keys of [model], which come on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, Final

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embed", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
}
UNGATED: Final = frozenset(("opt", "bloom", "gpt2", "gpt_neox", "falcon", "starcoder2", "phi"))
"""Values of `model_type` whose MLPs have two matrices."""
TIED_BY_DEFAULT: Final = frozenset(("opt", "bloom", "gpt2", "gemma", "gemma2", "gemma3_text"))
"""Values of `model_type` whose models tie embedding and LM head where the file does not say."""
DTYPES: Final[Mapping[str, str]] = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The names in [model] of the dtypes that models are computed in, by torch's names."""
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII).fullmatch
_HUB_CACHE: Final = re.compile(r"models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]", re.ASCII)
"""The folder of a model in Hugging Face's cache."""
EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")


class HfConfigError(ValueError):
    """The file is not the configuration of a model that pdflow can describe."""


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of [model] without its name. Raises HfConfigError."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        # A multimodal model: what is served by tokens is its language model.
        outer = {key: value for key, value in config.items() if key == "quantization_config"}
        return model_values({**outer, **inner, "dtype": computed_dtype(config)})
    kind = str(config.get("model_type", ""))
    hidden = _whole(config, NAMES["hidden_size"])
    heads = _whole(config, NAMES["num_heads"])
    head_dim = config.get("head_dim")
    values: dict[str, Any] = {
        "num_layers": _whole(config, NAMES["num_layers"]),
        "hidden_size": hidden,
        "intermediate_size": _whole(config, NAMES["intermediate_size"], 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": _whole(config, ("num_key_value_heads", "num_kv_heads"), heads),
        "head_dim": head_dim if isinstance(head_dim, int) else hidden // heads,
        "vocab_size": _whole(config, NAMES["vocab_size"]),
        "tie_embeddings": bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        "gated_mlp": kind not in UNGATED,
        **_dtypes(config),
    }
    if config.get("kv_lora_rank"):
        values["mla"] = {
            key: _whole(config, (key,))
            for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        values["mla"]["q_lora_rank"] = config.get("q_lora_rank") or 0
        values["num_kv_heads"] = heads
    if any(config.get(key) for key in EXPERTS):
        values["moe"] = _experts(config)
    return values


def model_name(config: Mapping[str, Any], parameters: int | None) -> str:
    """Return a name for the model: its id on Hugging Face if the file has one, else its architecture and its size.

    `_name_or_path` is an id such as "meta-llama/Llama-3.1-8B", or a path, of which only the last part is the model's.
    """
    path = config.get("_name_or_path")
    if isinstance(path, str) and (name := _name_in(path)):
        return name
    inner = config.get("text_config")
    kind = config.get("model_type") or (inner.get("model_type") if isinstance(inner, Mapping) else None)
    classes = config.get("architectures")
    if not kind and isinstance(classes, list) and classes:
        kind = str(classes[0]).removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()
    return f"{kind or 'model'}-{_size(parameters)}" if parameters else str(kind or "model")


def _name_in(path: str) -> str:
    cached = _HUB_CACHE.search(path)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if _HUB_ID(path):
        return path
    return PureWindowsPath(path).name  # which splits at both kinds of slashes


def _size(parameters: int) -> str:
    """Format a number of parameters as model names have it: "8.0B", "494M"."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{max(1, round(parameters / 1e6))}M"


def computed_dtype(config: Mapping[str, Any]) -> str | None:
    """Return torch's name of the dtype that the model is to be computed in, which is also that of its KV; None if the
    file names none that anything is computed in. `dtype` is what newer files say for `torch_dtype`, and counts as
    transformers has it; a multimodal model's is that of its language model."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and (dtype := computed_dtype(inner)) is not None:
        return dtype
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in DTYPES else None


def _whole(config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise HfConfigError(f"has no {keys[0]}: is it the config.json of a language model?")
    return default


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    size = _whole(config, ("moe_intermediate_size", "intermediate_size"))
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * size
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise HfConfigError("mixes layers with and without experts, which [model] does not support")
    return {
        "num_experts": _whole(config, EXPERTS),
        "experts_per_token": _whole(config, ("num_experts_per_tok", "num_experts_per_token")),
        "expert_intermediate_size": size,
        "shared_intermediate_size": shared,
        "dense_layers": config.get("first_k_dense_replace") or 0,
    }


def _dtypes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes of weights, products and KV. Quantised checkpoints leave the embeddings in 16 bits."""
    dtype = computed_dtype(config)
    wide = {"float64": 8.0, "float32": 4.0}.get(dtype or "bfloat16", 2.0)
    found: dict[str, Any] = {"weight_bytes_per_param": wide, "embedding_bytes_per_param": wide}
    if dtype is not None:
        found["kv_dtype"] = DTYPES[dtype]
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return found
    method = str(quantised.get("quant_method", ""))
    bits = quantised.get("bits", quantised.get("w_bit"))
    if method in ("fp8", "fbgemm_fp8"):
        return found | {"weight_bytes_per_param": 1.0, "activation_dtype": "fp8"}
    if isinstance(bits, int) and not isinstance(bits, bool) and 0 < bits <= 8:
        group = quantised.get("group_size", 128)
        scales = (16 + bits) / 8 / group if isinstance(group, int) and group > 0 else 0.0
        return found | {"weight_bytes_per_param": bits / 8 + scales}
    raise HfConfigError(
        f'is quantised by "{method}", which pdflow does not know: remove quantization_config there and set '
        "model.weight_dtype"
    )

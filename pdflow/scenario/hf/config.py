"""The values of [model] from a Hugging Face `config.json`, over the model families' different keys.

It decides names only. What does not follow from the file (a tokenizer's padding) is left to keys of [model], which come
on top. `experts.py` reads mixtures of experts, `quantisation.py` quantised checkpoints, and `unsupported.py` refuses
what [model] cannot describe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, Final

from pdflow.cost.layers import LinearAttentionSpec
from pdflow.cost.specs import MlaSpec, attention_projections
from pdflow.scenario.hf.attention import has_gate, linear_of, sparse_of
from pdflow.scenario.hf.experts import DENSE, experts_of, has_experts
from pdflow.scenario.hf.keys import optional, positive
from pdflow.scenario.hf.layers import layer_kinds, window_note, window_of
from pdflow.scenario.hf.quantisation import Quantisation, quantisation_of
from pdflow.scenario.hf.unsupported import refuse_unsupported

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


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of [model] without its name. Raises HfConfigError."""
    inner = language_model(config)
    if inner is not config:
        return model_values({**inner, "dtype": computed_dtype(config)})
    refuse_unsupported(config)
    kind = str(config.get("model_type", ""))
    hidden = positive(config, NAMES["hidden_size"])
    heads = positive(config, NAMES["num_heads"])
    head_dim = config.get("head_dim")
    values: dict[str, Any] = {
        "num_layers": positive(config, NAMES["num_layers"]),
        "hidden_size": hidden,
        "intermediate_size": positive(config, NAMES["intermediate_size"], 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": positive(config, ("num_key_value_heads", "num_kv_heads"), heads),
        "head_dim": head_dim if isinstance(head_dim, int) else hidden // heads,
        "vocab_size": positive(config, NAMES["vocab_size"]),
        "tie_embeddings": bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        "gated_mlp": kind not in UNGATED,
    }
    if config.get("kv_lora_rank"):
        values["mla"] = {
            key: positive(config, (key,))
            for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        values["mla"]["q_lora_rank"] = optional(config, "q_lora_rank")
        values["num_kv_heads"] = heads
    if has_gate(config):
        values["gated_attention"] = True
    kinds = layer_kinds(config, values["num_layers"])
    for key, found in (
        ("window", window_of(config, kinds)),
        ("linear_attention", linear_of(config, kinds)),
        ("sparse_attention", sparse_of(config, values["num_layers"])),
    ):
        if found is not None:
            values[key] = found
    if has_experts(config):
        values["moe"] = experts_of(config, values["num_layers"])
        values["intermediate_size"] = positive(config, DENSE, values["intermediate_size"])
    return values | _dtypes(config, values)


def model_note(config: Mapping[str, Any]) -> str:
    """Return a sentence on what is counted as more than it is; "" if nothing is. Raises HfConfigError."""
    config = language_model(config)
    kinds = layer_kinds(config, positive(config, NAMES["num_layers"]))
    return window_note(kinds, window_of(config, kinds))


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a multimodal model's language model, which is what is served by tokens; of any other
    model, its own."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    return {**{key: value for key, value in config.items() if key == "quantization_config"}, **inner}


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


def _dtypes(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes of weights, products and KV. Quantised checkpoints leave the embeddings in 16 bits."""
    dtype = computed_dtype(config)
    wide = {"float64": 8.0, "float32": 4.0}.get(dtype or "bfloat16", 2.0)
    found: dict[str, Any] = {"weight_bytes_per_param": wide, "embedding_bytes_per_param": wide}
    if dtype is not None:
        found["kv_dtype"] = DTYPES[dtype]
    quantised = quantisation_of(config)
    if quantised is None:
        return found
    if quantised.kv_dtype:
        found["kv_dtype"] = quantised.kv_dtype
    narrow = quantised.bytes_per_param
    share = 0.0 if quantised.only_experts else _quantised_share(quantised, values)
    if quantised.activation_dtype == "fp4":
        # Only these products have 4 bits: attention is often left in 16, and most of a dense model is not.
        found["activation_dtype"] = "fp4" if share > 0.5 else "bf16"
    elif quantised.activation_dtype:
        found["activation_dtype"] = quantised.activation_dtype
    found["weight_bytes_per_param"] = share * narrow + (1 - share) * wide
    if "moe" in values:
        middle = f"layers.{values['num_layers'] // 2}.mlp.experts"
        found["expert_bytes_per_param"] = wide if quantised.leaves(middle) else narrow
        if quantised.activation_dtype == "fp4":
            found["expert_activation_dtype"] = "bf16" if quantised.leaves(middle) else "fp4"
    return found


def _quantised_share(quantised: Quantisation, values: Mapping[str, Any]) -> float:
    """Return the share of parameters that are quantised, of those that every token passes: attention of the most
    frequent kind, and MLPs."""
    layer = f"layers.{values['num_layers'] // 2}"
    mla = MlaSpec(**values["mla"]) if "mla" in values else None
    heads = values["num_heads"], values["num_kv_heads"], values["head_dim"]
    attention = attention_projections(values["hidden_size"], *heads, mla, values.get("gated_attention", False))
    if "linear_attention" in values:
        linear = LinearAttentionSpec(**values["linear_attention"])
        attention, name = {"": linear.parameters(values["hidden_size"])}, "linear_attn"
    else:
        name = "self_attn"
    shared = values["moe"]["shared_intermediate_size"] if "moe" in values else values["intermediate_size"]
    mlp: int = (3 if values["gated_mlp"] else 2) * values["hidden_size"] * shared
    left = sum(size for each, size in attention.items() if quantised.leaves(f"{layer}.{name}.{each}".rstrip(".")))
    names = ("mlp.shared_experts", "mlp.shared_expert") if "moe" in values else ("mlp",)
    if any(quantised.leaves(f"{layer}.{name}") for name in names):
        left += mlp
    return 1 - left / (sum(attention.values()) + mlp)

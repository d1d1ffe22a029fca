"""Which layers of a model attend to what, by its config.json: to whole contexts, to a window, or by linear attention.

Files name the kind of each layer (`layer_types`), or leave it to a rule of their family. Sources: transformers'
configuration classes of the families named below (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.scenario.hf.keys import HfConfigError, listed, optional

WINDOWS: Final[Mapping[str, str]] = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Kinds of layers that attend to the latest tokens only, and the key that says to how many."""
FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention")
"""Kinds of layers with sparse attention, which other keys describe (`index_topk`)."""
LINEAR_FAMILIES: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` whose linear attention is a gated delta rule; of every few layers the last one is full."""
WINDOW_TOKENS: Final[Mapping[str, int]] = {
    "gpt_oss": 128,
    "llama4_text": 8192,
    **dict.fromkeys(("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral", "olmo3"), 4096),
}
"""By `model_type`: the tokens of a window where the file has no key for them."""
FULL_EVERY: Final[Mapping[str, int]] = {
    "gpt_oss": 2,
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
}
"""By `model_type`: of how many layers the last one attends to whole contexts, where the file does not say."""
UNUSED_BY_DEFAULT: Final = ("qwen", "mimo", "smollm3")
"""What values of `model_type` begin with whose models have a window only if `use_sliding_window` says so."""


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kind of each layer, by the names of `layer_types`. Raises HfConfigError."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if len(kinds) != num_layers:
            raise HfConfigError(f"has {len(kinds)} entries in layer_types and {num_layers} layers")
        return [str(kind) for kind in kinds]
    family = str(config.get("model_type", ""))
    if family in LINEAR_FAMILIES:
        every = optional(config, "full_attention_interval") or 4
        return [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(num_layers)]
    if family == "llama4_text":
        return _llama4(config, num_layers)
    if not _slides(config, family):
        return [FULL] * num_layers
    if config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise HfConfigError(f"has max_window_layers = {str(first)[:40]}, expected a whole number")
        return ["sliding_attention" if layer >= first else FULL for layer in range(num_layers)]
    every = config.get("sliding_window_pattern", FULL_EVERY.get(family, num_layers + 1))
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise HfConfigError(f"has sliding_window_pattern = {str(every)[:40]} and no layer_types, expected one of them")
    return [FULL if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]


def window_of(config: Mapping[str, Any], kinds: list[str]) -> dict[str, int] | None:
    """Return the values of [model.window]; None if no layer has one that a context exceeds. Raises HfConfigError."""
    found = {kind for kind in kinds if kind in WINDOWS}
    if not found:
        return None
    if len(found) > 1:
        raise HfConfigError("has windows of two kinds (layer_types), which [model] does not support")
    [kind] = found
    key = WINDOWS[kind]
    tokens = optional(config, key) or WINDOW_TOKENS.get(str(config.get("model_type", "")), 0)
    if not tokens:
        raise HfConfigError(f"has layers of {kind} and no {key}")
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and 0 < longest <= tokens:
        return None
    window = {"tokens": tokens, "layers": kinds.count(kind)}
    # vLLM keeps whole contexts by default (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE).
    return window | ({"whole_kv": True} if kind == "chunked_attention" else {})


def window_note(kinds: list[str], window: Mapping[str, int] | None) -> str:
    """Return a sentence on what of a window is counted as more than it is; "" if nothing is."""
    if window is None:
        return ""
    if window["layers"] == len(kinds):
        return (
            f"all layers attend to the latest {window['tokens']:,} tokens only: the time of attention counts that, KV "
            "memory and transfers count whole contexts"
        )
    if "chunked_attention" in kinds:
        return (
            f"{window['layers']} of {len(kinds)} layers attend to chunks of {window['tokens']:,} tokens: the time of "
            "attention counts them as windows, up to twice as long in the mean; KV memory and transfers count whole "
            "contexts, as in vLLM by default (model.window.whole_kv)"
        )
    return ""


def _slides(config: Mapping[str, Any], family: str) -> bool:
    """Return whether layers have a sliding window at all."""
    used = config.get("use_sliding_window", not family.startswith(UNUSED_BY_DEFAULT))
    size = config.get("sliding_window", WINDOW_TOKENS.get(family))
    if used and size is not None:
        optional(config, "sliding_window")
    return bool(used and size)


def _llama4(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layers with rotary embeddings attend to chunks, and all do without `attention_chunk_size`."""
    if "attention_chunk_size" in config and not optional(config, "attention_chunk_size"):
        return [FULL] * num_layers
    interval = optional(config, "no_rope_layer_interval") or 4
    rotary = listed(config, "no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(rotary) != num_layers:
        raise HfConfigError(f"has {len(rotary)} entries in no_rope_layers and {num_layers} layers")
    return ["chunked_attention" if each else FULL for each in rotary]

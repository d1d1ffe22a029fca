"""Linear and sparse attention by a model's config.json, of the families whose layers [model] describes.

Sources: transformers' configuration and modelling classes of the families named below (5.24); of the bytes of states
and of indexers' keys, vLLM's MambaStateDtypeCalculator and DeepseekV32IndexerCache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.scenario.hf.keys import HfConfigError, optional, positive
from pdflow.scenario.hf.layers import LINEAR, LINEAR_FAMILIES

SPARSE_FAMILIES: Final = ("deepseek_v32", "glm_moe_dsa")
"""Values of `model_type` whose models have DeepSeek sparse attention."""


def linear_of(config: Mapping[str, Any], kinds: list[str]) -> dict[str, int] | None:
    """Return the values of [model.linear_attention]; None if no layer is of that kind. Raises HfConfigError."""
    layers = kinds.count(LINEAR)
    if not layers:
        return None
    if config.get("model_type") not in LINEAR_FAMILIES:
        raise HfConfigError(f"has layers of {LINEAR} (layer_types), which [model] does not support in this family")
    if layers == len(kinds):
        raise HfConfigError(f"has no layers but those of {LINEAR} (layer_types), which [model] does not support")
    names = {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_head_dim": "linear_key_head_dim",
        "value_head_dim": "linear_value_head_dim",
        "conv_kernel": "linear_conv_kernel_dim",
    }
    return {
        "layers": layers,
        **{name: positive(config, (key,)) for name, key in names.items()},
        "state_bytes_per_value": 4 if config.get("mamba_ssm_dtype") == "float32" else 2,
    }


def has_gate(config: Mapping[str, Any]) -> bool:
    """Return whether the output of attention has a gate."""
    return bool(config.get("attn_output_gate", config.get("model_type") in LINEAR_FAMILIES))


def sparse_of(config: Mapping[str, Any], num_layers: int) -> dict[str, int] | None:
    """Return the values of [model.sparse_attention]; None if attention is not sparse. Raises HfConfigError."""
    if not config.get("index_topk"):
        return None
    if config.get("model_type") not in SPARSE_FAMILIES or not config.get("kv_lora_rank"):
        raise HfConfigError("has sparse attention (index_topk), which [model] does not support in this family")
    positive(config, ("q_lora_rank",))
    return {
        "topk": positive(config, ("index_topk",)),
        "heads": positive(config, ("index_n_heads",)),
        "head_dim": positive(config, ("index_head_dim",)),
        "layers": _indexers(config, num_layers),
    }


def _indexers(config: Mapping[str, Any], num_layers: int) -> int:
    """Return the layers that have an indexer; others take the positions of the layer before (GLM-5.2)."""
    kinds = config.get("indexer_types")
    if kinds is None:
        if config.get("index_topk_pattern"):
            raise HfConfigError("has index_topk_pattern and no indexer_types, which pdflow does not read")
        every = optional(config, "index_topk_freq") or 1
        offset = config.get("index_skip_topk_offset", 2)
        if not isinstance(offset, int):
            raise HfConfigError(f"has index_skip_topk_offset = {str(offset)[:40]}, expected a whole number")
        return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {"full", "shared"}:
        raise HfConfigError(f'has indexer_types, expected "full" or "shared" for each of {num_layers} layers')
    if "full" not in kinds:
        raise HfConfigError("has no layer with an indexer (indexer_types)")
    return kinds.count("full")

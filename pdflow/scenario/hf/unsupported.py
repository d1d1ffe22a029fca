"""Features of models that change their bytes or FLOPs, and that [model] cannot describe: refused by name, since any
figure without them would be wrong, some by a factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.scenario.hf.keys import HfConfigError
from pdflow.scenario.hf.layers import FULL, INDEXED, LINEAR, LINEAR_FAMILIES, WINDOWS

FEATURES: Final[Mapping[str, str]] = {
    "linear_attn_config": "linear attention",
    "hybrid_override_pattern": "state-space layers",
    "layers_block_type": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "sparse_attention_config": "sparse attention",
    "compress_ratios": "compressed attention",
    "hybrid_layer_pattern": "attention heads of two kinds",
    "block_configs": "layers of different sizes",
    "num_kv_shared_layers": "layers that share their KV cache",
    "hidden_size_per_layer_input": "embeddings of their own in each layer",
    "moe_latent_size": "experts in a latent space",
}
"""What each key, if it is there and not empty, says that the model has."""


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise HfConfigError, with the feature and its key, for a model that [model] cannot describe."""
    for key, feature in FEATURES.items():
        if config.get(key):
            raise HfConfigError(f"has {feature} ({key}), which [model] does not support")
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if str(kind) not in (FULL, LINEAR, *INDEXED, *WINDOWS):
            raise HfConfigError(f"has layers of {str(kind)[:40]} (layer_types), which [model] does not support")
    for key in ("full_attention_interval", "linear_num_value_heads"):
        if config.get(key) and config.get("model_type") not in LINEAR_FAMILIES:
            raise HfConfigError(f"has linear attention ({key}), which [model] does not support in this family")
    kinds = config.get("attn_type_list")
    if isinstance(kinds, list) and any(kind != 1 for kind in kinds):
        raise HfConfigError("has linear attention (attn_type_list), which [model] does not support")
    sizes = config.get("global_head_dim"), config.get("head_dim")
    if sizes[0] and sizes[0] != sizes[1]:
        raise HfConfigError("has attention heads of two sizes (global_head_dim), which [model] does not support")

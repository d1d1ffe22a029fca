"""A mixture of experts by its config.json: how many layers have experts, and how wide they and the other MLPs are.

Model families write the same down in different keys. Sources: transformers' configuration classes of each family, as
named below, and the configurations that NVIDIA's aiconfigurator-core 0.12 ships.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.scenario.hf.keys import HfConfigError, listed, optional, positive

EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
SHARED: Final = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
"""The width of all shared experts together."""
DENSE: Final = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
"""The width of an MLP without experts, where `intermediate_size` may be that of an expert."""


def has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in EXPERTS) and config.get("enable_moe_block") is not False


def experts_of(config: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    """Return the values of [model.moe]. Raises HfConfigError."""
    size = positive(config, ("moe_intermediate_size", "intermediate_size"))
    shared = next(filter(None, (optional(config, key) for key in SHARED)), 0)
    if not shared:
        shared = (optional(config, "n_shared_experts") or optional(config, "num_shared_experts")) * size
    if config.get("model_type") == "llama4_text":
        shared = size  # Always one, which no key names (Llama4TextMoe).
    return {
        "num_experts": positive(config, EXPERTS),
        "experts_per_token": positive(config, CHOSEN),
        "expert_intermediate_size": size,
        "shared_intermediate_size": shared,
        "dense_layers": num_layers - sum(_with_experts(config, num_layers)),
    }


def _with_experts(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have experts."""
    kinds, frequency = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if isinstance(kinds, list):  # GLM: "dense" or "sparse"
        return _checked([kind != "dense" for kind in kinds], "mlp_layer_types", num_layers)
    if isinstance(frequency, list):  # MiMo, MiniMax: 0 or 1
        return _checked([bool(each) for each in frequency], "moe_layer_freq", num_layers)
    chosen = config.get("moe_layers")
    if isinstance(chosen, list):  # Llama 4
        return [layer in chosen for layer in range(num_layers)]
    dense, first = listed(config, "mlp_only_layers"), optional(config, "first_k_dense_replace")
    every, last = 1, False
    for key, at_the_end in (
        ("moe_layer_freq", False),  # DeepSeek: of every n layers the first
        ("interleave_moe_layer_step", True),  # Llama 4: the last
        ("decoder_sparse_step", True),  # Qwen: the last
    ):
        if (found := optional(config, key)) > 1:
            every, last = found, at_the_end
    offset = every - 1 if last else 0
    return [layer >= first and layer % every == offset and layer not in dense for layer in range(num_layers)]


def _checked(layers: list[bool], key: str, num_layers: int) -> list[bool]:
    if len(layers) != num_layers:
        raise HfConfigError(f"has {len(layers)} entries in {key} and {num_layers} layers")
    return layers

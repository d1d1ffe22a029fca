"""Quantised checkpoints: the bytes of a parameter, what products are computed in, and the dtype of the KV cache.

Checkpoints leave modules in 16 bits, which they list: the LM head and the embedding always, often attention, and for
gpt-oss all but the experts. The share of attention that is left is counted by its projections' sizes.

Sources: NVIDIA modelopt's hf_quant_config.json, vllm-project/compressed-tensors, OpenAI's gpt-oss, and
`transformers.utils.quantization_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pdflow.scenario.hf.keys import HfConfigError, listed

QUANT_CONFIG: Final = "hf_quant_config.json"
"""The file next to config.json in which modelopt says how a checkpoint is quantised, if config.json does not."""


def _grouped(bits: int, group: int) -> float:
    """Return the bytes of a weight of so many bits, with a scale of 16 bits and a zero for each group (GPTQ, AWQ)."""
    return bits / 8 + (16 + bits) / 8 / group


FP8_METHODS: Final = ("fp8", "fbgemm_fp8")
MODELOPT: Final[Mapping[str, tuple[float, str]]] = {
    "FP8": (1.0, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (1.0, "fp8"),
    "FP8_PB_WO": (1.0, ""),
    "NVFP4": (0.5 + 1 / 16, "fp4"),
    "W4A16_AWQ": (_grouped(4, 128), ""),
    "W4A8_AWQ": (_grouped(4, 128), "fp8"),
}
"""By `quant_algo`: bytes per parameter with its scales, and the dtype of products, "" for 16 bits."""
MXFP4_BYTES: Final = 0.5 + 1 / 32
"""One scale of 8 bits for every 32 weights."""
LEFT_OUT: Final = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
KV_ALGORITHMS: Final[Mapping[str, str]] = {"FP8": "fp8", "INT8": "int8"}


class Quantisation(NamedTuple):
    """How a checkpoint is quantised."""

    bytes_per_param: float
    activation_dtype: str
    """What products are computed in; "": 16 bits."""
    kv_dtype: str
    """The dtype of the KV cache; "" if the checkpoint does not say."""
    left_out: tuple[str, ...]
    """Names, or patterns of names, of modules that are not quantised."""
    only_experts: bool = False

    def leaves(self, name: str) -> bool:
        """Return whether a module is not quantised, by its name from "layers." on."""
        return any(_is_named(name, pattern) for pattern in self.left_out)


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return how a checkpoint is quantised; None if it is not. Raises HfConfigError for a method that is unknown."""
    table = config.get("quantization_config")
    if not isinstance(table, Mapping):
        return None
    inner = table.get("quantization")
    if isinstance(inner, Mapping):
        table = {**table, **inner}
    left_out = tuple(str(each) for key in LEFT_OUT for each in listed(table, key))
    for pattern in left_out:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise HfConfigError(f'leaves out "{pattern}" of what is quantised: {error}') from None
    size, activation, only_experts = _size(table)
    return Quantisation(size, activation, _kv_dtype(table), left_out, only_experts)


def with_quant_config(config: Mapping[str, Any], quant_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with what hf_quant_config.json says, unless it says so itself."""
    if isinstance(config.get("quantization_config"), Mapping) or not quant_config.get("quantization"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **quant_config}}


def _size(table: Mapping[str, Any]) -> tuple[float, str, bool]:
    """Return bytes per parameter, the dtype of products, and whether only experts are quantised."""
    method, algorithm = str(table.get("quant_method") or ""), table.get("quant_algo")
    if method in FP8_METHODS:
        return 1.0, "fp8", False
    if method == "mxfp4":
        return MXFP4_BYTES, "", True
    if algorithm is not None:
        known = MODELOPT.get(str(algorithm).upper())
        if known is None:
            raise HfConfigError(_unknown(str(algorithm)))
        return *known, False
    if isinstance(table.get("config_groups"), Mapping):
        return *_of_groups(table["config_groups"], method), False
    bits = table.get("bits", table.get("w_bit"))
    if not isinstance(bits, int) or isinstance(bits, bool) or not 0 < bits <= 8:
        raise HfConfigError(_unknown(method))
    group = table.get("group_size", 128)
    return _grouped(bits, group) if isinstance(group, int) and group > 0 else bits / 8, "", False


def _of_groups(groups: Mapping[str, Any], method: str) -> tuple[float, str]:
    """Return bytes per parameter and the dtype of products by compressed-tensors' groups, which must be alike."""
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(bits, int) or not 0 < bits <= 8:
            raise HfConfigError(_unknown(method))
        size, of = weights.get("group_size"), str(weights.get("type", ""))
        # A scale has 8 bits where a small group is of 4-bit floats (NVFP4), else 16.
        scale = (1 if of == "float" and bits == 4 else 2) / size if isinstance(size, int) and size > 0 else 0.0
        inputs = group.get("input_activations")
        found.add((bits / 8 + scale, _products(inputs.get("num_bits") if isinstance(inputs, Mapping) else None, of)))
    if len(found) != 1:
        raise HfConfigError(f"is quantised in {len(found)} ways (config_groups), which [model] does not support")
    return found.pop()


def _products(bits: object, of: str) -> str:
    """Return the dtype of products by the bits and the type of activations; "" for 16 bits."""
    if bits == 8:
        return "fp8" if of == "float" else "int8"
    return "fp4" if bits == 4 and of == "float" else ""


def _kv_dtype(table: Mapping[str, Any]) -> str:
    algorithm, scheme = table.get("kv_cache_quant_algo"), table.get("kv_cache_scheme")
    if isinstance(scheme, str):
        algorithm = algorithm or scheme
    if algorithm:
        known = KV_ALGORITHMS.get(str(algorithm))
        if known is None:
            raise HfConfigError(f'has a KV cache in "{algorithm}" (kv_cache_quant_algo), which pdflow does not know')
        return known
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type") == "float" else "int8"
    return ""


def _is_named(name: str, pattern: str) -> bool:
    """Return whether a pattern names this module or one that it belongs to. A pattern may begin with the name of the
    whole model, have wildcards, or be a regular expression behind "re:"."""
    if pattern.startswith("re:"):
        return re.search(pattern.removeprefix("re:").removeprefix("^"), name) is not None
    if "layers." in pattern:
        pattern = pattern[pattern.index("layers.") :]
    elif "." not in pattern.strip("*"):
        return pattern.strip("*") in name.split(".")
    return re.match(re.escape(pattern).replace(r"\*", ".*") + r"($|\.)", name) is not None


def _unknown(method: str) -> str:
    return (
        f'is quantised by "{method}", which pdflow does not know: remove quantization_config there and set '
        "model.weight_dtype"
    )

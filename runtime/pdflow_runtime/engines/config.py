"""A model's configuration, read from the config.json of a Hugging Face folder: the Llama family; any other model is
refused.

Sources: transformers' LlamaConfig and `_compute_llama3_parameters` (modeling_rope_utils.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import attrs

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.layout.shapes import KvShape
from pdflow.scenario.hf.config import computed_dtype

FAMILY: Final = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s that are this one network; of qwen2, with biases on Q, K and V; of qwen3, with norms of the heads of Q
and K."""
BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ModelError(PdflowError):
    """The folder holds no model that can be served. The message says which file, and what of it."""

    exit_code = EXIT_BAD_INPUT


@attrs.frozen(kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary embeddings: low frequencies are divided by `factor`, high ones stay, those between
    are mixed."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@attrs.frozen(kw_only=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    qk_norm: bool = False
    """Whether each head of Q and K is normed before its rotation."""
    dtype: str | None
    """The dtype that config.json names, by torch's name; None if it names none that is computed in."""

    def kv_shape(self, block_size: int, dtype: str) -> KvShape:
        return KvShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim, BYTES[dtype], block_size)


def read_config(folder: Path) -> ModelConfig:
    """Read the configuration of the model in this folder. Raises ModelError if there is none, or the model is not of
    the family."""
    path = folder / "config.json"
    raw = read_json(path)
    try:
        return _config(raw, path, _eos(folder, raw))
    except KeyError as error:
        raise ModelError(f"{path}: {error.args[0]} is missing") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def _config(raw: dict[str, Any], path: Path, eos: frozenset[int]) -> ModelConfig:
    kind = raw.get("model_type")
    if kind not in FAMILY:
        raise ModelError(f"{path}: model_type {kind!r} is not one of {', '.join(FAMILY)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r}: only silu is supported")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantization_config: quantised weights are not supported")
    window = raw.get("sliding_window")
    if window is not None and raw.get("use_sliding_window", kind == "mistral"):
        raise ModelError(f"{path}: sliding_window {window}: sliding windows are not supported")
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_scaling(rope or raw.get("rope_scaling") or {}, path),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        eos_token_ids=eos,
        qk_norm=kind == "qwen3",
        dtype=computed_dtype(raw),
    )


def _scaling(raw: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{path}: rope_scaling {kind!r} is not supported; llama3 is")
    return RopeScaling(
        factor=float(raw["factor"]),
        low_freq_factor=float(raw["low_freq_factor"]),
        high_freq_factor=float(raw["high_freq_factor"]),
        original_max_position_embeddings=raw["original_max_position_embeddings"],
    )


def _eos(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Return the end-of-sequence tokens of generation_config.json, which has all of them, else those of config.json."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)

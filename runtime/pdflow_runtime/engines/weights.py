"""A model's weights, from the *.safetensors of a Hugging Face folder, in the shape that the network multiplies with.

Projections that take the same input are one matrix: Q, K and V; gate and up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdflow_runtime.engines.config import ModelConfig, ModelError
from pdflow_runtime.engines.weight_files import weight_files

DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@attrs.frozen(kw_only=True, eq=False)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None = None
    """`[heads + kv_heads, head_dim]`: the norm of each head of Q and K; None if they have none."""
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """`[2 * intermediate, hidden]`"""
    down: Tensor


@attrs.frozen(kw_only=True, eq=False)
class Weights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    """`[vocab, hidden]`: the embedding itself where the two are tied."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def read_weights(folder: Path, config: ModelConfig, dtype: str, device: str = "cpu") -> Weights:
    """Read the weights of a model. Raises ModelError if files or tensors are missing, or of other shapes than the
    config says, or too large for the device."""
    try:
        return _weights(folder, config, dtype, device)
    except torch.OutOfMemoryError:
        free, whole = torch.cuda.mem_get_info()
        raise ModelError(
            f"{folder}: the GPU has no room for the model's weights: {free >> 20:,} of {whole >> 20:,} MiB are free; "
            "give each engine its own GPU with devices in [[pool]], or use a smaller model"
        ) from None


def _weights(folder: Path, config: ModelConfig, dtype: str, device: str) -> Weights:
    found = _read(folder, DTYPES[dtype], device)
    hidden, q, kv = config.hidden_size, config.num_attention_heads * config.head_dim, 0
    kv = config.num_key_value_heads * config.head_dim

    def take(name: str, *shape: int) -> Tensor:
        if name not in found:
            raise ModelError(f"{folder}: no tensor {name} in its *.safetensors")
        if found[name].shape != shape:
            raise ModelError(
                f"{folder}: {name} has shape {list(found[name].shape)}, expected {list(shape)} by config.json"
            )
        return found.pop(name)

    def qk_norm(attn: str) -> Tensor:
        heads = (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        return torch.cat([take(f"{attn}{x}_norm.weight", config.head_dim).expand(count, -1) for x, count in heads])

    def layer(index: int) -> Layer:
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        biases = f"{attn}q_proj.bias" in found
        return Layer(
            input_norm=take(f"{at}input_layernorm.weight", hidden),
            qkv=torch.cat([take(f"{attn}{x}_proj.weight", q if x == "q" else kv, hidden) for x in "qkv"]),
            qkv_bias=torch.cat([take(f"{attn}{x}_proj.bias", q if x == "q" else kv) for x in "qkv"])
            if biases
            else None,
            qk_norm=qk_norm(attn) if config.qk_norm else None,
            out=take(f"{attn}o_proj.weight", hidden, q),
            mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(
                [take(f"{mlp}{x}_proj.weight", config.intermediate_size, hidden) for x in ("gate", "up")]
            ),
            down=take(f"{mlp}down_proj.weight", hidden, config.intermediate_size),
        )

    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    weights = Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
        norm=take("model.norm.weight", hidden),
        head=embedding if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, hidden),
    )
    unsupported = [name for name in found if name.endswith((".bias", "_norm.weight"))]
    if unsupported:
        raise ModelError(f"{folder}: {unsupported[0]} is not a tensor of this model_type")
    return weights


def _read(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    files = weight_files(folder)
    if not files:
        raise ModelError(f"{folder}: no *.safetensors in this folder")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                    found[name] = file.get_tensor(name).to(dtype)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {error}") from None
    return found

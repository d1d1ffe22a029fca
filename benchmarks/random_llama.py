"""A Llama of a given shape with random weights, for benchmarks of the torch engine."""

from __future__ import annotations

import torch

from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.model import Llama
from pdflow_runtime.engines.weights import Layer, Weights


def random_llama(config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> Llama:
    """Return a model whose embedding is its head, and whose products neither grow nor vanish."""
    hidden, width, inner = config.hidden_size, config.head_dim, config.intermediate_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=dtype, device=device)

    embedding = matrix(config.vocab_size, hidden)
    layers = tuple(
        Layer(
            input_norm=ones(),
            qkv=matrix((config.num_attention_heads + 2 * config.num_key_value_heads) * width, hidden),
            qkv_bias=None,
            out=matrix(hidden, config.num_attention_heads * width),
            mlp_norm=ones(),
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.num_hidden_layers)
    )
    return Llama(config, Weights(embedding=embedding, layers=layers, norm=ones(), head=embedding))


def products(llama: Llama) -> list[torch.Tensor]:
    """Return the matrices of all layers: every weight that a step reads but norms and the head."""
    return [each for layer in llama.weights.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]

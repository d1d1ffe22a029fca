"""A model of a given shape with random weights, made on the GPU, and a runner for it with its KV cache."""

from __future__ import annotations

import attrs
import torch

from pdflow.layout.descriptors import rank_memory
from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.device import Cuda
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.model import Llama
from pdflow_runtime.engines.torch_runner import TorchRunner
from pdflow_runtime.engines.weights import DTYPES, Layer, Weights
from pdflow_runtime.gpu.memory import allocate

ONE_B = ModelConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    eos_token_ids=frozenset(),
    dtype="bfloat16",
)
"""The shape of Llama 3.2 1B (its config.json on Hugging Face), with fewer positions."""


@attrs.frozen(eq=False)
class RandomModel:
    config: ModelConfig
    runner: TorchRunner
    weights_bytes: int
    """Of all weights that a step reads: a tied embedding once."""


def random_model(config: ModelConfig, dtype: str, num_blocks: int, block_size: int) -> RandomModel:
    """Return a model with random weights and a KV cache of so many blocks, on the first GPU."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPES[dtype], device="cuda") * 0.02

    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    q, ones = config.num_attention_heads * config.head_dim, torch.ones(hidden, dtype=DTYPES[dtype], device="cuda")
    layers = tuple(
        Layer(
            input_norm=ones,
            qkv=drawn(q + 2 * kv, hidden),
            qkv_bias=None,
            out=drawn(hidden, q),
            mlp_norm=ones,
            gate_up=drawn(2 * config.intermediate_size, hidden),
            down=drawn(hidden, config.intermediate_size),
        )
        for _ in range(config.num_hidden_layers)
    )
    embedding = drawn(config.vocab_size, hidden)
    weights = Weights(embedding=embedding, layers=layers, norm=ones, head=embedding)
    of_layers = sum(each.nbytes for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
    shape = config.kv_shape(block_size, dtype)
    memory = rank_memory(shape, num_blocks, 1)
    region = allocate(shape.rank_block_bytes(1, 1, 0) * num_blocks, 0)
    cache = KvCache(shape, [memory], [region], DTYPES[dtype], Cuda())
    return RandomModel(config, TorchRunner(Llama(config, weights), cache), of_layers + embedding.nbytes)

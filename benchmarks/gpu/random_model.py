"""A model of a given shape with random weights, made on the GPU, and a runner for it with its KV cache."""

from __future__ import annotations

import attrs
import torch

from benchmarks.random_llama import products, random_llama
from pdflow.layout.descriptors import rank_memory
from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.device import Cuda
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.torch_runner import TorchRunner
from pdflow_runtime.engines.weights import DTYPES
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
    runner: TorchRunner
    weights_bytes: int
    """Of all weights that a step reads: a tied embedding once."""


def random_model(config: ModelConfig, dtype: str, num_blocks: int, block_size: int) -> RandomModel:
    """Return a model with random weights and a KV cache of so many blocks, on the first GPU."""
    torch.manual_seed(0)
    llama = random_llama(config, DTYPES[dtype], "cuda")
    weights_bytes = sum(each.nbytes for each in (*products(llama), llama.weights.head))
    shape = config.kv_shape(block_size, dtype)
    memory = rank_memory(shape, num_blocks, 1)
    region = allocate(shape.rank_block_bytes(1, 1, 0) * num_blocks, 0)
    cache = KvCache(shape, [memory], [region], DTYPES[dtype], Cuda())
    return RandomModel(TorchRunner(llama, cache), weights_bytes)

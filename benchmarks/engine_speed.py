"""What a step of the torch engine takes on this CPU: python benchmarks/engine_speed.py [--model tiny|0.1b|1b]
[--threads N] [--dtype float32|bfloat16]

Beside each step stand the bare matrix products of its linear layers, without norms, attention, cache or scheduling:
what the step would take if all else were free. Weights are random. Times are medians, of CPU time, which a busy machine
changes less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.random_llama import products, random_llama
from pdflow.layout.descriptors import rank_memory
from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.job import GREEDY, TokenRequest, Work
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.model import Llama
from pdflow_runtime.engines.torch_runner import TorchRunner
from pdflow_runtime.engines.weights import DTYPES

BLOCK_SIZE = 16
SHAPES = {
    # hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary
    "tiny": (256, 688, 4, 4, 2, 64, 512),
    "0.1b": (768, 2048, 12, 12, 4, 64, 32000),
    "1b": (2048, 8192, 16, 32, 8, 64, 32000),
}


def model(shape: tuple[int, ...], dtype: torch.dtype) -> Llama:
    hidden, inner, layers, heads, kv_heads, width, vocab = shape
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        eos_token_ids=frozenset(),
        dtype="float32",
    )

    return random_llama(config, dtype)


def median_ms(act: Callable[[], object], least: int = 3, seconds: float = 1.0) -> float:
    act()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        begun = time.process_time()
        act()
        times.append(time.process_time() - begun)
    return statistics.median(times) * 1e3


def products_ms(llama: Llama, rows: int, logits_rows: int) -> float:
    weights = llama.weights
    matrices = products(llama)
    inputs = {width: torch.randn(rows, width).to(weights.dtype) for width in {each.shape[1] for each in matrices}}
    last = torch.randn(logits_rows, weights.head.shape[1]).to(weights.dtype)

    @torch.inference_mode()
    def act() -> None:
        for matrix in matrices:
            F.linear(inputs[matrix.shape[1]], matrix)
        F.linear(last, weights.head)

    return median_ms(act)


def works(sequences: int, start: int, new: int) -> list[Work]:
    each = -(-(start + new) // BLOCK_SIZE)
    tables = [tuple(range(at * each, (at + 1) * each)) for at in range(sequences)]
    return [Work((7,) * new, start, table, TokenRequest(GREEDY, 0), decodes=new == 1) for table in tables]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llama = model(SHAPES[args.model], DTYPES[args.dtype])
    shape = llama.config.kv_shape(BLOCK_SIZE, args.dtype)
    blocks = 32 * -(-1100 // BLOCK_SIZE)
    region = memoryview(bytearray(shape.rank_block_bytes(1) * blocks))
    runner = TorchRunner(llama, KvCache(shape, [rank_memory(shape, blocks, 1)], [region], DTYPES[args.dtype]))
    print(f"{args.model}, {args.dtype}, {args.threads} threads: ms per step, and of its bare matrix products")
    for sequences, start, new in (
        *((count, context, 1) for context in (100, 1000) for count in (1, 4, 16, 32)),
        *((1, start, 512) for start in (0, 512)),
    ):
        step = works(sequences, start, new)
        took = median_ms(lambda step=step: runner.compute(step))  # type: ignore[misc]
        bare = products_ms(llama, sequences * new, sequences)
        what = f"{sequences:>3} decode at {start:>4}" if new == 1 else f"prefill {new} at {start:>4}"
        print(f"{what:<20} {took:9.2f} {bare:9.2f}   {bare / took:4.0%}")


if __name__ == "__main__":
    main()

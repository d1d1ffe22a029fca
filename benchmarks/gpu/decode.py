"""Decoding against the bandwidth of the GPU's memory: a step must read all weights, and the KV of every context.

The limit is that many bytes at the bandwidth of a copy, which counts bytes read and written.
"""

from __future__ import annotations

import random
from time import perf_counter

import torch

from benchmarks.gpu.random_model import ONE_B, random_model
from benchmarks.gpu.timing import copy_bytes_per_s, gpu_us
from pdflow_runtime.engines.job import GREEDY, TokenRequest, Work

STEPS = 60


def decode(sequences: int, block_size: int, dtype: str, context: int) -> dict[str, float]:
    """Return milliseconds of a step: by the clock, on the GPU alone, and the limit."""
    blocks_each = -(-(context + STEPS + 1) // block_size)
    model = random_model(ONE_B, dtype, sequences * blocks_each + 1, block_size)
    numbers = list(range(1, sequences * blocks_each + 1))
    random.Random(0).shuffle(numbers)
    tables = [tuple(numbers[at * blocks_each : (at + 1) * blocks_each]) for at in range(sequences)]
    model.runner.warm_up(sequences)
    asked = TokenRequest(GREEDY, 0)

    def step(at: int) -> list[Work]:
        return [Work((17 * at + row,), context + at, table, asked, True) for row, table in enumerate(tables)]

    for at in range(10):
        model.runner.compute(step(at))
    begun = perf_counter()
    for at in range(10, STEPS):
        model.runner.compute(step(at))
    clock_ms = (perf_counter() - begun) / (STEPS - 10) * 1e3
    graphs = model.runner._graphs
    assert graphs is not None
    size = min(size for size in graphs._graphs if size >= sequences)
    gpu_ms = gpu_us(graphs._graphs[size].graph.replay) / 1e3
    kv_bytes = sequences * context * 2 * ONE_B.num_hidden_layers * ONE_B.num_key_value_heads * ONE_B.head_dim
    kv_bytes *= 4 if dtype == "float32" else 2
    limit_ms = (model.weights_bytes + kv_bytes) / copy_bytes_per_s() * 1e3
    return {"clock_ms": clock_ms, "gpu_ms": gpu_ms, "limit_ms": limit_ms}


def main() -> int:
    print("Decode of a 1B-shaped random model, greedy")
    print("| dtype | sequences | context | block_size | step by the clock | on the GPU | limit | clock / limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dtype, sequences, block_size, context in (
        ("bfloat16", 64, 16, 1024),
        ("bfloat16", 64, 64, 1024),
        ("bfloat16", 64, 16, 4096),
        ("bfloat16", 64, 64, 4096),
        ("bfloat16", 1, 16, 1024),
        ("float16", 64, 16, 1024),
        ("float32", 64, 16, 1024),
    ):
        found = decode(sequences, block_size, dtype, context)
        clock, gpu, limit = found["clock_ms"], found["gpu_ms"], found["limit_ms"]
        print(
            f"| {dtype} | {sequences} | {context:,} | {block_size} | {clock:.2f} ms | {gpu:.2f} ms | {limit:.2f} ms "
            f"| {clock / limit:.2f} |",
            flush=True,
        )
        torch.cuda.empty_cache()
    return 0

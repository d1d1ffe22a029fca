"""A prefill engine's steps with and without a copy of its KV in host memory, and that copy by itself."""

from __future__ import annotations

import mmap
from time import perf_counter

import torch

from benchmarks.gpu.random_model import ONE_B, random_model
from benchmarks.gpu.timing import gpu_us
from pdflow.layout.descriptors import rank_memory
from pdflow_runtime.engines.host_mirror import HostMirror
from pdflow_runtime.engines.job import Work
from pdflow_runtime.engines.torch_runner import TorchRunner
from pdflow_runtime.gpu.memory import pinned

SIZE = 64


def step_ms(runner: TorchRunner, works: list[Work]) -> float:
    for _ in range(3):
        runner.compute(works)
    begun = perf_counter()
    for _ in range(10):
        runner.compute(works)
    return (perf_counter() - begun) / 10 * 1e3


def main() -> int:
    print("A prompt of a 1B-shaped model, bfloat16, blocks of 64 tokens; its KV is copied layer by layer")
    print("| tokens | step | step and copy | copy by itself, to host | back | KV |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tokens in (512, 2048, 8000):
        blocks = -(-tokens // SIZE)
        model = random_model(ONE_B, "bfloat16", blocks, SIZE)
        cache = model.runner._cache
        shape = ONE_B.kv_shape(SIZE, "bfloat16")
        memory = rank_memory(shape, blocks, 1)
        nbytes = shape.rank_block_bytes(1, 1, 0) * blocks
        host = pinned(memoryview(mmap.mmap(-1, nbytes)), 0)
        kept = cache._ranks[0]._cells.view(-1).view(torch.uint8)
        mirror = HostMirror(shape, [memory], [kept], [host], cache.device)
        works = [Work(tuple(range(tokens)), 0, tuple(range(blocks)), None)]
        alone = step_ms(model.runner, works)
        both = step_ms(TorchRunner(model.runner._model, cache, mirror, True), works)
        every = mirror.blocks([(range(blocks), 0, tokens)])
        out = gpu_us(lambda m=mirror, e=every: [m.store(layer, e) for layer in range(ONE_B.num_hidden_layers)], 5)
        back = gpu_us(lambda m=mirror, e=every: m.load(e), 5)
        print(
            f"| {tokens:,} | {alone:.1f} ms | {both:.1f} ms | {out / 1e3:.1f} ms ({nbytes / out / 1e3:.0f} GB/s) "
            f"| {back / 1e3:.1f} ms | {nbytes / 1e6:.0f} MB |",
            flush=True,
        )
    return 0

"""Prompts: tokens per second, and the share of the GPU's arithmetic that this is."""

from __future__ import annotations

from time import perf_counter

from benchmarks.gpu.random_model import ONE_B, random_model
from pdflow_runtime.engines.job import GREEDY, TokenRequest, Work


def main() -> int:
    print("Prefill of a 1B-shaped random model, bfloat16, blocks of 64 tokens")
    print("| prompts x tokens | time | tokens/s | TFLOP/s of the products with weights |")
    print("| --- | --- | --- | --- |")
    for prompts, tokens in ((1, 512), (1, 2048), (1, 8000), (4, 2048)):
        blocks = -(-tokens // 64)
        model = random_model(ONE_B, "bfloat16", prompts * blocks, 64)
        works = [
            Work(tuple(range(tokens)), 0, tuple(range(at * blocks, (at + 1) * blocks)), TokenRequest(GREEDY, 0))
            for at in range(prompts)
        ]
        for _ in range(3):
            model.runner.compute(works)
        begun = perf_counter()
        for _ in range(5):
            model.runner.compute(works)
        elapsed = (perf_counter() - begun) / 5
        rate = prompts * tokens / elapsed
        flops = rate * model.weights_bytes / 1e12
        print(
            f"| {prompts} x {tokens} | {elapsed * 1e3:.1f} ms | {rate:,.0f} | {flops:.0f} |",
            flush=True,
        )
    return 0

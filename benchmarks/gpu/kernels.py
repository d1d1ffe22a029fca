"""The kernels of a decode step of a 1B-shaped model, 64 sequences: products with weights, and what is done to rows."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from benchmarks.gpu.timing import in_graph_us
from pdflow_runtime.engines import rows
from pdflow_runtime.engines.rows import RowFunctions

SEQUENCES = 64


def main() -> int:
    compiled = RowFunctions(torch.device("cuda", 0))
    print("| product | time | read |")
    print("| --- | --- | --- |")
    products = {"qkv": (3072, 2048), "out": (2048, 2048), "gate, up": (16384, 2048), "down": (2048, 8192)}
    for name, (out, inner) in {**products, "head": (128_256, 2048)}.items():
        weights = [torch.randn(out, inner, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        x = torch.randn(SEQUENCES, inner, device="cuda", dtype=torch.bfloat16)
        us = in_graph_us(lambda x=x, weights=weights: [F.linear(x, each) for each in weights]) / len(weights)
        print(f"| {name} | {us:.1f} us | {out * inner * 2 / us / 1e6:.2f} TB/s |", flush=True)
    x = torch.randn(SEQUENCES, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(SEQUENCES, 16384, device="cuda", dtype=torch.bfloat16)
    print("| of rows | torch's calls | compiled |")
    print("| --- | --- | --- |")
    for name, call in (
        ("norm", lambda do: do.norm(x, weight, 1e-5)),
        ("sum and norm", lambda do: do.added_norm(x, x, weight, 1e-5)),
        ("gate", lambda do: do.gated(gate_up)),
    ):
        times = [in_graph_us(lambda call=call, do=do: call(do), 20) for do in (rows, compiled)]
        print(f"| {name} | {times[0]:.1f} us | {times[1]:.1f} us |", flush=True)
    return 0

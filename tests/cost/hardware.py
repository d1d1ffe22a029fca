"""The models and the GPU that the tests of this room count with, written out: presets are another room's."""

from __future__ import annotations

from pdflow.cost.specs import GpuSpec, ModelSpec

LLAMA_8B = ModelSpec(
    name="llama-3.1-8b",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_70B = ModelSpec(
    name="llama-3.1-70b",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
QWEN3_32B = ModelSpec(
    name="qwen3-32b",
    num_layers=64,
    hidden_size=5120,
    intermediate_size=25600,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
)
H100 = GpuSpec(
    name="h100-sxm",
    bf16_flops=989e12,
    fp8_flops=1979e12,
    hbm_bytes_per_s=3.35e12,
    device_bytes=85_900_000_000,
    ec=0.68,
    em=0.77,
    allreduce_bytes_per_s=270e9,
    allreduce_latency_s=10e-6,
)

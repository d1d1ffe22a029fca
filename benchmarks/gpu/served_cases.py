"""Clusters on one GPU, one for each method and each way in which it moves KV between two engines there."""

from __future__ import annotations

from typing import NamedTuple

from pdflow.methods.catalogue import METHODS

WAYS = (("shm", "cpu"), ("tcp", "cpu"), ("nixl", "cpu"), ("nixl", "cuda"), ("cuda-ipc", "cuda"))
"""The transport, and kv_buffer_device: through pinned host memory, or from GPU memory to GPU memory."""
IN_HOST_MEMORY = ("cpu-staged", "kv-store")
"""Methods that keep KV in host memory: a ring, or a store."""
POOL = """
[[pool]]
name = "{name}"
role = "{role}"
replicas = {replicas}
gpu = "h200"
engine = "torch"
device = "cuda"
kv_tokens = 65536
max_num_seqs = 16
max_num_batched_tokens = 2048
"""
SCENARIO = """
[workload]
requests = 1
arrival = {{ process = "constant", rate_rps = 1.0 }}
input_tokens = 64
output_tokens = 16

[model]
kv_dtype = "{dtype}"
weight_dtype = "{dtype}"
{pools}
[transfer]
method = "{method}"
progressive = {progressive}
kv_buffer_device = "{buffer}"

[network]
preset = "tcp-25g"

[router]
on_failure = "retry"
max_attempts = 3

[serve]
model = "{model}"
transport = "{transport}"
"""


class ServedCase(NamedTuple):
    method: str
    transport: str
    buffer: str
    dtype: str = "fp32"
    replicas: int = 1
    alone: bool = False
    progressive: bool = False
    """Whether P sends each layer of each chunk as soon as it is computed."""

    def scenario(self, model: str) -> str:
        roles = [("both", "aggregated")] if self.alone else [("prefill", "prefill"), ("decode", "decode")]
        pools = "".join(POOL.format(name=name, role=role, replicas=self.replicas) for name, role in roles)
        progressive = str(self.progressive).lower()
        return SCENARIO.format(pools=pools, model=model, **self._asdict() | {"progressive": progressive})

    def __str__(self) -> str:
        route = f"{self.transport}, KV buffer on {self.buffer}"
        method = self.method + (", by layer" if self.progressive else "")
        return f"one engine {self.dtype}" if self.alone else f"{method:19} {route:27} {self.dtype}"


def cases(dtype: str = "fp32") -> list[ServedCase]:
    found = [
        ServedCase(method, transport, buffer, dtype)
        for method in METHODS
        for transport, buffer in WAYS
        if buffer == "cpu" or method not in IN_HOST_MEMORY
    ]
    by_layer = [ServedCase("nixl-push", transport, buffer, dtype, progressive=True) for transport, buffer in WAYS]
    return found + by_layer


def alone(dtype: str) -> ServedCase:
    """One engine that computes prompts and answers."""
    return ServedCase("nixl-push", "cuda-ipc", "cuda", dtype, alone=True)

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

    def scenario(self, model: str) -> str:
        roles = [("both", "aggregated")] if self.alone else [("prefill", "prefill"), ("decode", "decode")]
        pools = "".join(POOL.format(name=name, role=role, replicas=self.replicas) for name, role in roles)
        return SCENARIO.format(pools=pools, model=model, **self._asdict())

    def __str__(self) -> str:
        route = f"{self.transport}, KV buffer on {self.buffer}"
        return f"one engine {self.dtype}" if self.alone else f"{self.method:18} {route:28} {self.dtype}"


def cases(dtype: str = "fp32") -> list[ServedCase]:
    return [
        ServedCase(method, transport, buffer, dtype)
        for method in METHODS
        for transport, buffer in WAYS
        if buffer == "cpu" or method not in IN_HOST_MEMORY
    ]


def alone(dtype: str) -> ServedCase:
    """One engine that computes prompts and answers."""
    return ServedCase("nixl-push", "cuda-ipc", "cuda", dtype, alone=True)

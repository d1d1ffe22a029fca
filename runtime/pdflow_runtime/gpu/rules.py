"""What a scenario may say of GPUs and KV's memory, in a live cluster. What its host must have is in
`process/devices.py`.

An engine on a GPU transfers KV from its GPU's memory, or through pinned host memory: `transfer.kv_buffer_device`. Each
transport moves one of the two, and NIXL both. In one scenario all KV is transferred in the same kind of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import MemoryKind
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow_runtime.process.addresses import is_loopback

MOVES: Final = {
    "cuda": ("nixl", "nccl", "cuda-ipc"),
    "cpu": ("shm", "tcp", "nixl", "mooncake"),
}
"""The transports that move KV of GPUs, by the memory in which it is transferred."""

KeyProblem: TypeAlias = tuple[str, str]
"""The path of a key, and what is wrong with it."""


def gpu_problems(scenario: ResolvedScenario) -> Iterator[KeyProblem]:
    """Yield what is wrong with the scenario's GPUs, on whatever host."""
    for index, pool in enumerate(scenario.pools):
        yield from _numbers(f"pool.{index}.devices", pool)
    if scenario.serve.transport == "cuda-ipc":
        yield from _cuda_ipc(scenario)
    elif any(pool.device == "cuda" for pool in scenario.pools):
        yield from _memory(scenario)


def _numbers(path: str, pool: Pool) -> Iterator[KeyProblem]:
    """A list of GPUs has one for each rank, and the same for all ranks of an engine."""
    ranks, given = pool.tp * pool.pp, pool.devices
    if given and len(given) != pool.replicas * ranks:
        yield (
            path,
            f"has {len(given)} numbers, expected {pool.replicas * ranks}: one for each rank "
            f"(replicas {pool.replicas} x tp {pool.tp} x pp {pool.pp})",
        )
        return
    for number in range(pool.replicas if given else 0):
        own = given[number * ranks : (number + 1) * ranks]
        if len(set(own)) > 1:
            yield (
                path,
                f"gives the ranks of {pool.name}-{number} the GPUs {', '.join(map(str, own))}, expected one GPU, named "
                f"{ranks} times: a torch engine computes all its ranks in one process, on one GPU",
            )
            return


def _cuda_ipc(scenario: ResolvedScenario) -> Iterator[KeyProblem]:
    """Rules of the transport that has no KV in host memory, and reaches no other host."""
    only = "cuda-ipc moves KV between GPUs only"
    if (reason := _through_host(scenario)) is not None:
        yield "serve.transport", f"is cuda-ipc, expected one of {_names('cpu')}: {only}, and {reason}"
        return
    for index, pool in enumerate(scenario.pools):
        if pool.device != "cuda":
            yield f"pool.{index}.device", f"is {pool.device}, expected cuda: {only}"
    if scenario.transfer.kv_buffer_device != "cuda":
        yield "transfer.kv_buffer_device", f"is {scenario.transfer.kv_buffer_device}, expected cuda: {only}"
    if not is_loopback(scenario.serve.engine_host):
        host = scenario.serve.engine_host
        yield (
            "serve.transport",
            f"is cuda-ipc, which works within one host only, and serve.engine_host is {host}; between hosts use nixl "
            "or nccl",
        )


def _memory(scenario: ResolvedScenario) -> Iterator[KeyProblem]:
    """The memory in which KV is transferred must be one that every method and pool has and the transport moves."""
    transport, buffer = scenario.serve.transport, scenario.transfer.kv_buffer_device
    reason = _through_host(scenario) or _different_devices(scenario)
    if reason is not None and buffer == "cuda":
        yield "transfer.kv_buffer_device", f"is cuda, expected cpu: {reason}"
        buffer = "cpu"
    if transport in MOVES[buffer]:
        return
    if buffer == "cuda":
        name = next(pool.name for pool in scenario.pools if pool.device == "cuda")
        yield (
            "serve.transport",
            f"is {transport}, which moves KV in host memory only, and pool {name} has its KV on GPUs: set "
            f'transfer.kv_buffer_device = "cpu", or serve.transport to one of {_names("cuda")}',
        )
    else:
        instead = "" if reason is not None else 'set transfer.kv_buffer_device = "cuda", or '
        yield (
            "serve.transport",
            f"is {transport}, which moves KV between GPUs only, and not in host memory: {instead}set serve.transport "
            f"to one of {_names('cpu')}",
        )


def _through_host(scenario: ResolvedScenario) -> str | None:
    """Return why the method keeps KV in host memory during a transfer; None if it does not."""
    method = METHODS[scenario.transfer.method]
    if MemoryKind.RING in (method.p_memory, method.d_memory):
        return f"the rings of {method.name} are in host memory"
    return f"the nodes of {method.name} keep KV in host memory" if method.stores else None


def _different_devices(scenario: ResolvedScenario) -> str | None:
    """Return which pools that exchange KV have it on different devices; None if none do."""
    pools = [pool for pool in scenario.pools if pool.role != "aggregated"]
    on_gpus, on_cpu = ([pool.name for pool in pools if pool.device == device] for device in ("cuda", "cpu"))
    if not on_gpus or not on_cpu:
        return None
    return f"pool {on_gpus[0]} has its KV on GPUs and pool {on_cpu[0]} in host memory, which both can reach"


def _names(buffer: str) -> str:
    return ", ".join(MOVES[buffer])

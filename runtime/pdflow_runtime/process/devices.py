"""The GPU of each process of a cluster, and what the host must have for it.

An engine's process sees its own GPU as device 0 and the other GPUs after it, so that CUDA IPC can reach them. This is
decided before its start: CUDA's driver reads the environment once. So GPUs are counted in a process that then ends.

Engines on GPUs that the scenario does not number take the host's GPUs in turn: first those of all pools, then those
that may be added, so that an engine's GPU does not depend on which others run. Where there are GPUs, transport nccl
uses one in every process that moves KV, even if the KV is in host memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.gpu.rules import KeyProblem
from pdflow_runtime.gpu.torch_build import torch_problem
from pdflow_runtime.store.build import stores_of

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
NVIDIA_SMI_ORDER: Final = "PCI_BUS_ID"
"""The order of GPUs in which CUDA counts them as nvidia-smi does."""
_COUNT: Final = "from pdflow_runtime.gpu.driver import gpus; print(gpus())"

Environment: TypeAlias = Mapping[str, str]


class GpuUser(NamedTuple):
    """A process that uses a GPU. Args: `kind`, its pool's role, or "store"; `pool`, the path of the pool that computes
    on GPUs, or None if only the transport uses the GPU; `given`, the number that the scenario gives."""

    name: str
    kind: str
    pool: str | None = None
    given: int | None = None


def gpu_environments(scenario: ResolvedScenario, names: Iterable[str] | None = None) -> dict[str, Environment]:
    """Return what the environment of each process that uses a GPU must contain. Args: `names`, the processes on this
    host, or None for all. ScenarioError if this host does not have what they need."""
    users = gpu_users(scenario)
    here = [user for user in users if names is None or user.name in names]
    if not here:
        return {}
    gpus = count_gpus()
    problems = list(_host_problems(scenario, here, gpus))
    if problems:
        raise ScenarioError([Problem(scenario.path, *problem) for problem in problems])
    at = gpu_of_each(users, gpus)
    return {user.name: environment_of(at[user.name], gpus, os.environ) for user in here} if gpus else {}


def gpu_users(scenario: ResolvedScenario) -> list[GpuUser]:
    """Return all processes that may ever use a GPU, in the order in which they take the host's GPUs."""
    nccl = scenario.serve.transport == "nccl"
    first: list[GpuUser] = []
    added: list[GpuUser] = []
    for index, pool in enumerate(scenario.pools):
        if pool.device != "cuda" and (not nccl or pool.role == "aggregated"):
            continue
        path = f"pool.{index}" if pool.device == "cuda" else None
        given = pool.devices[:: pool.tp * pool.pp]
        for number in range(pool.replicas + scenario.serve.spare_engines):
            group = first if number < pool.replicas else added
            numbered = given[number] if number < len(given) else None
            group.append(GpuUser(f"{pool.name}-{number}", pool.role, path, numbered))
    if nccl:
        first += [GpuUser(name, "store") for name in stores_of(scenario)]
    return first + added


def gpu_of_each(users: Iterable[GpuUser], gpus: int) -> dict[str, int]:
    """Return the number of each process's GPU, of so many that its host has; none if the host has none."""
    if not gpus:
        return {}
    return {user.name: turn % gpus if user.given is None else user.given for turn, user in enumerate(users)}


def environment_of(gpu: int, gpus: int, inherited: Environment) -> Environment:
    """Return the variables with which a process has this GPU as device 0, and the host's others after it. What is
    inherited limits the GPUs of the host, and numbers them."""
    listed = inherited.get(VISIBLE)
    names = [str(number) for number in range(gpus)] if listed is None else listed.split(",")[:gpus]
    ordered = [names[gpu], *names[:gpu], *names[gpu + 1 :]]
    return {
        VISIBLE: ",".join(name.strip() for name in ordered),
        ORDER: inherited.get(ORDER, NVIDIA_SMI_ORDER),
    }


def count_gpus() -> int:
    """Return the number of GPUs that a process of this environment has."""
    counted = subprocess.run([sys.executable, "-c", _COUNT], stdout=subprocess.PIPE, text=True, check=False)
    return 0 if counted.returncode else int(counted.stdout)


def _host_problems(scenario: ResolvedScenario, here: list[GpuUser], gpus: int) -> Iterator[KeyProblem]:
    pool = next((user.pool for user in here if user.pool is not None), None)
    if pool is None and not gpus:
        return
    if (why := torch_problem()) is not None:
        if pool is not None:
            yield f"{pool}.device", f"is cuda, but {why}"
        else:
            yield "serve.transport", f"is nccl, which copies by torch where there are GPUs, but {why}"
    if not gpus:
        driver = "install NVIDIA's driver" if VISIBLE not in os.environ else f"see nvidia-smi and {VISIBLE}"
        yield f"{pool}.device", f'is cuda, but this host has no GPU{_limited()}: {driver}, or set device = "cpu"'
        return
    yield from _absent_gpus(here, gpus)
    if scenario.serve.transport == "nccl":
        yield from _shared_gpus(scenario, here, gpus)


def _absent_gpus(here: list[GpuUser], gpus: int) -> Iterator[KeyProblem]:
    absent: dict[str | None, int] = {}
    for user in here:
        if user.given is not None and not 0 <= user.given < gpus:
            absent.setdefault(user.pool, user.given)
    has = "GPU 0 only" if gpus == 1 else f"GPUs 0 to {gpus - 1}"
    for pool, gpu in absent.items():
        yield f"{pool}.devices", f"names GPU {gpu}, but this host has {has}{_limited()}"


def _shared_gpus(scenario: ResolvedScenario, here: list[GpuUser], gpus: int) -> Iterator[KeyProblem]:
    """Two processes that exchange KV over NCCL must have two GPUs. P and D do not exchange any over a store."""
    at = gpu_of_each(gpu_users(scenario), gpus)
    stored = bool(stores_of(scenario))
    refused = set()
    for one, other in combinations(here, 2):
        kinds = {one.kind, other.kind}
        exchange = "aggregated" not in kinds and len(kinds) == 2 and ("store" in kinds) is stored
        gpu = at[one.name]
        if exchange and at[other.name] == gpu and gpu not in refused:
            refused.add(gpu)
            yield (
                "serve.transport",
                f"is nccl, which needs a GPU for each process, but {one.name} and {other.name} exchange KV and are "
                f"both on GPU {gpu}: {'' if one.pool is None else 'set devices in their pools, or '}choose another "
                "transport",
            )


def _limited() -> str:
    """Return what limits the host's GPUs, in words."""
    return f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""

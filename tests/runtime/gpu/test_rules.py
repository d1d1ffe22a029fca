"""What a scenario may say of GPUs: each refusal with the key that it names, and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from pdflow.errors import ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.reading.load import load
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_runtime.gpu.rules import MOVES
from tests.runtime.support.live_pair import cluster

EXAMPLES: Final = Path(__file__).resolve().parents[3] / "examples"
P_ON_GPUS: Final = "pool.prefill.device=cuda"
ON_GPUS: Final = (P_ON_GPUS, "pool.decode.device=cuda")
HOST: Final = "transfer.kv_buffer_device=cpu"


def problems(*overrides: str) -> dict[str, str]:
    """What is wrong, by the keys; each is named once."""
    found: list[tuple[str, str]] = []
    try:
        refuse_what_is_not_served(cluster(*overrides))
    except ScenarioError as error:
        found += [(problem.path, problem.message) for problem in error.problems]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("buffer", ["cuda", "cpu"])
@pytest.mark.parametrize("transport", sorted({name for names in MOVES.values() for name in names}))
def test_a_transport_moves_kv_of_gpus_in_its_own_kind_of_memory(transport: str, buffer: str) -> None:
    found = problems(*ON_GPUS, f"transfer.kv_buffer_device={buffer}", f"serve.transport={transport}")
    assert not found if transport in MOVES[buffer] else len(found) == 1


def test_the_quickstart_on_a_gpu_is_served() -> None:
    scenario = load(EXAMPLES / "serve-gpu.toml")
    refuse_what_is_not_served(scenario)
    assert {pool.device for pool in scenario.pools} == {"cuda"}
    assert scenario.serve.transport == "cuda-ipc"


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl", "mooncake", "nccl"])
def test_engines_on_the_cpu_have_kv_in_host_memory_in_any_case(transport: str) -> None:
    assert not problems(HOST, f"serve.transport={transport}")
    assert not problems(f"serve.transport={transport}")


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (
            ON_GPUS,
            "serve.transport",
            "is shm, which moves KV in host memory only, and pool prefill has its KV on GPUs: set "
            'transfer.kv_buffer_device = "cpu", or serve.transport to one of nixl, nccl, cuda-ipc',
        ),
        (
            (*ON_GPUS, HOST, "serve.transport=nccl"),
            "serve.transport",
            "is nccl, which moves KV between GPUs only, and not in host memory: set transfer.kv_buffer_device = "
            '"cuda", or set serve.transport to one of shm, tcp, nixl, mooncake',
        ),
        (
            (P_ON_GPUS, "serve.transport=nixl"),
            "transfer.kv_buffer_device",
            "is cuda, expected cpu: pool prefill has its KV on GPUs and pool decode in host memory, which both can "
            "reach",
        ),
        (
            (P_ON_GPUS, HOST, "serve.transport=nccl"),
            "serve.transport",
            "is nccl, which moves KV between GPUs only, and not in host memory: set serve.transport to one of shm, "
            "tcp, nixl, mooncake",
        ),
        (
            (*ON_GPUS, "transfer.method=cpu-staged"),
            "transfer.kv_buffer_device",
            "is cuda, expected cpu: the rings of cpu-staged are in host memory",
        ),
        (
            (*ON_GPUS, "transfer.method=kv-store", "serve.transport=nixl"),
            "transfer.kv_buffer_device",
            "is cuda, expected cpu: the nodes of kv-store keep KV in host memory",
        ),
        (
            (*ON_GPUS, "transfer.method=kv-store", "serve.transport=cuda-ipc"),
            "serve.transport",
            "is cuda-ipc, expected one of shm, tcp, nixl, mooncake: cuda-ipc moves KV between GPUs only, and the nodes "
            "of kv-store keep KV in host memory",
        ),
        (
            (P_ON_GPUS, "serve.transport=cuda-ipc"),
            "pool.1.device",
            "is cpu, expected cuda: cuda-ipc moves KV between GPUs only",
        ),
        (
            (*ON_GPUS, HOST, "serve.transport=cuda-ipc"),
            "transfer.kv_buffer_device",
            "is cpu, expected cuda: cuda-ipc moves KV between GPUs only",
        ),
        (
            (*ON_GPUS, "serve.transport=cuda-ipc", "serve.engine_host=10.0.0.1"),
            "serve.transport",
            "is cuda-ipc, which works within one host only, and serve.engine_host is 10.0.0.1; between hosts use nixl "
            "or nccl",
        ),
        (
            (*ON_GPUS, HOST, "pool.decode.devices=[0]"),
            "pool.1.devices",
            "has 1 numbers, expected 2: one for each rank (replicas 2 x tp 1 x pp 1)",
        ),
        (
            (*ON_GPUS, HOST, "pool.decode.tp=2", "pool.decode.devices=[0, 0, 0, 1]"),
            "pool.1.devices",
            "gives the ranks of decode-1 the GPUs 0, 1, expected one GPU, named 2 times: a torch engine computes all "
            "its ranks in one process, on one GPU",
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], path: str, message: str) -> None:
    assert problems(*overrides) == {path: message}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_served_through_host_memory(method: str) -> None:
    assert not problems(*ON_GPUS, HOST, f"transfer.method={method}")
    assert not problems(P_ON_GPUS, HOST, f"transfer.method={method}")


def test_engines_that_hand_nothing_over_may_be_on_different_devices() -> None:
    alone = ("pool.prefill.role=aggregated", "pool.decode.role=aggregated", "serve.transport=nixl")
    assert not problems(*alone, P_ON_GPUS)

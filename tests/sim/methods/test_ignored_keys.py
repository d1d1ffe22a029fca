"""A key that a note calls without effect changes no request of a run; others of the same table do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import pdflow
from pdflow.methods.catalogue import METHODS

SCENARIO: dict[str, Any] = {
    "workload": {
        "requests": 8,
        "arrival": {"process": "poisson", "rate_rps": 40.0},
        "input_tokens": {"dist": "uniform", "low": 500, "high": 3000},
        "output_tokens": 20,
    },
    "model": {"preset": "llama-3.1-8b"},
    "pool": [
        {"name": name, "role": role, "gpu": "h100-sxm", "gpu_memory_utilization": 0.7}
        for name, role in (("p", "prefill"), ("d", "decode"))
    ],
    "network": {"preset": "tcp-100g"},
}
KEYS: dict[str, Any] = {
    "transfer.reads_on": "engine",
    "transfer.load_by_layer": True,
    "transfer.connector": "trtllm",
    "transfer.progressive": True,
    "transfer.kv_buffer_device": "cpu",
    "transfer.host_buffer_bytes": 600_000_000,
    "transfer.kv_buffer_size": 600_000_000,
    "transfer.mem_pool_size_gb": 0,
    "transfer.pickle_bytes_per_s": 300_000_000,
    "transfer.nccl_num_channels": 2,
    "transfer.nccl_max_groups": 1,
    "transfer.num_workers": 1,
    "transfer.store_nodes": 2,
    "transfer.store_bytes": 1_000_000_000,
    "transfer.store_granularity": "block",
    "transfer.store_keep": False,
    "transfer.store_hidden_states": True,
    "transfer.store_lease_s": 0.1,
    "transfer.store_high_water": 0.5,
    "transfer.sync_s": 0.01,
    "transfer.dead_s": 6.0,
    "transfer.cancel_first_s": 0.1,
    "transfer.cancel_last_s": 1.0,
    "transfer.registration_ttl_s": 0.01,
    "transfer.quarantine_fraction": 0.01,
    "transfer.suspect_s": 0.1,
    "transfer.backoff_first_s": 0.5,
    "transfer.push_registration_timeout_s": 0.05,
    "transfer.join_s": 0.001,
    "transfer.handshake_timeout_s": 0.001,
    "transfer.writer_poll_s": 0.1,
    "network.coalesce": True,
    "network.per_descriptor_s": 1e-4,
    "network.per_slice_s": 1e-3,
    "network.slice_bytes": 65_536,
    "network.poll": False,
}
METHOD_AND_DIALECT = [(name, dialect) for name, method in METHODS.items() for dialect in method.dialects]


@cache
def scenario(method: str, dialect: str) -> pdflow.Scenario:
    return pdflow.Scenario.from_dict({**SCENARIO, "transfer": {"method": method, "dialect": dialect}})


def noted(edited: pdflow.Scenario) -> set[str]:
    """The keys that notes call without effect."""
    return {note.split(": ")[1] for note in edited.resolved.notes if ": has no effect: " in note}


@cache
def plain_run(method: str, dialect: str) -> str:
    return played(scenario(method, dialect))


def played(edited: pdflow.Scenario) -> str:
    """All that happened to the requests; as text, since no NaN equals another."""
    return repr(list(pdflow.simulate(edited).records))


@pytest.mark.parametrize(("method", "dialect"), METHOD_AND_DIALECT)
def test_what_is_noted_changes_nothing(method: str, dialect: str) -> None:
    plain = scenario(method, dialect)
    # The protocol of vLLM refuses progressive, and slice_bytes has an effect together with per_slice_s.
    alone = {key: value for key, value in KEYS.items() if key not in ("transfer.progressive", "network.slice_bytes")}
    found = {key: value for key, value in alone.items() if noted(plain.with_({key: value})) == {key}}
    assert len(found) > 10
    together = plain.with_(found)
    assert noted(together) == set(found)
    assert played(together) == plain_run(method, dialect)


@pytest.mark.parametrize(
    ("method", "dialect", "key"),
    [
        ("nixl-pull", "strict", "transfer.reads_on"),
        ("nixl-push", "strict", "transfer.connector"),
        ("nixl-push", "strict", "transfer.progressive"),
        ("nixl-push", "strict", "network.coalesce"),
        ("nixl-push", "vllm-compat", "transfer.writer_poll_s"),
        ("nixl-push", "vllm-compat", "network.poll"),
        ("nixl-push", "vllm-compat", "transfer.push_registration_timeout_s"),
        ("cpu-staged", "strict", "transfer.load_by_layer"),
        ("p2p-nccl-get", "strict", "transfer.connector"),
        ("p2p-nccl-get", "strict", "transfer.reads_on"),
        ("kv-store", "strict", "transfer.connector"),
        ("kv-store", "strict", "transfer.reads_on"),
        ("kv-store", "strict", "transfer.kv_buffer_device"),
        ("kv-store", "strict", "transfer.store_hidden_states"),
        ("mooncake-v0", "strict", "transfer.connector"),
        ("mooncake-v0", "as-published", "transfer.pickle_bytes_per_s"),
        ("mooncake-v1", "strict", "transfer.num_workers"),
    ],
)
def test_what_has_an_effect_is_not_noted(method: str, dialect: str, key: str) -> None:
    edited = scenario(method, dialect).with_({key: KEYS[key]})
    assert noted(edited) == set()
    assert played(edited) != plain_run(method, dialect)


@pytest.mark.parametrize("method", ["nixl-pull", "p2p-nccl-put", "cpu-staged"])
def test_a_method_that_does_not_write_from_blocks_is_never_progressive(method: str) -> None:
    edited = scenario(method, "strict").with_({"transfer.progressive": True})
    assert noted(edited) == {"transfer.progressive"}
    assert played(edited) == plain_run(method, "strict")

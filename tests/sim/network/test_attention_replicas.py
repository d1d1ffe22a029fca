"""Engines with data-parallel attention in a whole simulation: NICs and posting lanes of their GPUs, and exact steps."""

from __future__ import annotations

from typing import Any

import pytest

import pdflow
from pdflow import Result, Scenario

PROMPT = 10_000
KV_BYTES = PROMPT * 70_272
"""The latent KV of DeepSeek-V3."""


def run(replicas: int, requests: int, fault: Any = (), **network: Any) -> Result:
    """Prompts that arrive together and are computed at once; their KV is 0.7 GB each, over NICs of 1 GB/s."""
    engine = {
        "gpu": "h200",
        "dp_attention": replicas,
        "kv_tokens": 100_000,
        "max_num_batched_tokens": 80_000 // replicas,
        "cost": {"model": "constant", "prefill_s": 0.01, "decode_step_s": 0.001},
    }
    tables: dict[str, Any] = {
        "workload": {
            "requests": requests,
            "arrival": {"process": "constant", "rate_rps": 1e6},
            "input_tokens": PROMPT,
            "output_tokens": 2,
        },
        "model": {"preset": "deepseek-v3"},
        "pool": [{"name": "p", "role": "prefill", **engine}, {"name": "d", "role": "decode", **engine}],
        "network": {"preset": "ideal", "bandwidth_bytes_per_s": 1_000_000_000, **network},
    }
    if fault:
        tables |= {"fault": fault}
    return pdflow.simulate(Scenario.from_dict(tables))


def moving_s(result: Result) -> float:
    return max(record["ends_ns"]["xfer_wire"] - record["ends_ns"]["xfer_post"] for record in result.records) / 1e9


def test_replicas_send_over_nics_of_their_own() -> None:
    alone = moving_s(run(1, 1))
    assert alone == pytest.approx(KV_BYTES / 1e9, rel=1e-3)
    assert moving_s(run(1, 4)) == pytest.approx(4 * alone, rel=0.01)
    assert moving_s(run(4, 4)) == pytest.approx(alone, rel=0.01)
    assert moving_s(run(2, 4)) == pytest.approx(2 * alone, rel=0.01)


def test_replicas_post_at_the_same_time() -> None:
    """A transfer takes 0.1 s to post. The first prompt is computed a step of 10 ms before the other three."""
    results = {replicas: run(replicas, 4, per_message_s=0.1, bandwidth_bytes_per_s=float("inf")) for replicas in (1, 4)}
    last = {
        replicas: max(record["ends_ns"]["xfer_post"] for record in result.records) / 1e9
        for replicas, result in results.items()
    }
    assert last[1] - last[4] == pytest.approx(0.3 - 0.01, abs=1e-6)
    assert results[1].totals.posting_ns["p-0.r0"] == 4 * results[4].totals.posting_ns["p-0.r0"] == 400_000_000


def test_whole_prompts_of_replicas_are_computed_together() -> None:
    """Constant costs do not cut prompts: four fit into a step of all replicas."""
    first_tokens = {record["first_token_ns"] for record in run(4, 4, bandwidth_bytes_per_s=float("inf")).records}
    assert max(first_tokens) - min(first_tokens) <= 10_000_000


def test_faults_of_nics_are_of_all_gpus_of_an_engine() -> None:
    slow = [{"kind": "slow", "engine": "p-0", "factor": 10, "at_s": 0, "for_s": 1000}]
    alone = moving_s(run(4, 4))
    assert moving_s(run(4, 4, fault=slow)) == pytest.approx(10 * alone, rel=0.02)


def test_gpus_of_all_replicas_are_counted() -> None:
    assert run(4, 1).totals.gpus == 8


SERVED = {
    "workload": {
        "requests": 120,
        "arrival": {"process": "closed", "concurrency": 40},
        "input_tokens": {"dist": "uniform", "low": 100, "high": 9000},
        "output_tokens": {"dist": "uniform", "low": 1, "high": 300},
    },
    "model": {"preset": "deepseek-v3"},
}


@pytest.mark.parametrize("role", ["aggregated", "disaggregated"])
def test_steps_planned_together_and_one_by_one_agree(role: str) -> None:
    engine = {"gpu": "h200", "ep": 8, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "kv_tokens": 20_000}
    roles = ("aggregated",) if role == "aggregated" else ("prefill", "decode")
    scenario = Scenario.from_dict(SERVED | {"pool": [{"name": each, "role": each, **engine} for each in roles]})
    fast, exact = pdflow.simulate(scenario), pdflow.simulate(scenario, exact=True)
    assert list(fast.records) == list(exact.records)
    assert fast.metrics.itl == exact.metrics.itl

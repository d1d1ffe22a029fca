"""Answers whose decode engine dies continue on another one: no client loses its answer, and every figure of a request
is still that of all its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pdflow
from pdflow.results.figures.itls import itls_ns
from pdflow.results.records import stage_durations_ns
from pdflow.results.result import Result
from pdflow.scenario.reading.editable import Scenario

SCENARIO = """
[scenario]
name = "resumed"
seed = 3

[workload]
requests = 300
arrival = { process = "poisson", rate_rps = 30.0 }
input_tokens = { dist = "uniform", low = 100, high = 2000 }
output_tokens = { dist = "uniform", low = 1, high = 400 }

[model]
preset = "llama-3.1-8b"

[[pool]]
name = "prefill"
role = "prefill"
replicas = 2
gpu = "h100-sxm"

[[pool]]
name = "decode"
role = "decode"
replicas = 3
gpu = "h100-sxm"

[transfer]
method = "nixl-push"

[network]
preset = "rdma-400g"

[[fault]]
kind = "crash"
engine = "decode-0"
at_s = 4.0
restart_after_s = 2.0

[[fault]]
kind = "crash"
engine = "decode-1"
at_s = 5.0
restart_after_s = 2.0
"""
NO_NOISE = {"noise.steps": 0, "noise.api_server": 0, "noise.links": 0}
CASES: dict[str, dict[str, Any]] = {
    "push": {},
    "pull": {"transfer.method": "nixl-pull"},
    "P's first token": {"router.first_token": "prefill"},
    "P's first token, concurrently": {"router.first_token": "prefill", "router.dispatch": "concurrent"},
    "recomputed": {"router.on_failure": "recompute"},
    "by a store": {"transfer.method": "kv-store", "transfer.store_granularity": "block"},
    "staged": {"transfer.method": "cpu-staged"},
    "hedged": {"router.hedge_after_s": 0.3},
    "few blocks": {"pool.decode.max_num_seqs": 8, "pool.decode.kv_tokens": 8192},
}


def simulated(**overrides: Any) -> Result:
    return pdflow.simulate(Scenario.from_toml(SCENARIO), overrides={"router.max_attempts": 3, **overrides})


@pytest.mark.parametrize("case", CASES)
def test_no_answer_is_lost_with_its_engine(case: str) -> None:
    result = simulated(**CASES[case])
    records = result.records
    assert set(records.outcome) == {"completed"}
    assert len(records.earlier) >= 5
    assert result.totals.notes["answer resumed"] >= len(records.earlier)
    for request, waits in enumerate(itls_ns(records, result.steps)):
        assert len(waits) == records.output_tokens[request] - 1
        assert waits.sum() == records.last_token_ns[request] - records.first_token_ns[request]
        assert (waits > 0).all()
        if request in records.earlier:
            assert records.decode_engine[request] != records.earlier[request][0].engine
    if not case.startswith("P's"):  # Stages lead to D's first token.
        ttft = np.array(records.first_token_ns) - np.array(records.arrival_ns)
        assert (stage_durations_ns(records).sum(axis=0) == ttft).all()


def test_without_resume_the_answers_that_have_started_fail() -> None:
    lost = [outcome for outcome in simulated(**{"router.resume": False}).records.outcome if outcome == "failed"]
    assert len(lost) >= 5
    assert not simulated(**{"router.resume": False}).records.earlier


def test_a_resumed_answer_waits_for_its_prompt_once_more() -> None:
    """The gap that its client sees is at least the prefill of its prompt, and no token before or after it is late."""
    one_death = Scenario.from_toml(SCENARIO.rpartition("[[fault]]")[0])
    result = pdflow.simulate(one_death, overrides=NO_NOISE)
    records = result.records
    waits = list(itls_ns(records, result.steps))
    for request, earlier in records.earlier.items():
        joint = sum(map(len, earlier[:1])) - 1
        assert waits[request][joint] > 4 * np.median(waits[request])
        assert np.delete(waits[request], joint).max() < waits[request][joint]

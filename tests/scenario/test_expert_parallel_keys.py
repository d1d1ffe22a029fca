"""`ep` and `dp_attention` of a pool: defaults, what they count, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import ResolvedScenario, kv_tokens_of
from pdflow.scenario.costs.cost_file import MadeFrom, MeasuredEngine, cost_file
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.reading.load import parse, resolve
from pdflow.scenario.summary import pool_summary
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_sim.experiments.calibrate import calibrated


def scenario(keys: str, model: str = "deepseek-v3", more: str = "") -> ResolvedScenario:
    return resolve(
        parse(
            "experts.toml",
            f"""
[workload]
requests = 1
arrival = {{ process = "constant", rate_rps = 1 }}
input_tokens = 1000
output_tokens = 2
[model]
preset = "{model}"
[[pool]]
name = "all"
role = "aggregated"
gpu = "h200"
{keys}
{more}
""",
        )
    )


def refused(keys: str, model: str = "deepseek-v3", more: str = "") -> str:
    with pytest.raises(ScenarioError) as caught:
        scenario(keys, model, more)
    [problem] = caught.value.problems
    return f"{problem.path.rpartition('.')[2]} {problem.message}"


def test_one_gpu_for_each_of_72_shares_of_experts() -> None:
    """tp 1 and ep 72 are 72 replicas of attention, each with the KV of its own sequences."""
    found = scenario("ep = 72")
    [pool] = found.pools
    assert (pool.attention_replicas, pool.gpus_per_engine) == (72, 72)
    summary = pool_summary(found, pool)
    assert summary.gpus_per_engine == 72
    assert summary.weight_bytes_per_gpu == found.model.weight_bytes_per_gpu(dp=72, ep=72) < 60e9
    assert kv_tokens_of(found.model, pool) % 72 == 0


def test_kv_tokens_are_of_one_replica() -> None:
    found = scenario("ep = 8\nkv_tokens = 32_000")
    assert kv_tokens_of(found.model, found.pools[0]) == 8 * 32_000


def test_tensor_parallel_ranks_share_experts_or_replicas_do() -> None:
    assert scenario("tp = 8\nep = 8").pools[0].attention_replicas == 1
    assert scenario("tp = 2\nep = 8").pools[0].attention_replicas == 4
    assert scenario("dp_attention = 8").pools[0].ep == 1


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ("ep = 4", "llama-3.1-8b", "ep is 4, expected 1: llama-3.1-8b has no experts"),
        (
            "dp_attention = 2",
            "llama-3.1-8b",
            "dp_attention is 2, expected 1: llama-3.1-8b has no experts; use replicas, which are engines of their own",
        ),
        (
            "tp = 8\nep = 4",
            "deepseek-v3",
            "ep is 4, expected 1 or 8, the GPUs of an engine (tp 8 x dp_attention 1)",
        ),
        (
            'ep = 8\ncost = { model = "aiconfigurator" }',
            "deepseek-v3",
            "cost has times of engines that share all weights by tensor parallelism; "
            'expected "roofline" or "constant" with ep or dp_attention',
        ),
    ],
)
def test_what_is_refused_says_what_would_do(keys: str, model: str, message: str) -> None:
    assert refused(keys, model) == message


def test_a_live_cluster_refuses_them() -> None:
    found = scenario("ep = 8", more='[transfer]\ndialect = "strict"')
    with pytest.raises(ScenarioError, match="is simulated only; expected 1"):
        refuse_what_is_not_served(found)


def test_they_are_in_the_line_of_the_pool(tmp_path: Path) -> None:
    import pdflow

    file = tmp_path / "a.toml"
    file.write_text(
        '[workload]\nrequests = 1\narrival = { process = "constant", rate_rps = 1 }\ninput_tokens = 9\n'
        'output_tokens = 2\n[model]\npreset = "deepseek-v3"\n[[pool]]\nname = "all"\nrole = "aggregated"\n'
        'gpu = "h200"\nep = 8\n'
    )
    assert "TP 1, PP 1, DP 8, EP 8" in repr(pdflow.Scenario.load(file))


def test_no_cost_file_can_hold_them(tmp_path: Path) -> None:
    found = scenario("ep = 8")
    seen = tmp_path / "seen.csv"
    seen.write_text("request,ttft_ms,tpot_ms\n0,100,10\n")
    with pytest.raises(ScenarioError, match="whose step times no cost file can hold"):
        calibrated(found, seen, None, [])
    cost = step_cost(found.model, found.pools[0], found.base_dir)
    with pytest.raises(ValueError, match="cannot hold the cost of an engine with ep or dp_attention"):
        cost_file(cost, MeasuredEngine(), MadeFrom(source="x", command="y"))

"""From options to requests: as vLLM's flags say, and as simulate draws."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.distributions import FixedLength, UniformLength
from pdflow.scenario.schema.workload import ClosedArrival, ConstantArrival, GammaArrival, PoissonArrival
from pdflow.workload.build import requests
from pdflow_runtime.bench.asked import AskedError, BenchOptions
from pdflow_runtime.bench.contents import FIRST_TOKEN, Contents
from pdflow_runtime.bench.plan import plan_of
from pdflow_runtime.bench.report import run_header
from pdflow_runtime.bench.target import server_of
from pdflow_sim.build import SimulationBuilder
from pdflow_sim.run import run_header as simulated_header

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "examples/serve-quickstart.toml")
MOONCAKE = '{"timestamp": %d, "input_length": 700, "output_length": 9, "hash_ids": [1, %d]}\n'


@pytest.mark.parametrize(
    ("flags", "arrival"),
    [
        ({}, ClosedArrival(concurrency=1000)),
        ({"request_rate": math.inf, "num_prompts": 5}, ClosedArrival(concurrency=5)),
        ({"request_rate": 2.0}, PoissonArrival(rate_rps=2.0)),
        ({"request_rate": 2.0, "burstiness": 0.5}, GammaArrival(rate_rps=2.0, burstiness=0.5)),
        ({"request_rate": 2.0, "burstiness": math.inf}, ConstantArrival(rate_rps=2.0)),
    ],
)
def test_rate_and_burstiness_are_an_arrival_process(flags: dict[str, Any], arrival: Any) -> None:
    assert plan_of(BenchOptions(**flags)).workload.arrival == arrival


@pytest.mark.parametrize(
    ("tokens", "ratio", "length"),
    [
        (100, 0.0, FixedLength(tokens=100)),
        (100, 0.25, UniformLength(low=75, high=125)),
        (10, 0.33, UniformLength(low=6, high=14)),
        (1, 0.9, UniformLength(low=1, high=2)),
    ],
)
def test_random_lengths_have_vllms_range(tokens: int, ratio: float, length: Any) -> None:
    plan = plan_of(BenchOptions(random_input_len=tokens, random_output_len=tokens, random_range_ratio=ratio))
    assert (plan.workload.input_tokens, plan.workload.output_tokens) == (length, length)


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    flags: dict[str, Any] = {"request_rate": 2.0, "random_range_ratio": 0.5, "num_prompts": 20}
    first, again, other = (list(plan_of(BenchOptions(seed=seed, **flags)).requests()) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_scenarios_requests_and_header_are_those_of_a_simulation() -> None:
    plan, scenario = plan_of(BenchOptions(scenario=QUICKSTART, seed=5)), load(QUICKSTART, seed=5)
    assert list(plan.requests()) == list(requests(scenario.workload, 5, scenario.base_dir))
    live = run_header(BenchOptions(), plan, "tiny", (), False)
    simulated = simulated_header(scenario, SimulationBuilder(scenario, False).build().costs, (), False)
    for field in ("scenario_name", "scenario_sha256", "seed", "request_rate_rps", "burstiness", "max_concurrency"):
        assert getattr(live, field) == getattr(simulated, field), field
    assert plan.ignore_eos
    assert len(list(plan_of(BenchOptions(scenario=QUICKSTART, num_prompts=7)).requests())) == 7


def test_a_trace_is_sent_at_its_own_instants_unless_a_rate_is_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(MOONCAKE % (1000 * n, n) for n in range(5)))
    of_trace: dict[str, Any] = {"dataset_name": "trace", "dataset_path": str(trace)}
    own, rated = plan_of(BenchOptions(**of_trace)), plan_of(BenchOptions(**of_trace, request_rate=100.0))
    assert [request.arrival_ns for request in own.requests()] == [n * 10**9 for n in range(5)]
    assert own.rate_rps is None
    assert [request.input_tokens for request in rated.requests()] == [700] * 5
    assert max(request.arrival_ns for request in rated.requests()) < 10**9
    prompts = [Contents(0, own.block_tokens).prompt(n, request) for n, request in enumerate(own.requests())]
    assert all(prompt[:512] == prompts[0][:512] and len(prompt) == 700 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_contents_are_tokens_that_any_vocabulary_has() -> None:
    made = Contents(3, 512).made("x", 10_000)
    assert made == Contents(3, 512).made("x", 10_000)
    assert set(made) == set(range(FIRST_TOKEN, FIRST_TOKEN + 128))
    assert made[:100] != Contents(4, 512).made("x", 100)
    assert made[:100] == Contents(3, 512).made("x", 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"goodput": ("ttft",)}, "--goodput ttft"),
        ({"goodput": ("e2e:5",)}, "e2el"),
        ({"goodput": ("ttft:-5",)}, "NAME:MS"),
        ({"goodput": ("ttft:nan",)}, "NAME:MS"),
        ({"goodput": ("ttft:5@p99",)}, "percentile of itl"),
        ({"goodput": ("itl:5@p0",)}, "percentile of itl"),
        ({"goodput": ("itl:5@p101",)}, "percentile of itl"),
        ({"goodput": ("itl:5@",)}, "NAME:MS"),
        ({"percentile_metrics": "ttft,latency"}, "latency"),
        ({"metric_percentiles": "50,101"}, "101"),
        ({"metric_percentiles": "nan"}, "nan"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"burstiness": math.nan}, "--burstiness"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"extra_body": "[1]"}, "--extra-body"),
        ({"metadata": ("a",)}, "--metadata a"),
        ({"save_detailed": True}, "--save-result"),
        ({"base_url": "ftp://h"}, "expected http://HOST:PORT or https://HOST:PORT"),
        ({"base_url": "x:1"}, "http://HOST:PORT"),
        ({"base_url": "http://x:99999"}, "http://HOST:PORT"),
        ({"header": ("a",)}, "KEY=VALUE"),
        ({"header": ("a=b\r\nc: d",)}, "KEY=VALUE"),
        ({"backend": "openai-chat", "endpoint": "/v1/completions"}, "--endpoint"),
        ({"dataset_name": "sonnet"}, "expected one of random, sharegpt, custom, trace"),
        ({"dataset_name": "sharegpt"}, "nothing is downloaded"),
        ({"dataset_path": "x"}, "--dataset-name"),
        ({"overrides": ("a=b",)}, "--scenario"),
        ({"scenario": QUICKSTART, "request_rate": 1.0}, "--set"),
        ({"scenario": QUICKSTART, "dataset_name": "random"}, "--dataset-name"),
    ],
)
def test_options_without_a_meaning_are_refused_in_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(AskedError) as refused:
        look_at_all_of(flags)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert refused.value.exit_code == 2


def look_at_all_of(flags: dict[str, Any]) -> None:
    asked = BenchOptions(**flags)
    _ = asked.quoted, asked.slo, asked.extra, asked.labels, plan_of(asked), server_of(asked)


def test_a_dataset_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    for name in ("sharegpt", "custom", "trace", "azure"):
        with pytest.raises(ScenarioError, match="no such file") as refused:
            list(islice(plan_of(BenchOptions(dataset_name=name, dataset_path=str(tmp_path / "x"))).requests(), 1))
        assert refused.value.exit_code == 2


def test_a_bad_line_is_reported_before_anything_is_sent(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE % (0, 1) + "{}\n")
    with pytest.raises(ScenarioError, match=":2: "):
        plan_of(BenchOptions(dataset_name="mooncake", dataset_path=str(trace)))


def test_an_address_is_put_together_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = server_of(BenchOptions(base_url="http://[::1]:81/up/", header=("X-A=b=c",)))
    assert server.url == "http://[::1]:81/up/v1/completions"
    assert dict(server.headers)[b"x-a"] == b"b=c"
    assert dict(server.headers)[b"authorization"] == b"Bearer k"
    assert server_of(BenchOptions(backend="openai-chat")).path == "/v1/chat/completions"

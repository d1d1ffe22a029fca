"""The example scenarios load, and mean what their comments say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import kv_tokens_of, load
from pdflow.scenario.schema.distributions import FixedLength, UniformLength
from pdflow.scenario.schema.scenario import ConstantCost, RooflineCost
from pdflow.scenario.schema.workload import MODELS, ClosedArrival, PoissonArrival

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHARED = ROOT / "../shared/examples"


def test_md1() -> None:
    scenario = load(EXAMPLES / "md1.toml")
    assert (scenario.name, scenario.seed) == ("md1", 1)
    assert scenario.workload.requests == 50000
    assert scenario.workload.arrival == PoissonArrival(rate_rps=8.0)
    assert scenario.workload.input_tokens == FixedLength(tokens=512)
    prefill, decode = scenario.pools
    assert prefill.cost == ConstantCost(prefill_s=0.1, decode_step_s=0.0)
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (1, 256)
    network = scenario.network
    assert network.bandwidth_bytes_per_s is None
    assert network.poll is False
    assert network.latency_s == network.per_message_s == network.per_descriptor_s == network.handshake_s == 0.0
    assert (scenario.router.policy, scenario.router.dispatch) == ("round-robin", "concurrent")


def test_shared_link() -> None:
    scenario = load(EXAMPLES / "shared-link.toml")
    [link], [path] = scenario.network.links, scenario.network.paths
    assert (link.name, link.bandwidth_bytes_per_s, link.latency_s) == ("uplink", 671088640, 0.0)
    assert (path.from_pool, path.to_pool, path.via) == ("prefill", "decode", ("uplink",))
    assert scenario.pool("prefill").replicas == 400
    assert kv_tokens_of(scenario.model, scenario.pool("decode")) == 100_000_000
    assert scenario.model.kv_bytes_per_token * 512 == 67108864


def test_reference() -> None:
    scenario = load(EXAMPLES / "reference.toml")
    assert scenario.workload.input_tokens == UniformLength(low=512, high=1536)
    assert all(pool.cost == RooflineCost() and pool.replicas == 4 for pool in scenario.pools)
    assert scenario.network.preset == "rdma-400g"
    assert (scenario.slo.ttft_ms, scenario.slo.tpot_ms, scenario.slo.e2e_ms) == (500.0, 30.0, None)


def test_mooncake_conversation() -> None:
    if not (SHARED / "../data/traces/mooncake_conversation_first2000.jsonl").is_file():
        pytest.skip("the Mooncake trace is not here: it is not ours to commit")
    scenario = load(SHARED / "mooncake-conversation.toml")
    assert scenario.workload.trace is not None
    assert scenario.workload.trace.format == "mooncake"
    assert (scenario.base_dir / scenario.workload.trace.path).is_file()
    assert (scenario.transfer.method, scenario.transfer.dialect) == ("nixl-pull", "vllm-compat")


def test_conversation_needs_no_download() -> None:
    scenario = load(EXAMPLES / "conversation.toml")
    assert (scenario.workload.like, scenario.workload.requests) == ("mooncake-conversation", 2000)
    assert scenario.workload.trace is None


def test_every_bundled_workload_can_be_named() -> None:
    for name in MODELS:
        scenario = load(EXAMPLES / "conversation.toml", overrides=[f"workload.like={name}"])
        assert scenario.workload.like == name


def test_without_the_trace_the_error_names_the_path() -> None:
    file = EXAMPLES / "mooncake-conversation.toml"
    if (EXAMPLES / "../data/traces").exists():
        pytest.skip("the trace has been put where the example looks for it")
    with pytest.raises(ScenarioError) as caught:
        load(file)
    [problem] = caught.value.problems
    assert problem.location == f"{file}:7"
    assert problem.path == "workload.trace.path"
    assert "does not exist" in problem.message


@pytest.mark.parametrize("name", ["md1", "mooncake-conversation", "reference", "shared-link"])
def test_examples_are_the_ones_agreed_upon(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("the shared examples are not here")
    ours, theirs = (tomllib.loads((folder / f"{name}.toml").read_text()) for folder in (EXAMPLES, SHARED))
    assert ours == theirs


def test_a_closed_loop() -> None:
    scenario = load(EXAMPLES / "md1.toml", overrides=['workload.arrival={process="closed", concurrency=4}'])
    assert scenario.workload.arrival == ClosedArrival(concurrency=4)


def test_defaults_of_absent_tables(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text("""
        [workload]
        like = "azure-code"
        requests = 10
        [model]
        preset = "llama-3.1-8b"
        kv_dtype = "fp8"
        [[pool]]
        name = "p"
        role = "prefill"
        gpu = { preset = "h200", ec = 0.5 }
        [[pool]]
        name = "d"
        role = "decode"
        gpu = "l40s"
    """)
    scenario = load(file)
    assert scenario.name == "small"
    assert scenario.model.kv_bytes_per_token == 65536
    assert scenario.pool("p").gpu.name == "h200"
    assert scenario.pool("p").gpu.ec == 0.5
    assert (scenario.transfer.method, scenario.transfer.dialect) == ("nixl-push", "strict")
    assert scenario.network.preset == "rdma-400g"
    timers = scenario.transfer.timers()
    assert timers == type(timers)()

"""Posting by connector: how many descriptors a transfer has, and what READs posted on D's engine thread cost its steps.

Closed forms: steps of D take STEP_MS whatever they compute; posting one READ takes POST_MS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pdflow
from pdflow import Result, Scenario
from pdflow.methods.catalogue import METHODS
from pdflow.methods.posting import CONNECTORS

SMALL = Path(__file__).parents[1] / "small.toml"
LAYERS, BLOCKS = 32, 4
STEP_MS, POST_MS = 10.0, 4.0
OUTPUT = 41


def run(exact: bool = False, **edits: Any) -> Result:
    tables = {
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "network.preset": "ideal",
        **{key.replace("__", "."): value for key, value in edits.items()},
    }
    return pdflow.simulate(Scenario.load(SMALL).with_(tables), exact=exact)


def descriptors(connector: str | None, **edits: Any) -> float:
    """Of a transfer of 4 blocks, by its posting time."""
    named = {} if connector is None else {"transfer__connector": connector}
    (record,) = run(
        workload__requests=1, workload__input_tokens=16 * BLOCKS, network__per_descriptor_s=1e-6, **named, **edits
    ).records
    return float(record["ends_ns"]["xfer_post"] - record["ends_ns"]["handshake"]) / 1e3


@pytest.mark.parametrize(
    ("connector", "count"),
    [
        ("vllm-nixl", LAYERS * BLOCKS),
        ("vllm-nixl-0.28", 2 * LAYERS * BLOCKS),
        ("vllm-nixl-packed", BLOCKS),
        ("vllm-mooncake", LAYERS * BLOCKS),
        ("moriio", LAYERS),
        ("sglang", 2 * LAYERS),
        ("trtllm", 1),
        ("pdflow", 2 * LAYERS),
        ("per-tensor", 2 * LAYERS * BLOCKS),
    ],
)
def test_descriptors_of_a_transfer_into_a_fresh_pool(connector: str, count: int) -> None:
    assert descriptors(connector) == count
    assert len(CONNECTORS) == 9, "this test names each of them"


def test_neighbours_are_counted_as_the_scenario_says() -> None:
    assert descriptors("vllm-nixl", network__coalesce=True) == LAYERS
    assert descriptors("moriio", network__coalesce=False) == LAYERS * BLOCKS


def test_a_token_is_a_block_of_sglang() -> None:
    blocks_of_one = {"pool__p__block_size": 1, "pool__d__block_size": 1}
    assert descriptors("sglang", **blocks_of_one) == 2 * LAYERS
    assert descriptors("sglang", **blocks_of_one, network__coalesce=False) == 2 * LAYERS * 16 * BLOCKS


def test_mla_has_neither_k_nor_v() -> None:
    deepseek = {"model__preset": "deepseek-v3", "pool__p__gpu": "h200", "pool__d__gpu": "h200"}
    tp8 = {"pool__p__tp": 8, "pool__d__tp": 8, "model__weight_dtype": "fp8"}
    for connector in ("vllm-nixl", "vllm-nixl-0.28"):
        assert descriptors(connector, **deepseek, **tp8) == 61 * BLOCKS


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_the_connector_of_its_original(method: str) -> None:
    expected = {"nixl-push": "vllm-nixl", "nixl-pull": "vllm-nixl", "mooncake-v1": "vllm-mooncake"}
    assert METHODS[method].connector == expected.get(method, "per-tensor")


def decoding(reads_on: str, post_ms: float, method: str = "nixl-pull", exact: bool = False) -> Result:
    """A request every 100 ms, which is computed in 1 ms; D generates 40 tokens of each after the first, in steps of
    10 ms, so that the next four requests' READs are posted under way."""
    return run(
        exact,
        transfer__method=method,
        transfer__reads_on=reads_on,
        workload__requests=20,
        workload__arrival={"process": "constant", "rate_rps": 10.0},
        workload__input_tokens=64,
        workload__output_tokens=OUTPUT,
        network__per_message_s=post_ms / 1e3,
        pool__p__cost={"model": "constant", "prefill_s": 0.001},
        pool__d__cost={"model": "constant", "decode_step_s": STEP_MS / 1e3},
    )


def mean_tpot_ms(result: Result) -> float:
    """Of the requests that four others follow and four precede."""
    records = list(result.records)[4:-4]
    spans = [(record["last_token_ns"] - record["first_token_ns"]) / (OUTPUT - 1) for record in records]
    return sum(spans) / len(spans) / 1e6


@pytest.mark.parametrize("exact", [False, True])
def test_a_read_posted_on_the_engine_thread_lengthens_a_step_by_its_posting(exact: bool) -> None:
    """Posting 4 ms for each of 10 requests a second takes 4 % of the thread's time, so a step takes 10 / 0.96 ms on
    average."""
    assert mean_tpot_ms(decoding("background", POST_MS, exact=exact)) == pytest.approx(STEP_MS)
    found = decoding("engine", POST_MS, exact=exact)
    assert mean_tpot_ms(found) == pytest.approx(STEP_MS / (1 - 10 * POST_MS / 1e3), rel=0.01)
    # Requests that are decoding as four others come have four such steps of their 40.
    assert found.summary["itl_p99_ms"] == pytest.approx(STEP_MS + POST_MS)
    assert found.summary["itl_p50_ms"] == pytest.approx(STEP_MS)


def test_a_push_lengthens_no_step_of_d() -> None:
    for reads_on in ("engine", "overlapped", "background"):
        assert mean_tpot_ms(decoding(reads_on, POST_MS, "nixl-push")) == pytest.approx(STEP_MS)


def test_a_read_posted_behind_the_launch_costs_nothing_until_it_outlasts_the_step() -> None:
    assert mean_tpot_ms(decoding("overlapped", STEP_MS - 1)) == pytest.approx(STEP_MS)
    # A step that a READ of 25 ms is posted in takes 25 ms: 15 ms more, ten times a second.
    assert mean_tpot_ms(decoding("overlapped", 25.0)) == pytest.approx(STEP_MS / (1 - 10 * 15e-3), rel=0.01)


@pytest.mark.parametrize("reads_on", ["engine", "overlapped"])
def test_an_engine_without_a_step_begins_none_before_its_thread_has_posted(reads_on: str) -> None:
    """D admits two requests at 1 ms; their READs are posted at 5 and 9 ms, so that the first KV is there at 5."""
    result = run(
        transfer__method="nixl-pull",
        transfer__reads_on=reads_on,
        workload__requests=2,
        workload__arrival={"process": "closed", "concurrency": 2},
        workload__input_tokens=64,
        workload__output_tokens=3,
        network__per_message_s=POST_MS / 1e3,
        pool__p__cost={"model": "constant", "prefill_s": 0.001},
        pool__d__cost={"model": "constant", "decode_step_s": STEP_MS / 1e3},
    )
    first, second = [record["ends_ns"] for record in result.records]
    assert first["xfer_wire"] == first["xfer_post"] == second["xfer_post"] - POST_MS * 1e6
    assert first["first_decode"] == second["first_decode"] == second["xfer_post"] + STEP_MS * 1e6


def posting(connector: str, link: str, block_size: int = 16) -> tuple[float, float]:
    """Return ms of posting for each request, and the busy share of the lane, of a D of Qwen3-32B at TP2, which gets 10
    requests of 2,000 tokens a second."""
    requests = 200
    engine = {"gpu": "h100-sxm", "tp": 2, "block_size": block_size}
    tables: dict[str, Any] = {
        "workload": {
            "requests": requests,
            "arrival": {"process": "constant", "rate_rps": 10.0},
            "input_tokens": 2000,
            "output_tokens": 100,
        },
        "model": {"preset": "qwen3-32b"},
        "pool": [
            {"name": "p", "role": "prefill", "replicas": 4, **engine},
            {"name": "d", "role": "decode", **engine},
        ],
        "transfer": {"method": "nixl-pull", "connector": connector},
        "network": {"preset": link},
    }
    totals = pdflow.simulate(Scenario.from_dict(tables)).totals
    rank, share = totals.busiest_lane()
    assert rank.startswith("d-0")
    return totals.posting_ns[rank] / requests / 1e6, share


def test_vllm_serves_ten_prompts_a_second_over_rdma_with_small_blocks() -> None:
    """64 layers of 125 blocks are 8,000 descriptors: 2.6 ms over RDMA. EFA posts in one thread, and with K and V apart
    that takes 39 ms."""
    each_ms, share = posting("vllm-nixl", "rdma-400g")
    assert each_ms == pytest.approx(0.174 + 8_000 * 0.3e-3)
    assert share < 0.03
    each_ms, share = posting("vllm-nixl-0.28", "efa-200g")
    assert each_ms == pytest.approx(0.174 + 16_000 * 2.43e-3)
    assert 0.3 < share < 0.4
    each_ms, _ = posting("vllm-nixl", "rdma-400g", 128)
    assert each_ms == pytest.approx(0.174 + (15 * 64 + 64 * 4) * 0.3e-3)


@pytest.mark.parametrize("reads_on", ["engine", "overlapped"])
def test_an_engine_that_is_paused_while_it_posts_computes_nothing(reads_on: str) -> None:
    """Its READs are posted at 61 ms, within the pause from 35 ms to 1,035 ms."""
    records = run(
        transfer__method="nixl-pull",
        transfer__reads_on=reads_on,
        router__dispatch="sequential",
        network__per_message_s=0.02,
        noise__links=0,
        pool__p__cost={"model": "constant", "prefill_s": 0.001, "decode_step_s": 0.0},
        workload__requests=3,
        workload__input_tokens=64,
        workload__output_tokens=20,
        workload__arrival={"process": "closed", "concurrency": 3},
        fault=[{"kind": "pause", "engine": "d-0", "at_s": 0.035, "for_s": 1.0}],
    ).records
    assert all(record["first_token_ns"] >= 1_035_000_000 for record in records)

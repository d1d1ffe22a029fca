from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.results.figures.itls import itls_s
from pdflow.results.files.bench_json import RunHeader, bench_date, bench_json, content_sha256
from pdflow.results.files.write import write_results
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals

# In the order of vllm/benchmarks/serve.py, `main_async` then `benchmark`.
VLLM_KEYS = [
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency"),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput"),
    *("latencies", "queue_times", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms"),
    *("mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms"),
    *("mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms"),
]
VLLM_DETAILED_KEYS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def saved(result: Result, path: Path, detailed: bool = False) -> dict[str, Any]:
    itls = itls_s(result.records, result.steps) if detailed else None
    content = bench_json(result.header, result.records, result.metrics, result.totals, itls_s=itls)
    write_results(path, content)
    read: dict[str, Any] = json.loads(
        path.read_text(), parse_constant=lambda token: pytest.fail(f"{token} in results.json")
    )
    return read


def test_keys_are_those_of_vllm_and_one_of_ours(result: Result, tmp_path: Path) -> None:
    content = saved(result, tmp_path / "results.json")
    assert list(content) == [*VLLM_KEYS, "pdflow"]


def test_detailed_keys_are_those_that_vllm_drops_otherwise(result: Result, tmp_path: Path) -> None:
    content = saved(result, tmp_path / "results.json", detailed=True)
    assert content.keys() == {*VLLM_KEYS, *VLLM_DETAILED_KEYS, "pdflow"}
    assert content["input_lens"] == [100, 200, 300, 400, 500]
    assert content["output_lens"] == [5, 5, 0, 0, 0]
    assert content["ttfts"] == [0.035, 0.045, 0.0, 0.0, 0.0]
    assert content["itls"] == [[0.01] * 4, [0.01] * 4, [], [], []]
    assert content["start_times"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert content["generated_texts"] == [""] * 5
    assert content["errors"] == ["", "", "lease_expired", "client_gone", ""]


def test_values_by_hand(result: Result, tmp_path: Path) -> None:
    content = saved(result, tmp_path / "results.json")
    expected = {
        "date": "19700101-000000",
        "label": "five",
        "num_prompts": 5,
        "request_rate": 10.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 2.0,
        "completed": 2,
        "failed": 2,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 5.0,
        "total_token_throughput": 155.0,
        "latencies": [0.075, 0.085, 0.0, 0.0, 0.0],
        "queue_times": [0.0] * 5,
        "median_ttft_ms": 40.0,
        "p99_ttft_ms": 44.9,
    }
    assert {key: content[key] for key in expected} == expected
    ours = content["pdflow"]
    assert (ours["format"], ours["seed"], ours["interrupted"]) == (1, 7, False)
    assert list(ours["stages"]) == list(STAGES)
    assert sum(stage["share_of_ttft"] for stage in ours["stages"].values()) == pytest.approx(1.0)
    assert ours["links"][0]["utilisation"] == 0.0196608
    assert ours["transfers"] == {"count": 2, "bytes": 39_321_600, "messages": 12, "stranded_kv_byte_s": 3e8}
    assert list(ours["notes"]) == ["duplicate", "stale"]
    assert ours["outcomes"]["reasons"] == {"failed": {"lease_expired": 1}, "cancelled": {"client_gone": 1}}


def test_without_an_slo_goodput_is_null_and_inf_is_a_string(result: Result, tmp_path: Path) -> None:
    header = attrs.evolve(result.header, slo=None, request_rate_rps=None, burstiness=None)
    bare = Result.of(header, result.records, result.steps, result.totals)
    content = saved(bare, tmp_path / "results.json")
    assert (content["request_goodput"], content["request_rate"], content["burstiness"]) == (None, "inf", "inf")


def test_of_nothing_every_metric_is_zero_and_nothing_is_nan(tmp_path: Path) -> None:
    header = RunHeader(scenario_name="", scenario_sha256="", seed=0, version="")
    content = saved(Result.of(header, Records(), {}, Totals()), tmp_path / "results.json", detailed=True)
    assert [content[key] for key in VLLM_KEYS if key.endswith("_ms")] == [0.0] * 12
    assert content["itls"] == content["latencies"] == []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, float):
            assert math.isfinite(value)

    walk(content)


@given(st.integers(0, 253_402_300_799))
def test_date_is_the_calendars(epoch: int) -> None:
    assert bench_date(epoch) == datetime.fromtimestamp(epoch, UTC).strftime("%Y%m%d-%H%M%S").zfill(15)


def test_date_follows_source_date_epoch() -> None:
    assert bench_date(1_735_689_599) == "20241231-235959"
    assert bench_date(None) == bench_date(0) == "19700101-000000"


def test_the_hash_is_of_the_content_not_of_its_order() -> None:
    assert content_sha256({"a": 1, "b": {"c": 2, "d": 3}}) == content_sha256({"b": {"d": 3, "c": 2}, "a": 1})
    assert content_sha256({"a": 1}) != content_sha256({"a": 2})
    assert len(content_sha256({})) == 64

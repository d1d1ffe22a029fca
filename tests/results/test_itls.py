"""A request's own inter-token latencies against an SLO: which percentile counts, what is stalled, and that the files of
a run say the same as the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdflow
from pdflow.errors import PdflowError
from pdflow.results.comparison.differences import Figures
from pdflow.results.comparison.runs import OneRun
from pdflow.results.figures.itls import bounds_itl, judge_itls
from pdflow.results.figures.metrics import measure
from pdflow.results.files.read import read_runs
from pdflow.results.records import NEVER, Records
from pdflow.results.result import Result
from pdflow.scenario.schema.scenario import ClassSlo, Slo

MS = 1_000_000
S = 1_000 * MS
ROOT = Path(__file__).resolve().parents[2]
SCENARIO = ROOT / "examples/conversation.toml"
SHORT = {"workload.requests": 60, "slo": {}}


def records_of(*itls_ms: Sequence[int], names: Sequence[str] = ()) -> tuple[Records, list[np.ndarray]]:
    """Completed requests with their first tokens after 1 ms and these latencies."""
    records, waits = Records(), []
    for request, itls in enumerate(itls_ms):
        records.add(0, 10, len(itls) + 1)
        records.outcome[request] = "completed"
        records.first_token_ns[request] = MS
        records.last_token_ns[request] = MS + sum(itls) * MS
        if names:
            records.classify(request, names[request])
        waits.append(np.array(itls, dtype=np.int64) * MS)
    return records, waits


@pytest.mark.parametrize(
    ("percentile", "itl_ms", "good"),
    [(100, 100, 1), (100, 99.9, 0), (99, 10, 1), (99, 9.9, 0), (98.99, 10, 1), (99.01, 99, 0), (50, 10, 1)],
)
def test_one_wait_in_a_hundred_may_be_longer(percentile: float, itl_ms: float, good: int) -> None:
    slo = Slo(itl_ms=itl_ms, itl_percentile=percentile)
    records, waits = records_of([10] * 99 + [100])
    judge_itls(records, waits, slo, {})
    metrics = measure(records, [], S, slo)
    assert metrics.slo is not None
    assert (metrics.slo.good, metrics.slo.by_metric) == (good, {"itl": good})


def test_what_is_beyond_the_bound_is_stalled() -> None:
    records, waits = records_of([10, 30, 60], [5], [])
    slo = Slo(itl_ms=29.5, itl_percentile=50)
    judge_itls(records, waits, slo, {})
    assert (records.itl_ns, records.itl_max_ns) == ([30 * MS, 5 * MS, 0], [60 * MS, 5 * MS, 0])
    assert records.stalled_ns == [90 * MS, 0, 0]
    metrics = measure(records, [], S, slo)
    assert metrics.stalled_share == 90 / 105
    assert (metrics.request_itl.count, metrics.request_itl.max_ms) == (2, 30), "of one token there is no wait"
    assert metrics.slo is not None
    assert metrics.slo.good == 2


def test_each_class_has_its_own_bound_and_percentile() -> None:
    records, waits = records_of([10, 50], [10, 50], [10, 50], names=["chat", "batch", "other"])
    classes = {"chat": ClassSlo(itl_ms=20, itl_percentile=100), "batch": ClassSlo(ttft_ms=5)}
    slo = Slo(itl_ms=20, itl_percentile=50)
    assert bounds_itl(None, classes)
    assert not bounds_itl(Slo(ttft_ms=1), {"batch": classes["batch"]})
    judge_itls(records, waits, slo, classes)
    assert records.itl_ns == [50 * MS, 50 * MS, 10 * MS]
    assert records.stalled_ns == [50 * MS, 0, 50 * MS]
    metrics = measure(records, [], S, slo, classes)
    assert {name: row.slo.good for name, row in metrics.classes.items() if row.slo} == {
        "batch": 1,
        "chat": 0,
        "other": 1,
    }


def test_a_request_that_was_not_completed_has_none() -> None:
    records, waits = records_of([10])
    records.outcome[0] = "failed"
    judge_itls(records, [waits[0][:0]], Slo(itl_ms=1), {})
    assert (records.itl_ns, records.itl_max_ns, records.stalled_ns) == ([NEVER], [NEVER], [NEVER])
    assert records.record(0)["itl_ns"] is None


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.sampled_from([1, 25, 50, 90, 99, 99.9, 100]))
def test_the_percentile_is_the_least_that_this_share_is_within(itls: list[int], percentile: float) -> None:
    records, waits = records_of(itls)
    judge_itls(records, waits, Slo(itl_ms=1, itl_percentile=percentile), {})
    found = records.itl_ns[0] // MS
    within = sum(wait <= found for wait in itls) / len(itls)
    shorter = sum(wait < found for wait in itls) / len(itls)
    assert within >= percentile / 100 > shorter


def simulated(tmp_path: Path, **overrides: object) -> Result:
    return pdflow.simulate(SCENARIO, overrides=SHORT | overrides, out=tmp_path, save_detailed=True)


def test_a_run_and_its_files_agree(tmp_path: Path) -> None:
    result = simulated(tmp_path, **{"slo.itl_ms": 9, "slo.itl_percentile": 90})
    content = json.loads((tmp_path / "results.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    good = 0
    for waits, line in zip(content["itls"], lines, strict=True):
        ordered = sorted(round(wait * 1e9) for wait in waits) or [0]
        assert line["itl_max_ns"] == ordered[-1]
        assert line["itl_ns"] == ordered[-(-90 * len(ordered) // 100) - 1]
        assert line["stalled_ns"] == sum(wait for wait in ordered if wait > 9 * MS)
        good += line["itl_ns"] <= 9 * MS
    assert 0 < good < 60
    assert result.summary["slo_attainment"] == good / 60
    assert content["pdflow"]["slo"]["itl_percentile"] == 90
    assert content["pdflow"]["latency"]["request_itl"]["count"] == result.metrics.request_itl.count
    read = read_runs(tmp_path)
    assert isinstance(read, OneRun)
    assert read.good is not None
    assert int(read.good.sum()) == good
    again, before = Figures.of(read).values, Figures.of(OneRun.of(result, tmp_path)).values
    assert again == before
    assert again["stalled_share"] == result.summary["stalled_share"] > 0
    assert again["request_itl_p99_ms"] == result.summary["request_itl_p99_ms"]
    assert {"itl_ms", "itl_max_ms", "stalled_ms"} <= set(result.requests.columns)
    assert "p90 ITL <= 9 ms" in str(result.table())
    assert "longer than 9 ms" in str(result.table())


def test_nothing_is_measured_that_no_slo_bounds(tmp_path: Path) -> None:
    result = simulated(tmp_path)
    assert result.records.itl_ns == []
    assert "request_itl_p99_ms" not in result.summary
    assert "itl_ns" not in (tmp_path / "requests.jsonl").read_text()


def test_without_the_latencies_that_its_slo_bounds_a_run_is_refused(tmp_path: Path) -> None:
    simulated(tmp_path, **{"slo.itl_ms": 12})
    file = tmp_path / "requests.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "itl_ns": None}) + "\n" for line in lines))
    with pytest.raises(PdflowError, match="lacks itl_ns"):
        read_runs(tmp_path)


TRAFFIC = """
[scenario]
name = "stalls"
[workload]
requests = 150
arrival = { process = "poisson", rate_rps = 6.0 }
input_tokens = 3000
output_tokens = 200
[model]
preset = "llama-3.1-8b"
[slo]
itl_ms = 30
"""
AGGREGATED = """
[[pool]]
name = "both"
role = "aggregated"
replicas = 2
gpu = "h100-sxm"
"""
DISAGGREGATED = """
[network]
preset = "rdma-400g"
[[pool]]
name = "prefill"
role = "prefill"
replicas = 1
gpu = "h100-sxm"
[[pool]]
name = "decode"
role = "decode"
replicas = 1
gpu = "h100-sxm"
"""


def test_an_engine_that_also_prefills_stalls_and_a_decode_engine_does_not(tmp_path: Path) -> None:
    """What P/D is bought for: with mean TPOT the two differ by little."""
    shares, tpots = [], []
    for pools in (AGGREGATED, DISAGGREGATED):
        path = tmp_path / "scenario.toml"
        path.write_text(TRAFFIC + pools)
        summary = pdflow.simulate(path).summary
        shares.append(summary["stalled_share"])
        tpots.append(summary["tpot_mean_ms"])
    assert shares[0] > 0.1
    assert shares[1] < 0.01
    assert tpots[0] < 3 * tpots[1]

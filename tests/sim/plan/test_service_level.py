"""Service levels: how they are written, and how far a run is from one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdflow
from pdflow.results.figures.service_level import LatencyBound, ServiceLevel, ServiceLevelError
from pdflow.results.result import Result

SMALL = Path(__file__).parents[1] / "small.toml"


def run(level: ServiceLevel, **edits: object) -> Result:
    return pdflow.simulate(SMALL, overrides={"slo": level.table, **edits})


def test_a_level_is_read_as_it_is_written() -> None:
    level = ServiceLevel.parse("ttft=500ms@p99, itl=0.05s@p99.5,e2e=9s,tpot=20ms@mean,attainment=90%")
    assert level.bounds == (
        LatencyBound("ttft", 500, 99),
        LatencyBound("itl", 50, 99.5),
        LatencyBound("e2e", 9000),
        LatencyBound("tpot", 20, mean=True),
    )
    assert level.attainment == 90
    assert level.table == {"ttft_ms": 500, "itl_ms": 50, "itl_percentile": 99.5, "e2e_ms": 9000, "tpot_ms": 20}
    assert ServiceLevel.parse(level.text) == level


@pytest.mark.parametrize("share", ["0.9", "90%"])
def test_attainment_is_a_share_or_a_percentage(share: str) -> None:
    assert ServiceLevel.parse(f"ttft=1s,attainment={share}").attainment == pytest.approx(90)


def test_a_bound_without_a_percentile_is_met_by_95_percent_of_requests() -> None:
    assert ServiceLevel.parse("ttft=1s").attainment == 95
    assert ServiceLevel.parse("ttft=1s@p99").attainment is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no bound"),
        ("attainment=95%", "has no bound"),
        ("ttft", "expected a time"),
        ("ttft=5", "expected a time"),
        ("ttft=-5ms", "expected a time"),
        ("ttft=nans", "expected a time"),
        ("tfft=5ms", "'tfft=5ms' has no latency that is known"),
        ("itl=5ms@p0", "no percentile"),
        ("itl=5ms@p101", "no percentile"),
        ("itl=5ms@p9.9.9", "expected a time"),
        ("ttft=5ms,ttft=6ms", "ttft is there twice"),
        ("ttft=5ms,attainment=120%", "expected a share"),
        ("ttft=5ms,attainment=9,attainment=8", "expected a share"),
        ("ttft=5ms,attainment=9%,attainment=8%", "attainment is there twice"),
    ],
)
def test_a_wrong_level_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ServiceLevelError) as error:
        ServiceLevel.parse(text)
    assert message in str(error.value)


def test_scales_are_the_percentiles_by_their_bounds() -> None:
    level = ServiceLevel.parse("ttft=10ms@p90,tpot=1ms@mean,itl=1ms@p95,e2e=20ms@p50")
    result = run(level)
    records = result.records
    ttft_ms = np.sort((np.array(records.first_token_ns) - np.array(records.arrival_ns)) / 1e6)
    e2e_ms = np.sort((np.array(records.last_token_ns) - np.array(records.arrival_ns)) / 1e6)
    times, weights = zip(*(chunk for log in result.steps.values() for chunk in log.chunks()), strict=True)
    waits_ms = np.sort(np.repeat(np.concatenate(times), np.concatenate(weights)) / 1e9)
    scales = level.scales(result)
    # The nearest rank: the 36th of 40 requests is the first that 90 % do not exceed.
    assert scales["TTFT p90 <= 10 ms"] == ttft_ms[35] / 10
    assert scales["E2E p50 <= 20 ms"] == e2e_ms[19] / 20
    assert scales["TPOT mean <= 1 ms"] == result.metrics.tpot.mean_ms
    assert scales["ITL p95 <= 1 ms"] == pytest.approx(waits_ms[math.ceil(0.95 * len(waits_ms)) - 1])


@given(st.floats(0.5, 200), st.floats(1, 30), st.sampled_from([50.0, 90.0, 95.0, 100.0]))
def test_a_run_is_within_its_attainment_exactly_if_the_scale_is_at_most_one(
    ttft_ms: float, itl_ms: float, share: float
) -> None:
    level = ServiceLevel((LatencyBound("ttft", ttft_ms), LatencyBound("itl", itl_ms)), share)
    result = run(level)
    assert result.metrics.slo is not None
    attained = result.metrics.slo.attainment * 100 >= share
    scale = level.scales(result)["attainment"]
    # Bounds are compared in whole nanoseconds, so only one that is met to the last digit may differ.
    assert attained == (scale <= 1) or scale == pytest.approx(1, abs=1e-6)


def test_multiplying_all_bounds_by_the_scale_makes_a_run_just_meet_them() -> None:
    level = ServiceLevel.parse("ttft=3ms@p90,e2e=5ms@p75,attainment=80%")
    scale = max(level.scales(run(level)).values())
    assert scale > 1
    wider = ServiceLevel(
        tuple(LatencyBound(it.latency, it.bound_ms * scale, it.percentile) for it in level.bounds), level.attainment
    )
    assert max(wider.scales(run(wider)).values()) == pytest.approx(1)


def test_requests_that_fail_meet_no_bound() -> None:
    level = ServiceLevel.parse("ttft=10s@p95,itl=10s@p95,e2e=10s@mean,attainment=95%")
    fault = {"fault": [{"kind": "crash", "engine": "d-*", "at_s": 0.4}], "transfer.deadline_s": 2.0}
    result = run(level, **fault)
    assert 0 < result.summary["failed"] < 40
    assert set(level.scales(result).values()) == {math.inf}
    lenient = ServiceLevel.parse(f"ttft=10s@p{100 * result.summary['completed'] / 40:g}")
    assert max(lenient.scales(run(lenient, **fault)).values()) < 1

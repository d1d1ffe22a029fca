"""Figures over several runs, by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from pdflow.results.comparison.seeds import SeedsReport
from pdflow.results.result import Result


def summary(result: Result, **changed: Any) -> dict[str, Any]:
    return {**result.summary, **changed}


def printed(report: SeedsReport, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=200, color_system=None).print(report)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_a_figure_is_its_mean_with_students_interval(result: Result) -> None:
    runs = {7 + k: summary(result, ttft_p99_ms=value) for k, value in enumerate((40.0, 50.0, 60.0))}
    found = SeedsReport.of("three", 3, runs).as_dict()
    p99 = found["figures"]["ttft_p99_ms"]
    half = 4.303 * 10 / math.sqrt(3)
    assert p99["values"] == [40.0, 50.0, 60.0]
    assert (p99["mean"], p99["low"], p99["high"]) == pytest.approx((50, 50 - half, 50 + half))
    assert found["figures"]["tpot_mean_ms"]["low"] == found["figures"]["tpot_mean_ms"]["high"]
    assert (found["seeds"], found["interrupted"]) == ([7, 8, 9], False)


def test_every_percentile_has_its_interval_in_80_columns(result: Result) -> None:
    big = {f"e2e_{statistic}_ms": 1_234_567.8 for statistic in ("mean", "p50", "p90", "p99")}
    text = printed(SeedsReport.of("two", 2, {1: summary(result, **big), 2: summary(result)}))
    assert max(map(len, text.splitlines())) <= 80
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        [line] = [line for line in text.splitlines() if line.startswith(name)]
        assert line.count("±") == 4, line


def test_terminals_without_its_sign_get_another(result: Result) -> None:
    text = printed(SeedsReport.of("two", 2, {1: summary(result), 2: summary(result)}), "ascii")
    assert "+-" in text
    assert "?" not in text


def test_equal_runs_are_reported_as_equal(result: Result) -> None:
    same = {seed: summary(result) for seed in (1, 2)}
    assert "this scenario has no randomness" in printed(SeedsReport.of("two", 2, same))
    same[2]["ttft_mean_ms"] += 1
    assert "this scenario has no randomness" not in printed(SeedsReport.of("two", 2, same))


def test_missing_runs_are_reported(result: Result) -> None:
    one = SeedsReport.of("one", 3, {1: summary(result)})
    assert "interrupted, 3 requested" in printed(one)
    assert one.as_dict()["figures"]["ttft_mean_ms"]["low"] is None
    none = SeedsReport.of("none", 3, {})
    assert "no run" in printed(none)
    assert none.as_dict()["figures"] == {}


def test_what_the_scenario_does_not_ask_has_no_row(result: Result) -> None:
    runs = {seed: summary(result, goodput_rps=None, slo_attainment=None) for seed in (1, 2)}
    report = SeedsReport.of("two", 2, runs)
    assert "slo_attainment" not in report.figures
    assert "goodput" not in printed(report)


def test_the_source_of_step_times_is_reported(result: Result) -> None:
    statement = "prefill: roofline of a on b; TPOT ±25 %"
    report = SeedsReport.of("two", 2, {seed: summary(result) for seed in (1, 2)}, [statement])
    assert f"step times  {statement}" in printed(report)
    assert report.as_dict()["cost"] == [statement]

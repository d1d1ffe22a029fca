"""`pdflow top`: rates between two readings, on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pdflow.protocol.values import S
from pdflow_runtime.observe.router_figures import (
    FIRST_TOKEN_NS,
    Rates,
    RouterFigures,
    first_token_bucket,
    quantile_ms,
    rates,
)
from pdflow_runtime.observe.top import rates_of, short, view


def figures(at_s: float, requests: int, *first_tokens_ms: float) -> RouterFigures:
    counts = [0] * (len(FIRST_TOKEN_NS) + 1)
    for lasted_ms in first_tokens_ms:
        counts[first_token_bucket(int(lasted_ms * 1e6))] += 1
    return RouterFigures(int(at_s * S), int(at_s * S) // 4, requests, requests // 10, requests * 50, counts)


def test_rates_are_those_of_the_interval() -> None:
    found = rates(figures(10, 100, 9000), figures(12, 140, 9000, *[20] * 60, *[300] * 40))
    assert found is not None
    assert (found.requests_per_s, found.failed_per_s, found.tokens_per_s, found.cpu) == (20, 2, 1000, 0.25)
    assert found.ttft_p50_ms == pytest.approx(20, rel=0.1)
    assert found.ttft_p95_ms == pytest.approx(300, rel=0.1)
    assert (found.ttft_p95_ms or 0) >= 300


def test_no_rates_of_two_routers_or_of_no_answers() -> None:
    assert rates(figures(10, 100), figures(12, 3)) is None
    assert rates(figures(12, 100), figures(2, 100)) is None
    found = rates(figures(10, 1), figures(11, 1))
    assert found is not None
    assert (found.ttft_p50_ms, found.ttft_p95_ms) == (None, None)
    assert rates_of({"open": 0}, {"open": 0}) is None
    assert quantile_ms([0, 1], 0.5) == pytest.approx(1.1)
    assert quantile_ms([0] * len(FIRST_TOKEN_NS) + [1], 0.5) == FIRST_TOKEN_NS[-1] / 1e6


@pytest.mark.parametrize(
    "count", [0, 9_999, 10_000, 99_999, 999_999, 1_000_000, 9_949_999, 9_960_000, 123_456_789, 10**12 - 1]
)
def test_a_count_is_short(count: int) -> None:
    assert len(short(count)) <= 4


@pytest.mark.parametrize("staging", [None, {"bytes": 100, "free": 1, "waiting": 12_345}])
def test_it_fits_80_columns(staging: dict[str, Any] | None) -> None:
    """Each engine is one line, with its numbers whole."""
    engine: dict[str, Any] = {
        "blocks": 123_456,
        "free": 0,
        **dict.fromkeys(("quarantined", "waiting", "loading", "running", "open", "links"), 12_345),
        "steps": 123_456_789,
        "requests": [{"age_s": 12345.6, "state": "awaiting_release", "request_id": "4503599627370496.12"}] * 9,
    }
    if staging is not None:
        engine["beside"] = staging
    names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(12)]
    state = {
        "open": 123_456,
        "drained": ["decode-11"],
        "silent": ["prefill-11"],
        "stalled": [],
        "engines": dict.fromkeys(names, engine) | {"decode-0": None},
    }
    console = Console(width=80)
    with console.capture() as drawn:
        console.print(view(state, Rates(12_345.6, 123.4, 1_234_567, 0.99, 12_345, 123_456)))
    lines = drawn.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "123,456 requests open at the router; CPU 99% of a core"
    assert lines[1] == "12,345.6 requests/s (123.4 failed/s), 1,234,567 tokens/s"
    assert lines[2] == "TTFT of streams: 12,345 ms median, 123,456 ms p95"
    rows = [line for line in lines if line.startswith(("prefill-", "decode-"))]
    assert len(rows) == len(names), "no row is wrapped"
    assert all(row.rstrip().endswith(" 123M") for row in rows if "no answer" not in row)
    assert "prefill-11 (silent)" in drawn.get()
    assert len([line for line in lines if line.startswith("4503599627370496.12 ")]) == 8

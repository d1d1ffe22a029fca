from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.results.figures import exact, spread
from pdflow.results.steps import Steps

Row = tuple[int, int, int, int, int]

ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**12),
        st.integers(0, 10**13),
        st.integers(0, 10**9),
        st.integers(0, 40),
        st.integers(0, 300),
    ),
    max_size=30,
)


def log_of(rows: list[Row], one_by_one: bool = False) -> Steps:
    log = Steps()
    for start, first, delta, steps, weight in rows:
        if not one_by_one:
            log.add(start, first, delta, steps, weight)
            continue
        for step in range(steps):
            log.add(start, first + step * delta, 0, 1, weight)
            start += first + step * delta
    return log


def expanded(rows: list[Row]) -> list[int]:
    return [
        first + step * delta for _, first, delta, steps, weight in rows for step in range(steps) for _ in range(weight)
    ]


def assert_spread_is_numpys(found: spread.Spread, samples_ms: list[float]) -> None:
    assert found.count == len(samples_ms)
    if not samples_ms:
        assert found == spread.Spread()
        return
    p50, p90, p99 = np.percentile(samples_ms, [50, 90, 99])
    # numpy's own sums of floats are off by a few units in the last place of the largest sample.
    slack = max(1e-9, 1e-12 * max(map(abs, samples_ms)))
    approx = pytest.approx([np.mean(samples_ms), np.std(samples_ms), p50, p90, p99], rel=1e-9, abs=slack)
    assert [found.mean_ms, found.std_ms, found.p50_ms, found.p90_ms, found.p99_ms] == approx
    assert found.max_ms == max(samples_ms)


@given(ROWS)
def test_itl_spread_is_that_of_the_expanded_list(rows: list[Row]) -> None:
    found = spread.of_steps([log_of(rows)])
    assert_spread_is_numpys(found, [ps / 1e9 for ps in expanded(rows)])


@given(ROWS)
def test_itl_spread_does_not_depend_on_how_steps_were_logged(rows: list[Row]) -> None:
    whole = spread.of_steps([log_of(rows)])
    assert spread.of_steps([log_of(rows, one_by_one=True)]) == whole
    assert spread.of_steps([log_of(rows[::2]), log_of(rows[1::2])]) == whole


@pytest.mark.parametrize("outlier", [0, 10**17], ids=["smooth", "outlier"])
def test_percentiles_of_a_large_log_are_picked_exactly(monkeypatch: pytest.MonkeyPatch, outlier: int) -> None:
    """Small limits drive the histogram, and with an outlier the search within one bucket."""
    monkeypatch.setattr(exact, "_GATHER_AT_MOST", 500)
    rows = [(0, 10**9 + 7919 * row % 10**10, row % 1_000, 1 + row % 30, 1 + row % 5) for row in range(2_000)]
    if outlier:
        rows.append((0, outlier, 0, 1, 1))
    assert_spread_is_numpys(spread.of_steps([log_of(rows)]), [ps / 1e9 for ps in expanded(rows)])


def test_ends_are_the_running_sum_of_the_steps() -> None:
    rows = [(1_000, 10, 3, 5, 2), (5_000, 7, 0, 1, 1), (6_000, 9, 1, 3, 0)]
    ends = [(int(t), int(w)) for times, weights in log_of(rows).ends() for t, w in zip(times, weights, strict=True)]
    assert ends == [(1_010, 2), (1_023, 2), (1_039, 2), (1_058, 2), (1_080, 2), (5_007, 1)]


def test_one_row_longer_than_a_chunk_is_split() -> None:
    log = log_of([(0, 5, 2, 200_000, 1)])
    chunks = [values for values, _ in log.chunks()]
    assert max(len(values) for values in chunks) <= 1 << 16
    assert np.array_equal(np.concatenate(chunks), 5 + 2 * np.arange(200_000))


@pytest.mark.slow
def test_seven_million_single_steps_fit_in_150_mb() -> None:
    log = Steps()
    for step in range(500_000):
        log.add(step * 10**10, 9 * 10**9 + step * 7_919 % 10**10, 0, 1, 1 + step % 200)
    assert log.nbytes / 500_000 * 7_000_000 < 150e6


@given(st.lists(st.integers(0, 2**50), max_size=50), st.integers(1, 60_000))
def test_moments_are_exact(values: list[int], weight: int) -> None:
    weights = [weight + index % 3 for index in range(len(values))]
    found = exact.moments(np.array(values, dtype=np.int64), np.array(weights, dtype=np.int64))
    pairs = list(zip(values, weights, strict=True))
    assert found == exact.Moments(sum(weights), sum(v * w for v, w in pairs), sum(v * v * w for v, w in pairs))


@given(st.lists(st.integers(0, 10**13), max_size=60))
def test_spread_of_whole_numbers_is_numpys(values: list[int]) -> None:
    assert_spread_is_numpys(spread.of_ints(np.array(values, dtype=np.int64)), [value / 1e6 for value in values])


@given(st.lists(st.floats(0, 1e12, allow_subnormal=False), max_size=60))
def test_spread_of_fractions_is_numpys(values: list[float]) -> None:
    found = spread.of_floats(np.array(values))
    assert found.count == len(values)
    assert_spread_is_numpys(spread.of_floats(np.array(values), per_ms=1), values)

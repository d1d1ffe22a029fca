"""Intervals against what mathematics says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdflow.results.figures.intervals import (
    FEWEST_BLOCKS,
    MOST_BLOCKS,
    RESAMPLES,
    Floats,
    Interval,
    means,
    of_difference,
    of_mean,
    of_resamples,
    percentiles,
    resampled_blocks,
    t_quantile,
)
from pdflow.workload.rng import Rng, standard_normal


def normal(count: int, name: str) -> Floats:
    stream = Rng(5).stream(name)
    return np.array([standard_normal(stream) for _ in range(count)])


def test_quantiles_are_those_of_the_tables() -> None:
    # The last three lie beyond our table: NIST/SEMATECH e-Handbook, 1.3.6.7.2.
    for freedom, known in ((1, 12.706), (9, 2.262), (30, 2.042), (31, 2.040), (60, 2.000), (100, 1.984)):
        assert round(t_quantile(freedom), 3) == known
    falling = [t_quantile(freedom) for freedom in range(1, 200)]
    assert falling == sorted(falling, reverse=True)


def test_interval_of_a_mean_by_hand() -> None:
    found = of_mean([1.0, 2.0, 3.0])
    assert found is not None
    half = 4.303 * 1.0 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert of_mean([4.0, 4.0]) == Interval(4.0, 4.0)
    assert of_mean([4.0]) is None
    assert of_mean([]) is None


def test_t_interval_holds_the_truth_in_about_95_of_100_experiments() -> None:
    held = 0
    for values in normal(5 * 2000, "coverage").reshape(2000, 5).tolist():
        found = of_mean(values)
        assert found is not None
        held += found.low <= 0 <= found.high
    # 1900 expected, standard deviation 9.7.
    assert 1860 <= held <= 1940


def test_a_constant_difference_is_known_exactly() -> None:
    before = np.round(np.abs(normal(400, "before")) * 1024)
    taken = resampled_blocks(400, "first")
    for statistic in (means, percentiles):
        difference = statistic(before + 8.0, taken) - statistic(before, taken)
        found = of_resamples(difference.ravel())
        assert found is not None
        assert (found.low, found.high) == pytest.approx((8.0, 8.0), abs=1e-9)


def test_resampled_percentiles_are_those_of_the_requests_taken() -> None:
    values = np.abs(normal(130, "values"))
    values[[3, 70, 71]] = np.nan
    taken = resampled_blocks(130, "first")
    block = np.arange(130) * MOST_BLOCKS // 130
    for row in (0, 1, RESAMPLES - 1):
        drawn = np.repeat(values, taken[row][block])
        drawn = drawn[~np.isnan(drawn)]
        assert percentiles(values, taken)[row] == pytest.approx(np.percentile(drawn, [50, 90, 99]))
        assert means(values, taken)[row] == pytest.approx(drawn.mean())


def test_blocks_are_drawn_as_often_as_there_are_and_the_same_every_time() -> None:
    taken = resampled_blocks(1000, "first")
    assert taken.shape == (RESAMPLES, MOST_BLOCKS)
    assert (taken.sum(axis=1) == MOST_BLOCKS).all()
    assert (taken == resampled_blocks(1000, "first")).all()
    assert not (taken == resampled_blocks(1000, "other")).all()
    assert resampled_blocks(FEWEST_BLOCKS, "first").shape == (RESAMPLES, FEWEST_BLOCKS)


def test_what_nobody_counts_in_has_no_interval() -> None:
    nothing, taken = np.full(20, np.nan), resampled_blocks(20, "first")
    assert of_resamples(means(nothing, taken)) is None
    assert of_resamples(percentiles(nothing, taken).ravel()) is None


def test_blocks_hold_the_truth_where_neighbours_are_alike() -> None:
    """A queue makes neighbours alike: as if requests were independent, the interval would be a third of its width."""
    held, runs = 0, 60
    for run in range(runs):
        noise, value, series = normal(1000, f"queue/{run}"), 0.0, []
        for step in noise.tolist():
            value = 0.8 * value + step
            series.append(value)
        found = of_resamples(means(np.array(series), resampled_blocks(1000, "first")))
        assert found is not None
        held += found.low <= 0 <= found.high
    assert held >= 50


def test_difference_of_two_means_by_hand() -> None:
    """Of equal spreads and sizes it is the pooled interval, with 2 n - 2 degrees of freedom."""
    found = of_difference([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])
    assert found is not None
    half = 2.776 * math.sqrt(1 / 3 + 1 / 3)
    assert (found.low, found.high) == pytest.approx((10 - half, 10 + half))
    assert of_difference([4.0, 4.0], [7.0, 7.0]) == Interval(3.0, 3.0)
    assert of_difference([4.0], [7.0, 8.0]) is None


def test_difference_of_two_means_holds_the_truth_where_spreads_differ() -> None:
    held = 0
    for values in normal(9 * 2000, "welch").reshape(2000, 9).tolist():
        found = of_difference(values[:5], [3 + 4 * value for value in values[5:]])
        held += found is not None and found.low <= 3 <= found.high
    assert 0.94 < held / 2000 < 0.975

"""Arrival processes and length distributions: exact where they can be, right in the mean where they are random."""

from __future__ import annotations

from itertools import islice, pairwise
from math import pi
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.workload import WHEN_ONE_ENDS, Rng, arrivals
from pdflow.workload.lengths import Quantiles, empirical, lognormal, uniform

S = 10**9
FLAT = Quantiles((0.0, 1.0), (1.0, 1.0))


def test_constant_arrivals_do_not_drift() -> None:
    """3 per second: the 3,000,000th comes at 1,000,000 s exactly, although no gap is a whole number of ns."""
    assert list(islice(arrivals.constant(3.0), 4)) == [0, 333_333_333, 666_666_666, 1_000_000_000]
    assert next(islice(arrivals.constant(3.0), 30_000, None)) == 10_000 * S
    assert next(islice(arrivals.constant(0.1), 7, None)) == 70 * S  # 0.1 as written, not the binary number near it


def test_poisson_arrivals_have_their_rate_and_dispersion() -> None:
    at = list(islice(arrivals.poisson(8.0, Rng(1).stream("arrivals")), 50_000))
    assert at == sorted(at)
    assert len(at) / (at[-1] / S) == pytest.approx(8.0, rel=0.02)
    counts = [0] * (at[-1] // S + 1)
    for instant in at:
        counts[instant // S] += 1
    mean = sum(counts) / len(counts)
    assert sum((count - mean) ** 2 for count in counts) / len(counts) / mean == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 3.0])
def test_gamma_gaps_have_their_mean_and_spread(burstiness: float) -> None:
    """A gamma distribution of shape b has a coefficient of variation of 1 / sqrt(b)."""
    at = list(islice(arrivals.gamma(8.0, burstiness, Rng(4).stream("arrivals")), 40_000))
    gaps = [(b - a) / S for a, b in pairwise([0, *at])]
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.04)


def test_a_ramp_has_its_rate_everywhere() -> None:
    at = list(islice(arrivals.ramp(2.0, 10.0, 1000.0, Rng(5).stream("arrivals")), 20_000))
    early, late, after = (sum(low * S <= t < (low + 200) * S for t in at) / 200 for low in (0, 800, 1500))
    assert (early, late, after) == pytest.approx((2.8, 9.2, 10.0), rel=0.08)


def test_a_ramp_may_start_from_nothing_and_go_down() -> None:
    first = next(arrivals.ramp(0.0, 1.0, 0.0, Rng(6).stream("arrivals")))
    assert first > 0
    at = list(islice(arrivals.ramp(10.0, 1.0, 100.0, Rng(6).stream("arrivals")), 700))
    assert sum(t < 100 * S for t in at) == pytest.approx(550, rel=0.1)


def test_a_day_has_its_peak_and_its_night() -> None:
    at = list(islice(arrivals.diurnal(20.0, 0.8, 400.0, Rng(7).stream("arrivals")), 40_000))
    day = sum(t % (400 * S) < 200 * S for t in at) / len(at)
    assert day == pytest.approx(0.5 + 0.8 / pi, abs=0.01), "the half period's share of the integral of the rate"
    assert len(at) / (at[-1] / S) == pytest.approx(20.0, rel=0.03)


def test_lognormal_lengths_have_their_median_and_tail() -> None:
    draw = lognormal(800.0, 1.0, 1, 10**9, Rng(8).stream("input"))
    lengths = sorted(draw() for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(800, rel=0.03)
    assert lengths[19_000] / lengths[10_000] == pytest.approx(5.18, rel=0.05)
    clipped = lognormal(800.0, 1000.0, 16, 4096, Rng(8).stream("input"))
    assert {clipped() for _ in range(1000)} <= set(range(16, 4097)) | {16, 4096}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6), st.integers(0, 2**32))
def test_empirical_lengths_are_those_seen(pairs: list[tuple[int, int]], seed: int) -> None:
    tokens, weights = [token for token, _ in pairs], [float(weight) for _, weight in pairs]
    even = empirical(tokens, (), Rng(seed).stream("input"))
    assert {even() for _ in range(30)} <= set(tokens)
    if any(weights):
        weighted = empirical(tokens, weights, Rng(seed).stream("input"))
        assert {weighted() for _ in range(30)} <= {token for token, weight in pairs if weight}


def test_empirical_lengths_come_as_often_as_they_weigh() -> None:
    draw = empirical((10, 20, 30), (1.0, 0.0, 3.0), Rng(9).stream("input"))
    drawn = [draw() for _ in range(20_000)]
    assert drawn.count(30) / len(drawn) == pytest.approx(0.75, abs=0.01)
    assert 20 not in drawn


def test_a_closed_loop_starts_its_clients_and_then_waits() -> None:
    assert list(islice(arrivals.closed(2), 4)) == [0, 0, WHEN_ONE_ENDS, WHEN_ONE_ENDS]


def test_a_rate_without_levels_or_batches_is_poisson() -> None:
    at = list(islice(arrivals.modulated(5.0, (), 0.0, FLAT, 0, Rng(2)), 20_000))
    assert len(at) / (at[-1] / S) == pytest.approx(5.0, rel=0.03)


def test_levels_batches_and_steps() -> None:
    on_off = arrivals.RateLevel(2.0, Quantiles((0.0, 0.5, 0.500001, 1.0), (0.0, 0.0, 2.0, 2.0)))
    gaps = Quantiles((0.0, 1.0), (0.001, 0.002))
    at = list(islice(arrivals.modulated(10.0, (on_off,), 0.3, gaps, 0, Rng(3)), 40_000))
    assert at == sorted(at)
    assert len(at) / (at[-1] / S) == pytest.approx(10.0, rel=0.05)
    quiet = {instant // (2 * S) for instant in at}
    assert len(quiet) / (at[-1] / (2 * S)) == pytest.approx(0.5, abs=0.05), "half of the windows have nothing"
    stepped = list(islice(arrivals.modulated(10.0, (on_off,), 0.3, gaps, 3 * S, Rng(3)), 1000))
    assert stepped == [instant - instant % (3 * S) for instant in at[:1000]]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 2**32))
def test_uniform_lengths_stay_in_their_bounds(low: int, more: int, seed: int) -> None:
    draw = uniform(low, low + more, Rng(seed).stream("input"))
    assert all(low <= draw() <= low + more for _ in range(20))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8), st.data())
def test_quantiles_are_monotone_and_meet_their_points(values: list[float], data: st.DataObject) -> None:
    values.sort()
    inner = data.draw(
        st.lists(st.floats(0.001, 0.999), min_size=len(values) - 2, max_size=len(values) - 2, unique=True).map(sorted)
    )
    levels = [0.0, *inner, 1.0]
    try:
        quantiles = Quantiles(levels, values)
    except ValueError:
        pytest.fail("good levels and values were refused")
    slack = 1e-6 * (1 + abs(values[0]) + abs(values[-1])) / min(b - a for a, b in pairwise(levels))
    for level, value in zip(levels[1:-1], values[1:-1], strict=True):
        assert quantiles.at(level) == pytest.approx(value, abs=slack)
    at = [quantiles.at((k + 0.5) / 50) for k in range(50)]
    assert all(b >= a - slack for a, b in pairwise(at))
    assert values[0] - slack <= at[0] <= at[-1] <= values[-1] + slack


@pytest.mark.parametrize(
    ("levels", "values"), [([0, 1], [2, 1]), ([0, 0.5], [1, 2]), ([0, 0.6, 0.6, 1], [1, 2, 3, 4]), ([0, 1], [1])]
)
def test_bad_quantiles_are_refused(levels: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="quantiles"):
        Quantiles(levels, values)


def test_the_mean_of_quantiles() -> None:
    assert Quantiles((0.0, 0.5, 1.0), (0.0, 1.0, 3.0)).mean == 0.25 + 1.0

"""Fitting: bundled models come out again, scipy's answers are ours, and what is odd about a trace breaks nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import gammaincinv

from benchmarks.fit_workload import MODELS as FOLDER
from benchmarks.fit_workload import TRACES as SOURCES
from benchmarks.fit_workload import model
from pdflow.scenario.schema.workload import MODELS
from pdflow.workload import Request
from pdflow.workload.fitting.fit import FEWEST, UnfitError, fit, product_limit
from pdflow.workload.fitting.fit_arrivals import LEVELS, clock_step_ns, dispersion
from pdflow.workload.fitting.simplex import gamma_quantile, least
from pdflow.workload.model_file import ModelFileError, model_of, model_toml

TRACES = Path(__file__).resolve().parents[2] / "../shared/data/traces"


@pytest.mark.parametrize("name", MODELS)
def test_bundled_models_come_out_again(name: str) -> None:
    """To the digit where they were made; arithmetic elsewhere may round another way."""
    if not (TRACES / SOURCES[name][0]).exists():
        pytest.skip(f"needs the published trace {SOURCES[name][0]} in ../shared/data/traces")
    now, bundled = model(name, TRACES), (FOLDER / f"{name}.toml").read_text()

    def numbers(text: str) -> list[float]:
        found: list[float] = []

        def walk(value: object) -> None:
            if isinstance(value, dict):
                for inner in value.values():
                    walk(inner)
            elif isinstance(value, list):
                for inner in value:
                    walk(inner)
            elif isinstance(value, (int, float)):
                found.append(float(value))

        walk(tomllib.loads(text))
        return found

    assert numbers(now) == pytest.approx(numbers(bundled), rel=1e-3, abs=1e-5)


@given(st.floats(0.05, 5000), st.floats(0.0001, 0.9999))
def test_gamma_quantiles_are_scipys(shape: float, level: float) -> None:
    assert gamma_quantile(shape, level) == pytest.approx(float(gammaincinv(shape, level)), rel=1e-9, abs=1e-300)


@settings(max_examples=25)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-2, 2), st.floats(-2, 2))
@example(0.0, 2.25, 1e-6, 0.46875)  # so flat a start that all evaluations are spent
def test_the_least_value_is_where_scipy_finds_it(x: float, y: float, a: float, b: float) -> None:
    def bowl(point: np.ndarray) -> float:
        return float((point[0] - x) ** 2 + 3 * (point[1] - y) ** 2 + 0.5 * point[0] * point[1])

    start = np.array([a, b])
    theirs = minimize(bowl, x0=start, method="Nelder-Mead", bounds=[(-2.5, 2.5)] * 2)
    ours, value = least(bowl, start, -2.5, 2.5)
    assert value == pytest.approx(theirs.fun, abs=1e-9)
    assert ours == pytest.approx(theirs.x, abs=1e-9)


def test_dispersion_counts_empty_windows() -> None:
    at = np.array([0, 1, 2, 35])
    assert dispersion(at, 10, 40) == pytest.approx(np.var([3, 0, 0, 1]) / 1.0)


def test_a_clock_step_is_one_only_if_instants_lie_on_it() -> None:
    assert clock_step_ns(np.array([0, 0, 0, 7, 0, 14])) == 7
    assert clock_step_ns(np.array([0, 7, 7])) == 0
    assert clock_step_ns(np.array([0, 0, 0, 0, 0, 7, 11, 3, 29])) == 0
    assert clock_step_ns(np.array([0, 0])) == 0


def test_the_product_limit_of_waits_that_all_end_is_their_share() -> None:
    assert product_limit([(3.0, True), (1.0, True), (2.0, True), (2.0, True)])[0] == [1.0, 2.0, 3.0]
    assert product_limit([(3.0, True), (1.0, True), (2.0, True), (2.0, True)])[1] == pytest.approx([0.25, 0.75, 1.0])
    assert product_limit([(1.0, False), (2.0, True)]) == ([2.0], [1.0])
    assert product_limit([]) == ([], [])


gaps = st.sampled_from([0, 1, 10**6, 10**9, 3 * 10**9, 10**11])


@settings(max_examples=25)
@given(
    st.lists(gaps, min_size=3, max_size=6),
    st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    st.sampled_from([None, 1, 3, 40]),
)
def test_odd_traces_have_models_or_an_explanation(steps: list[int], lengths: list[int], talkers: int | None) -> None:
    """Constant gaps, huge gaps, one length, everything one conversation, no conversation returning unedited."""
    at, requests, prefix = 0, [], ()
    for index in range(FEWEST + 20):
        at += steps[index % len(steps)]
        tokens = lengths[index % len(lengths)]
        if talkers is not None:
            blocks = -(-tokens // 512)
            prefix = tuple(range(1000 * (index % talkers), 1000 * (index % talkers) + blocks))
        requests.append(Request(index, at, tokens, 1 + index % 7, prefix))
    try:
        figures = fit(requests)
    except UnfitError:
        assert requests[-1].arrival_ns - requests[0].arrival_ns < 10**9
        return
    text = model_toml("m", "made here", {"title": 'a "quoted" \x01 title\n'}, figures, LEVELS)
    drawn = model_of("m", tomllib.loads(text)).requests(1)
    for _ in range(200):
        request = next(drawn)
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1


def test_a_model_file_is_checked() -> None:
    text = (FOLDER / "azure-code.toml").read_text()
    for old, new, message in (
        ("rate_rps = 2.5664", "rate_rps = -1", "arrivals.rate_rps: expected `float` > 0"),
        ("rate_rps = 2.5664", 'rate_rps = "a"', "arrivals.rate_rps: expected `float`, got `str`"),
        ("[source]", "[sauce]", "missing required field `source`"),
        ("0.01, 0.02,", "0.02, 0.01,", "levels of quantiles must increase"),
        ("[3, 17, 35", "[3, 35, 17", "must not decrease"),
        ("[3, 17, 35", "[0, 17, 35", "expected at least 1"),
        ("[3, 17, 35", "[nan, 17, 35", "finite numbers"),
        ("[3, 17, 35", "[17, 35", "one value for each level"),
        (
            "relative_rate = [",
            f"relative_rate = {[0] * len(LEVELS)}\nunread = [",
            "relative_rate is 0, expected a mean of 1",
        ),
    ):
        assert old in text
        with pytest.raises(ModelFileError) as caught:
            model_of("m", tomllib.loads(text.replace(old, new, 1)))
        assert message in str(caught.value).lower() or message in str(caught.value)

"""Coefficients that are known are found again; what is asked of them holds whatever the steps are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from pdflow.cost.fit import Step, _non_negative, decode_step, fitted, misfit, prompt_step
from pdflow.cost.step import PS_PER_S, LinearTable, StepCost

TRUE = StepCost(
    hp=10**8,
    a2=700,
    c0=3 * 10**8,
    c1=10**6,
    c2=40_000,
    linear=LinearTable(tokens=(1, 64, 256, 4096), ps=(5 * 10**9, 6 * 10**9, 9 * 10**9, 120 * 10**9)),
)
KNOTS = (1, 16, 64, 256, 1024, 4096)


def taken(prefill: int, attended: int, decodes: int, context: int) -> Step:
    seconds = TRUE.step_sums_ps(prefill, attended, decodes, context) / PS_PER_S
    return Step(prefill, attended, decodes, context, seconds)


STEPS = [
    *(taken(n, n * p + n * (n + 1) // 2, 0, 0) for n in (16, 64, 256, 300, 1024, 4096) for p in (0, 1000, 4096)),
    *(taken(0, 0, d, d * c) for d in (1, 8, 33, 64, 128, 256) for c in (100, 1000, 8000)),
    *(taken(1024, 1024 * 1025 // 2, d, d * 500) for d in (8, 64, 200)),
]


def test_a_cost_is_found_again_from_its_own_steps() -> None:
    found = fitted(STEPS, KNOTS)
    assert misfit(found, STEPS).max < 1e-5
    assert found.a2 == pytest.approx(TRUE.a2, rel=1e-3)
    assert found.c2 == pytest.approx(TRUE.c2, rel=1e-3)
    other = [taken(500, 500 * 501 // 2, 20, 30_000), taken(2000, 2000 * 5000, 0, 0), taken(0, 0, 99, 99 * 777)]
    assert misfit(found, other).max < 1e-5


def test_a_knot_without_steps_is_left_out() -> None:
    """Nothing would hold L there, and whatever lies near it would be anything."""
    found = fitted(STEPS, (1, 2, 16, 64, 100, 256, 512, 1024, 4096, 9999))
    assert isinstance(found.linear, LinearTable)
    assert found.linear.tokens == KNOTS
    assert fitted(STEPS, ()).linear.of(4096) == 0


def test_steps_are_summed_as_engines_sum_them() -> None:
    assert prompt_step(3, 10, 1.0, prefix=5) == Step(30, 3 * sum(range(6, 16)), 0, 0, 1.0)
    assert decode_step(4, 100, 1.0) == Step(0, 0, 4, 400, 1.0)


def test_misfit_is_relative_and_signed() -> None:
    steps = [Step(1, 1, 0, 0, 2.0), Step(1, 1, 0, 0, 0.5)]
    off = misfit(StepCost(hp=PS_PER_S), steps)
    assert (off.max, off.bias) == (1.0, pytest.approx(0.25))


@given(st.lists(st.floats(0.001, 10.0), min_size=len(STEPS), max_size=len(STEPS)))
def test_whatever_was_measured_more_never_takes_less(seconds: list[float]) -> None:
    steps = [Step(s.prefill_tokens, s.attended, s.decodes, s.context, t) for s, t in zip(STEPS, seconds, strict=True)]
    found = fitted(steps, KNOTS)
    assert isinstance(found.linear, LinearTable)
    assert all(low <= high for low, high in pairwise(found.linear.ps))
    assert min(found.hp, found.a1, found.a2, found.c0, found.c1, found.c2) >= 0


@given(st.integers(0, 2**32 - 1))
def test_non_negative_least_squares_as_scipy_solves_them(seed: int) -> None:
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(size=(20, 8)), draw.normal(size=20)
    ours = _non_negative(matrix, target)
    assert (ours >= 0).all()
    assert np.linalg.norm(matrix @ ours - target) == pytest.approx(nnls(matrix, target)[1], rel=1e-9)

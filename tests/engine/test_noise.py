"""Noise of steps: which step has which draw, and that sums of many steps vary as if each step had its own."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from pdflow.cost import StepCost
from pdflow.engine.noise import MILLION, RUN, StepNoise
from pdflow.workload.rng import Rng
from pdflow_sim.noise import DRAWS, gamma_ppm, normal_ppm

COST = StepCost(h0=10_000_000_000, c1=1_000_000_000, c2=1_000)
"""A decode step of 10 ms, 1 ms more for each sequence."""


def test_a_step_with_prompts_varies_in_proportion_to_its_duration() -> None:
    noise = StepNoise((100_000, -50_000), 1, COST)
    assert noise.chunk_step_ps(0, 2_000_000) == 1_900_000
    assert noise.chunk_step_ps(1, 2_000_000) == 2_200_000


def test_decode_steps_of_a_run_share_a_draw_in_proportion_to_a_step_without_context() -> None:
    noise = StepNoise((100_000, -50_000), 0, COST, run=4)
    added = [noise.decode_step_ps(step, 2) for step in range(9)]
    # Half of 10 % of 12 ms, then half of -5 %.
    assert added == [600_000_000] * 4 + [-300_000_000] * 4 + [600_000_000]
    assert [noise.steps_left(step) for step in range(5)] == [4, 3, 2, 1, 4]


@pytest.mark.parametrize(("run", "together"), [(1, 64), (16, 256), (RUN, 4 * RUN)])
def test_sums_of_many_steps_vary_as_if_each_had_its_own_draw(run: int, together: int) -> None:
    share = 0.05
    noise = StepNoise(normal_ppm(share, Rng(3).stream("noise of steps")), 0, COST, run=run)
    mean_ps = COST.decode_step_ps(2, 0)
    sums = [
        sum(noise.decode_step_ps(step, 2) for step in range(begin, begin + together)) / mean_ps
        for begin in range(0, 250 * together, together)
    ]
    # 5 % of a step, by the square root of their number; 250 sums say so to about a tenth.
    assert pstdev(sums) / together**0.5 == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_normal_draws_have_this_deviation_and_no_bias(share: float) -> None:
    draws = normal_ppm(share, Rng(0).stream("noise of steps"))
    assert len(draws) == DRAWS
    assert fmean(draws) == pytest.approx(0, abs=1)
    assert pstdev(draws) / MILLION == pytest.approx(share, rel=0.05)
    assert min(draws) > -MILLION


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_gamma_draws_have_this_deviation_and_no_bias(share: float) -> None:
    draws = gamma_ppm(share, Rng(0).stream("noise of links"))
    assert fmean(draws) == pytest.approx(0, abs=1)
    assert pstdev(draws) / MILLION == pytest.approx(share, rel=0.1)
    assert min(draws) > -MILLION, "no duration is negative"


def test_none_is_drawn_where_nothing_varies() -> None:
    assert gamma_ppm(0.0, Rng(0).stream("noise of links")) == []

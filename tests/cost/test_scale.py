"""Three factors: what they leave alone, and what they multiply."""

from __future__ import annotations

import pytest

from pdflow.cost import LinearTable, LinearTime, StepCost
from pdflow.cost.scale import Factors, scaled

COST = StepCost(h0=1000, h1=10, a2=6, c2=8, linear=LinearTime(slope_ps=100, floor_ps=5000, allreduce_ps=40))


def test_no_factors_leave_a_cost_as_it_is() -> None:
    assert scaled(COST, Factors()) == COST


@pytest.mark.parametrize("decodes", [1, 40, 900])
def test_the_linear_factor_multiplies_the_linear_term_alone(decodes: int) -> None:
    twice = scaled(COST, Factors(linear=2.0))
    more = twice.decode_step_ps(decodes, 100) - COST.decode_step_ps(decodes, 100)
    assert more == COST.linear.of(decodes)


def test_the_linear_factor_multiplies_a_table_too() -> None:
    table = StepCost(linear=LinearTable(tokens=(1, 100), ps=(10, 1000)))
    assert scaled(table, Factors(linear=1.5)).linear == LinearTable(tokens=(1, 100), ps=(15, 1500))


def test_the_attention_factor_multiplies_what_is_attended() -> None:
    half = scaled(COST, Factors(attention=0.5))
    assert COST.decode_step_ps(3, 700) - half.decode_step_ps(3, 700) == 4 * 700
    assert COST.step_sums_ps(10, 55, 0, 0) - half.step_sums_ps(10, 55, 0, 0) == 3 * 55


def test_host_time_is_added_and_never_negative() -> None:
    assert scaled(COST, Factors(host_ps=500)).h0 == 1500
    assert scaled(COST, Factors(host_ps=-5000)).h0 == 0

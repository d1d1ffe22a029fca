"""The threshold of conditional disaggregation: what the rule says, token by token, and how it moves."""

from __future__ import annotations

import pytest

from pdflow.cost.crossover import EngineSteps, TransferRoute, added_ps, thresholds
from pdflow.cost.step import LinearTime, StepCost, constant

LINEAR = StepCost(h0=40, h1=1, hp=7, a1=3, c0=9, c1=2, c2=1, linear=LinearTime(slope_ps=20, floor_ps=4000))
QUADRATIC = StepCost(h0=40, a1=3, a2=1, linear=LinearTime(slope_ps=20, floor_ps=4000))


def route(cost: StepCost, budget: int = 1000, fixed_ns: int = 1, per_token_ns: int = 0) -> TransferRoute:
    return TransferRoute(EngineSteps(cost, budget), lambda tokens: fixed_ns + per_token_ns * tokens)


@pytest.mark.parametrize("cost", [LINEAR, QUADRATIC], ids=["linear", "quadratic"])
@pytest.mark.parametrize("decodes", [0, 1, 7, 50])
def test_what_a_prompt_adds_is_what_its_steps_take_more(cost: StepCost, decodes: int) -> None:
    """Whatever the context of the batch is: it is in both."""
    stage, contexts = EngineSteps(cost, 100), [11 + i for i in range(decodes)]
    without = cost.step_ps([], contexts) if decodes else 0
    room = 100 - decodes
    for tokens in (1, 30, 250):
        chunks = [(min(room, tokens - done), done) for done in range(0, tokens, room)]
        expected = sum(cost.step_ps([chunk], contexts) - without for chunk in chunks)
        assert added_ps(stage, tokens, decodes) == expected


@pytest.mark.parametrize("cost", [LINEAR, QUADRATIC], ids=["linear", "quadratic"])
def test_the_threshold_is_the_last_length_before_somebody_waits_for_less_elsewhere(cost: StepCost) -> None:
    stage = EngineSteps(cost, 1000)
    found = thresholds(stage, [route(cost)], 20, 500)
    for decodes, above in enumerate(found):
        here = [(decodes + 1) * added_ps(stage, n, decodes) for n in range(501)]
        there = [added_ps(stage, n, 0) + 1000 for n in range(501)]
        first = next((n for n in range(1, 501) if here[n] > there[n]), 501)
        assert above == first - 1, decodes


def test_an_idle_decode_engine_computes_everything_and_a_busy_one_less_and_less() -> None:
    found = thresholds(EngineSteps(LINEAR, 1000), [route(LINEAR)], 60, 500)
    assert found[0] == 500
    assert list(found) == sorted(found, reverse=True)
    assert 0 < found[60] < 200, "while weights are read, 200 tokens in all cost nothing but their host time"


def test_a_slow_route_keeps_more_local_and_the_fastest_of_several_counts() -> None:
    stage = EngineSteps(LINEAR, 1000)
    fast, slow = route(LINEAR), route(LINEAR, fixed_ns=5)
    keeps = thresholds(stage, [slow], 9, 500)
    assert all(a >= b for a, b in zip(keeps, thresholds(stage, [fast], 9, 500), strict=True))
    assert keeps != thresholds(stage, [fast, slow], 9, 500) == thresholds(stage, [fast], 9, 500)


def test_prompts_that_are_never_chunked() -> None:
    cost = constant(prefill_s=0.02, decode_step_s=0.005)
    assert added_ps(EngineSteps(cost, 8), 1000, 3) == added_ps(EngineSteps(cost, 8), 1, 3) == cost.hp
    assert thresholds(EngineSteps(cost, 8), [route(cost)], 2, 500) == (500, 0, 0)

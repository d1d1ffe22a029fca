"""Step times come out of what engines noted as they went in."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.cost.step import LinearTable, StepCost
from pdflow_runtime.calibrate.steps import ObservedStep, TooFewStepsError, compositions, fit_steps, steps_seen
from pdflow_runtime.observe.event_log import FirstPiecePassed, Page, Stepped

PS_PER_MS = 10**9
TRUE = StepCost(
    a2=2_000,
    c2=150_000,
    linear=LinearTable(tokens=(1, 32, 512, 2048), ps=(3 * PS_PER_MS, 4 * PS_PER_MS, 30 * PS_PER_MS, 130 * PS_PER_MS)),
)


WAKING_MS = 2


def stepped(prefill: int, decodes: int, context: int, disturbed: float = 1.0, waking: bool = False) -> ObservedStep:
    attended = prefill * (prefill + 1) // 2
    lasted_ps = TRUE.step_sums_ps(prefill, attended, decodes, context) + waking * WAKING_MS * PS_PER_MS
    lasted = round(lasted_ps / 1000 * disturbed)
    return ObservedStep(Stepped(0, lasted, int(prefill > 0), prefill, attended, decodes, context, 0, 0), waking)


def noted(draw: random.Random, disturbed: bool = True) -> list[ObservedStep]:
    """Of both kinds."""

    def times() -> float:
        return 1 + 2 * draw.random() if disturbed and draw.random() < 1 / 3 else 1.0

    found = []
    for _ in range(15):
        for prefill in (1, 8, 32, 128, 512, 1024, 2048):
            found.append(stepped(prefill, 0, 0, times(), waking=True))
        for decodes in (1, 2, 4, 8, 16, 32):
            for context in (100, 800):
                found.append(stepped(0, decodes, decodes * context, times()))
                found.append(stepped(0, decodes, decodes * context, times(), waking=True))
    return found


def test_a_cost_is_found_again() -> None:
    fit = fit_steps(noted(random.Random(1), disturbed=False))
    assert fit.steps == 15 * 31
    assert fit.kinds == 31
    _holds(fit.cost, 1.0, 0.03)
    assert fit.cost.hw == pytest.approx(WAKING_MS * PS_PER_MS, rel=0.05)


def test_what_disturbs_steps_is_in_their_mean_up_to_a_measure() -> None:
    """One in three takes up to three times as long, and counts as no more than twice: 1 + (1/4 + 1/2) / 3 times."""
    fit = fit_steps(noted(random.Random(1)))
    _holds(fit.cost, 1.25, 0.15)


def _holds(found: StepCost, times: float, rel: float) -> None:
    for prefill, decodes, context in ((32, 0, 0), (700, 0, 0), (2048, 0, 0), (0, 1, 400), (0, 12, 3000), (0, 32, 9000)):
        attended = prefill * (prefill + 1) // 2
        sums = (prefill, attended, decodes, context)
        assert found.step_sums_ps(*sums) == pytest.approx(times * TRUE.step_sums_ps(*sums), rel=rel), sums


def test_steps_of_one_kind_are_one_with_their_median() -> None:
    steps = [stepped(0, 2, 200, disturbed) for disturbed in (1.0, 1.0, 5.0)]
    (one,) = compositions(steps)
    assert (one.decodes, one.context) == (2, 200)
    assert one.seconds == pytest.approx(TRUE.decode_step_ps(2, 200) / 1e12)


def test_an_engine_that_has_stood_still_wakes() -> None:
    notes = [
        Stepped(t, lasted, 0, 0, 0, 1, 100, 1, 4) for t, lasted in ((0, 10**6), (10**6, 10**6), (3 * 10**6, 10**6))
    ]
    seen = steps_seen([Page("decode-0", 0, [notes[0], FirstPiecePassed(5, 1), *notes[1:]])])
    assert [each.waking for each in seen] == [True, False, True]


def test_too_few_kinds_of_steps_are_refused() -> None:
    with pytest.raises(TooFewStepsError, match="1 different sizes"):
        fit_steps([stepped(0, 1, 100)] * 50)

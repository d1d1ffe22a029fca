"""Step times come out of what engines noted as they went in, whatever disturbs one step in three."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.cost.step import LinearTable, StepCost
from runtime.calibrate.steps import TooFewStepsError, compositions, fit_steps
from runtime.diary import Stepped

PS_PER_MS = 10**9
TRUE = StepCost(
    a2=2_000,
    c2=150_000,
    linear=LinearTable(tokens=(1, 32, 512, 2048), ps=(3 * PS_PER_MS, 4 * PS_PER_MS, 30 * PS_PER_MS, 130 * PS_PER_MS)),
)


def stepped(prefill: int, decodes: int, context: int, disturbed: float = 1.0) -> Stepped:
    attended = prefill * (prefill + 1) // 2
    lasted = round(TRUE.step_sums_ps(prefill, attended, decodes, context) / 1000 * disturbed)
    return Stepped(0, lasted, int(prefill > 0), prefill, attended, decodes, context, 0, 0)


def noted(draw: random.Random) -> list[Stepped]:
    """Of both kinds; one in three takes up to three times as long."""
    found = []
    for _ in range(15):
        for prefill in (1, 8, 32, 128, 512, 1024, 2048):
            found.append(stepped(prefill, 0, 0, _disturbed(draw)))
        for decodes in (1, 2, 4, 8, 16, 32):
            for context in (100, 800):
                found.append(stepped(0, decodes, decodes * context, _disturbed(draw)))
    return found


def _disturbed(draw: random.Random) -> float:
    return 1 + 2 * draw.random() if draw.random() < 1 / 3 else 1.0


def test_a_cost_is_found_again() -> None:
    fit = fit_steps(noted(random.Random(1)))
    assert fit.steps == 15 * 19
    assert fit.kinds == 19
    for prefill, decodes, context in ((32, 0, 0), (700, 0, 0), (2048, 0, 0), (0, 1, 400), (0, 12, 3000), (0, 32, 9000)):
        attended = prefill * (prefill + 1) // 2
        true, found = (cost.step_sums_ps(prefill, attended, decodes, context) for cost in (TRUE, fit.cost))
        assert found == pytest.approx(true, rel=0.12), (prefill, decodes)


def test_steps_of_one_kind_are_one_with_their_median() -> None:
    steps = [stepped(0, 2, 200, disturbed) for disturbed in (1.0, 1.0, 5.0)]
    (one,) = compositions(steps)
    assert (one.decodes, one.context) == (2, 200)
    assert one.seconds == pytest.approx(TRUE.decode_step_ps(2, 200) / 1e12)
    assert len(compositions(steps, 2)) == 2


def test_of_too_few_kinds_nothing_is_said() -> None:
    with pytest.raises(TooFewStepsError, match="1 kinds"):
        fit_steps([stepped(0, 1, 100)] * 50)

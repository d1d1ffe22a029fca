"""Random plans of faults (`support/fault_plans.py`) over small random scenarios: the oracle is content with every
event, every request ends completed, failed with a reason or cancelled, every block comes back, and both modes give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import RELAXED, random_simulations


def everything_ends(overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> Any:
    world = play(overrides)
    records = world.records
    assert len(records) == overrides["workload.requests"]
    for request, outcome in enumerate(records.outcome):
        assert outcome in ("completed", "failed", "cancelled"), f"request {request}: {outcome}"
        assert (records.reason[request] is None) == (outcome == "completed")
    router = world.router.port.endpoint
    assert not router.attempts
    assert not any(router.prefill_choice.loads + router.decode_choice.loads)
    exact = play(overrides, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(world).splitlines()
    return world


@random_simulations(200)
@given(overrides=disturbed_scenarios())
def test_whatever_goes_wrong_everything_ends(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    everything_ends(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=disturbed_scenarios())
def test_whatever_goes_wrong_everything_ends_at_night(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    everything_ends(overrides, play, lines)

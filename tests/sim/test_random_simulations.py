"""Random scenarios, many with all times on one grid so that everything collides: both modes give the same bytes, the
oracle is content with every event, and at the end every request has ended and every block is back. Then the same with
clients that hang up, operations and handshakes that fail, deadlines and leases that run out, and further attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.sim.support.simulations import (
    RELAXED,
    both_modes_agree,
    disturbances,
    everything_ends,
    random_simulations,
    scenarios,
)


@random_simulations(300)
@given(overrides=scenarios())
def test_exact_and_fast_are_the_same(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=scenarios())
def test_exact_and_fast_are_the_same_at_night(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, play, lines)


@random_simulations(300)
@given(disturbed=disturbances())
def test_everything_ends(disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    everything_ends(disturbed, play, lines)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None, suppress_health_check=RELAXED)
@given(disturbed=disturbances())
def test_everything_ends_at_night(
    disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    everything_ends(disturbed, play, lines)

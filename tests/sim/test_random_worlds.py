"""Random scenarios, many with all times on one grid so that everything collides: both modes give the same bytes, the
oracle is content with every event, and at the end every request has ended and every block is back. Then the same with
clients that hang up, operations and handshakes that fail, deadlines and leases that run out, and further attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.sim.support.worlds import RELAXED, disturb, disturbances, scenarios


def both_modes_agree(overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    fast = play(overrides)
    assert all(fast.records.outcome), "a request has no outcome"
    assert set(fast.records.outcome) == {"completed"}, fast.records.reason
    assert len(fast.records) == overrides["workload.requests"]
    exact = play(overrides, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()


@settings(max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=RELAXED)
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


def everything_ends(disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    disturbed = dict(disturbed)
    overrides = disturbed.pop("overrides")

    def prepared(world: Any) -> None:
        disturb(world, **disturbed)

    fast = play(overrides, prepared=prepared)
    records = fast.records
    assert len(records) == overrides["workload.requests"]
    gone = {request for _, request in disturbed["hangups"]}
    for request, outcome in enumerate(records.outcome):
        assert outcome in ("completed", "failed", "cancelled"), f"request {request}: {outcome}"
        assert (records.reason[request] is None) == (outcome == "completed")
        assert outcome != "cancelled" or request in gone
        assert 1 <= records.attempts[request] <= overrides["router.max_attempts"]
    router = fast.router.port.endpoint
    assert not router.attempts
    assert not any(router.prefill_choice.loads + router.decode_choice.loads)
    exact = play(overrides, prepared=prepared, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()


@settings(max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=RELAXED)
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

"""How many engines a load wants: grown at once, shrunk to what was enough for a while."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.routing.scaling import Autoscaler


def test_it_grows_at_once_and_shrinks_after_the_stabilization_window() -> None:
    it = Autoscaler(target=4, least=1, most=8, stabilization_ns=10)
    assert [it.desired_replicas(legs, now) for now, legs in enumerate((0, 9, 20, 5, 5))] == [1, 3, 5, 5, 5]
    assert it.desired_replicas(5, 12) == 5
    assert it.desired_replicas(5, 13) == 2, "for ten ns two have been enough"
    assert it.desired_replicas(100, 14) == 8


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=40), st.integers(0, 12))
def test_it_is_the_most_of_the_last_while(looks: list[tuple[int, int]], stabilization_ns: int) -> None:
    it, other = Autoscaler(4, 2, 9, stabilization_ns), None
    history: list[tuple[int, int]] = []
    now = 0
    for gap, legs in looks:
        now += gap
        history.append((now, max(2, min(9, ceil(legs / 4)))))
        expected = max(desired for at, desired in history if at >= now - stabilization_ns)
        other = it.fork()
        assert it.desired_replicas(legs, now) == other.desired_replicas(legs, now) == expected
        assert it.fingerprint() == other.fingerprint()

"""Times are drawn from a stream of the fault's own, patterns mean engines, and links have a direction."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from pdflow.faults.draw import windows
from pdflow.faults.names import matching
from pdflow.faults.plan import FaultTimes, Links
from pdflow.workload.rng import Rng

S = 1_000_000_000


def first(when: FaultTimes, count: int = 4, name: str = "a") -> list[tuple[int, int | None]]:
    return list(islice(windows(when, Rng(1).stream(name)), count))


def test_once_for_good_or_for_a_while() -> None:
    assert first(FaultTimes()) == [(0, None)]
    assert first(FaultTimes(at_ns=5, for_ns=3)) == [(5, 8)]


def test_again_and_again() -> None:
    assert first(FaultTimes(at_ns=5, for_ns=3, every_ns=10), 3) == [(5, 8), (15, 18), (25, 28)]


def test_at_random_times() -> None:
    when = FaultTimes(at_ns=7 * S, for_ns=1, rate_per_s=10.0)
    drawn = first(when, 20_000)
    begins = [begin for begin, _ in drawn]
    assert begins == sorted(set(begins))
    assert begins[0] > 7 * S
    assert all(end == begin + 1 for begin, end in drawn)
    assert (begins[-1] - 7 * S) / S == pytest.approx(2000, rel=0.03)
    assert drawn == first(when, 20_000)
    long = first(FaultTimes(for_ns=3 * S, rate_per_s=10.0), 1000)
    assert all(later[0] > (earlier[1] or 0) for earlier, later in pairwise(long))
    assert drawn[:10] != first(when, 10, "b")


def test_a_rate_above_one_per_nanosecond_still_advances() -> None:
    begins = [begin for begin, _ in first(FaultTimes(for_ns=1, rate_per_s=1e12), 100)]
    assert begins == sorted(set(begins))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("p-1", ["p-1"]),
        ("p-*", ["p-0", "p-1", "p-10"]),
        ("*-1", ["p-1", "d-1"]),
        ("*", ["p-0", "p-1", "p-10", "d-1"]),
        ("p-1*", ["p-1", "p-10"]),
        ("p", []),
        (".*", []),
        ("", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert list(matching(pattern, ["p-0", "p-1", "p-10", "d-1"])) == expected


def test_links_have_a_direction() -> None:
    links = Links(((frozenset({"p-0"}), frozenset({"d-0", "d-1"})),))
    assert links.hold("p-0", "d-1")
    assert not links.hold("d-1", "p-0")
    assert not links.hold("p-1", "d-1")
    assert links
    assert not Links(())

"""md1 and shared-link against mathematics: request by request, and their means."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MD1 = EXAMPLES / "md1.toml"
SHARED_LINK = EXAMPLES / "shared-link.toml"
SERVICE_NS = 100_000_000


def lindley(arrivals: list[int]) -> list[int]:
    """Sojourns of a FIFO queue with one server and a constant service time."""
    free, sojourns = 0, []
    for at in arrivals:
        free = max(free, at) + SERVICE_NS
        sojourns.append(free - at)
    return sojourns


def processor_sharing(arrivals: list[int]) -> list[Fraction]:
    """Sojourns when n jobs of equal size each get 1/n of the server: one virtual clock, exact fractions."""
    ends: list[tuple[Fraction, int]] = []
    sojourns, virtual, now = [Fraction(0)] * len(arrivals), Fraction(0), Fraction(0)
    for job, at in [*enumerate(arrivals), (-1, 1 << 80)]:
        while ends and now + (ends[0][0] - virtual) * len(ends) <= at:
            now += (ends[0][0] - virtual) * len(ends)
            virtual, done = heappop(ends)
            sojourns[done] = now - arrivals[done]
        virtual += (at - now) / len(ends) if ends else 0
        now = Fraction(at)
        heappush(ends, (virtual + SERVICE_NS, job))
    return sojourns


def ttfts(records: Any) -> list[int]:
    return [first - at for first, at in zip(records.first_token_ns, records.arrival_ns, strict=True)]


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
def test_md1_is_lindleys_recursion(play: Callable[..., Any], method: str) -> None:
    overrides = {"workload.requests": 5000, "transfer.method": method}
    if method == "nixl-pull":
        overrides["router.dispatch"] = "sequential"
    records = play(overrides, file=MD1, checked=False).records
    worst = max(abs(a - b) for a, b in zip(ttfts(records), lindley(records.arrival_ns), strict=True))
    assert worst <= 1


def test_shared_link_is_processor_sharing(play: Callable[..., Any]) -> None:
    records = play({"workload.requests": 5000}, file=SHARED_LINK, checked=False).records
    expected = processor_sharing([at + SERVICE_NS for at in records.arrival_ns])
    worst = max(abs(a - SERVICE_NS - b) for a, b in zip(ttfts(records), expected, strict=True))
    assert worst <= 1


def test_the_oracle_of_processor_sharing_by_hand() -> None:
    """Two jobs at 0, a third half a service later: each has a quarter done by then; three share the rest."""
    quarter = SERVICE_NS // 4
    assert processor_sharing([0, 0, 2 * quarter]) == [11 * quarter, 11 * quarter, 10 * quarter]
    assert processor_sharing([0, 10 * SERVICE_NS]) == [SERVICE_NS, SERVICE_NS]


@pytest.mark.nightly
@pytest.mark.parametrize("rho", [0.5, 0.7, 0.8])
@pytest.mark.parametrize("file", [MD1, SHARED_LINK], ids=["md1", "shared-link"])
def test_means_within_two_percent(play: Callable[..., Any], file: Path, rho: float) -> None:
    """Pollaczek-Khinchine for M/D/1; for processor sharing, prefill and then s / (1 - rho). Means of 8 seeds."""
    means = []
    for seed in range(1, 9):
        overrides = {"scenario.seed": seed, "workload.arrival.rate_rps": rho * 1e9 / SERVICE_NS}
        found = ttfts(play(overrides, file=file, checked=False).records)
        means.append(sum(found) / len(found) / SERVICE_NS)
    expected = 1 + rho / (2 * (1 - rho)) if file == MD1 else 1 + 1 / (1 - rho)
    assert sum(means) / len(means) == pytest.approx(expected, rel=0.02)

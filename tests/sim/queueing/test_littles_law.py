"""Little's law, L = lambda W, by its integrals: exact over any stretch that begins and ends empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("concurrency", [1, 7, 40])
def test_the_integral_of_requests_in_the_system_is_the_sum_of_their_times(
    play: Callable[..., Any], concurrency: int
) -> None:
    """The system is watched from outside: by the router's own events, of which each begins or ends one request."""
    changes: list[tuple[int, int]] = []

    def observe(node: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        if node == "router":
            replies = sum(type(effect).__name__ == "Reply" for effect in effects)
            changes.append((now, int(type(event).__name__ == "RequestArrived") - replies))

    overrides = {
        "workload.requests": 400,
        "workload.arrival": f'{{ process = "closed", concurrency = {concurrency} }}',
        "network.preset": "rdma-400g",
    }
    world = play(overrides, observe=observe, checked=False)
    records = world.records
    integral = inside = before = 0
    most = 0
    for now, change in changes:
        integral += inside * (now - before)
        inside, before = inside + change, now
        most = max(most, inside)
    assert inside == 0
    assert most == concurrency
    assert integral == sum(last - at for last, at in zip(records.last_token_ns, records.arrival_ns, strict=True))


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_concurrency_is_throughput_times_mean_latency(play: Callable[..., Any], concurrency: int) -> None:
    """N = X * R over the whole run but for the last N requests, whose clients have nothing more to send."""
    arrival = f'{{ process = "closed", concurrency = {concurrency} }}'
    world = play({"workload.requests": 2000, "workload.arrival": arrival}, checked=False)
    records = world.records
    spent = sum(last - at for last, at in zip(records.last_token_ns, records.arrival_ns, strict=True))
    throughput = len(records) / world.totals.duration_ns
    assert throughput * spent / len(records) == pytest.approx(concurrency, rel=concurrency / 2000)

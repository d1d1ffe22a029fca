"""Time in API servers that grows with a prompt's length, on each leg that has the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ONE: dict[str, Any] = {
    "workload.requests": 1,
    "workload.input_tokens": 100,
    "workload.output_tokens": 1,
    "noise.api_server": 0,
}
PER_TOKEN = "api_server_s_per_token"


def first_token_ns(play: Callable[..., Any], **keys: Any) -> int:
    world = play(ONE | keys)
    assert world.records.outcome == ["completed"]
    return int(world.records.first_token_ns[0])


@pytest.mark.parametrize(
    ("dispatch", "pools", "passes"),
    [("sequential", ("p",), 1), ("sequential", ("p", "d"), 2), ("concurrent", ("p", "d"), 1)],
)
def test_each_token_takes_time_on_every_leg(
    play: Callable[..., Any], dispatch: str, pools: tuple[str, ...], passes: int
) -> None:
    """100 tokens at 3 us each, twice where the decode leg follows the prefill leg."""
    plain = first_token_ns(play, **{"router.dispatch": dispatch})
    keys = {f"pool.{pool}.{PER_TOKEN}": 3e-6 for pool in pools}
    assert first_token_ns(play, **{"router.dispatch": dispatch, **keys}) - plain == passes * 300_000


def test_it_adds_to_the_constant(play: Callable[..., Any]) -> None:
    plain = first_token_ns(play, **{"router.dispatch": "sequential"})
    keys = {"pool.p.api_server_s": 0.001, f"pool.p.{PER_TOKEN}": 3e-6}
    assert first_token_ns(play, **{"router.dispatch": "sequential", **keys}) - plain == 1_300_000


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull", "kv-store"])
def test_short_prompts_overtake_long_ones_and_both_modes_agree(play: Callable[..., Any], method: str) -> None:
    keys = {"transfer.method": method, f"pool.p.{PER_TOKEN}": 1e-3, f"pool.d.{PER_TOKEN}": 1e-4}
    fast, exact = (play(keys, exact=exact) for exact in (False, True))
    assert set(fast.records.outcome) == {"completed"}
    assert fast.records.first_token_ns == exact.records.first_token_ns
    by_arrival = sorted(range(len(fast.records)), key=lambda request: fast.records.arrival_ns[request])
    firsts = [fast.records.first_token_ns[request] for request in by_arrival]
    assert firsts != sorted(firsts)


def test_an_abort_does_not_overtake_its_request(play: Callable[..., Any]) -> None:
    """The client leaves while the prompt is in the API server, which the abort goes through, too."""
    keys = {"workload.client": "{ timeout_s = 0.0001 }", f"pool.p.{PER_TOKEN}": 3e-6, f"pool.d.{PER_TOKEN}": 3e-6}
    world = play(ONE | keys)
    assert world.records.outcome == ["cancelled"]

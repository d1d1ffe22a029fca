"""A store between P and D: what it moves and keeps, and that random worlds with one are sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow_sim.world import World
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import disturb, disturbances, random_simulations, scenarios, within_limits

Play = Callable[..., World]
STORE = {"transfer.method": "kv-store", "router.dispatch": "sequential"}
BLOCK = 16
TOKEN_BYTES = 131_072
"""KV of llama-3.1-8b."""


@st.composite
def stored(draw: st.DrawFn, overrides: dict[str, Any]) -> dict[str, Any]:
    """The same by a store that holds a few prompts, or all. A prompt of 100 tokens takes 1.8 MB of its four layers,
    and as published three times as much at most."""
    return within_limits(
        overrides
        | {
            "transfer.method": "kv-store",
            "transfer.dialect": draw(st.sampled_from(["strict", "strict", "as-published"])),
            "transfer.store_nodes": draw(st.integers(1, 3)),
            "transfer.store_bytes": draw(st.sampled_from([6_400_000, 20_000_000, 1_000_000_000])),
            "transfer.store_granularity": draw(st.sampled_from(["prompt", "block"])),
            "transfer.store_keep": draw(st.booleans()),
            "transfer.store_lease_s": draw(st.sampled_from([0.05, 10.0])),
            "transfer.store_high_water": draw(st.sampled_from([0.3, 0.9, 1.0])),
            "model.num_layers": 4,
        }
    )


@st.composite
def talking(draw: st.DrawFn, overrides: dict[str, Any]) -> dict[str, Any]:
    """The same, in sessions that begin alike, on engines that mostly forget: a name is 64 tokens, a prompt has many."""
    overrides |= {
        "workload.input_tokens": '{ dist = "uniform", low = 300, high = 700 }',
        "workload.sessions.turns": draw(st.sampled_from(["1", "3"])),
        "workload.sessions.think_s": draw(st.sampled_from(["0", '{ dist = "exponential", mean_s = 0.02 }'])),
        "workload.sessions.new_tokens": '{ dist = "uniform", low = 1, high = 40 }',
        "workload.sessions.system_prompt_tokens": draw(st.sampled_from([0, 256, 256])),
        "workload.sessions.max_context_tokens": 1500,
        "transfer.store_granularity": "block",
        "transfer.store_keep": draw(st.sampled_from([True, True, False])),
        "transfer.store_bytes": draw(st.sampled_from([75_000_000, 150_000_000, 1_000_000_000])),
    }
    for pool in ("p", "d"):
        overrides[f"pool.{pool}.kv_tokens"] = draw(st.sampled_from([2048, 8192]))
        overrides[f"pool.{pool}.enable_prefix_caching"] = draw(st.sampled_from([False, False, True]))
    return overrides


@st.composite
def some(draw: st.DrawFn, base: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    found = draw(base)
    return draw(talking(found)) if draw(st.booleans()) else found


@st.composite
def undisturbed(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(some(stored(draw(scenarios()))))
    # A short lease may end before D comes.
    return found | {"transfer.store_lease_s": 10.0}


@st.composite
def disturbed(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(disturbances())
    return found | {"overrides": draw(some(stored(found["overrides"])))}


@st.composite
def hindered(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(disturbed_scenarios().filter(lambda found: found["transfer.dialect"] == "strict"))
    return draw(some(stored(found))) | {"transfer.dialect": "strict"}


def both_modes(
    overrides: dict[str, Any],
    play: Play,
    lines: Callable[[Any], bytes],
    prepared: Callable[[Any], None] = lambda world: None,
) -> World:
    fast = play(overrides, prepared=prepared)
    assert len(fast.records) <= overrides["workload.requests"]
    assert all(outcome in ("completed", "failed", "cancelled") for outcome in fast.records.outcome)
    exact = play(overrides, prepared=prepared, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()
    return fast


@random_simulations(60)
@given(overrides=undisturbed())
def test_by_a_store_every_request_completes(
    overrides: dict[str, Any], play: Play, lines: Callable[[Any], bytes]
) -> None:
    world = both_modes(overrides, play, lines)
    assert set(world.records.outcome) == {"completed"}, world.records.reason


@random_simulations(60)
@given(how=disturbed())
def test_by_a_store_every_request_ends(how: dict[str, Any], play: Play, lines: Callable[[Any], bytes]) -> None:
    more = dict(how)
    both_modes(more.pop("overrides"), play, lines, lambda world: disturb(world, **more))


@random_simulations(60)
@given(overrides=hindered())
def test_whatever_goes_wrong_around_a_store_everything_ends(
    overrides: dict[str, Any], play: Play, lines: Callable[[Any], bytes]
) -> None:
    both_modes(overrides, play, lines)


def used(world: World) -> int:
    return sum(store.memory.used for store in world.stores)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (4, 2), (2, 8)])
def test_every_byte_goes_in_once_and_out_once(play: Play, p_tp: int, d_tp: int) -> None:
    world = play(STORE | {"pool.p.tp": p_tp, "pool.d.tp": d_tp})
    assert world.totals.bytes_moved == 2 * TOKEN_BYTES * sum(world.records.input_tokens)


@pytest.mark.parametrize("granularity", ["prompt", "block"])
def test_what_is_consumed_once_is_gone(play: Play, granularity: str) -> None:
    world = play(STORE | {"transfer.store_keep": False, "transfer.store_granularity": granularity})
    assert used(world) == 0


def test_what_is_kept_is_there(play: Play) -> None:
    world = play(STORE)
    assert used(world) == sum(-(-tokens // BLOCK) for tokens in world.records.input_tokens)


def test_a_prompt_larger_than_the_store_fails_alone(play: Play) -> None:
    world = play(STORE | {"transfer.store_bytes": 50 * TOKEN_BYTES})
    fits = [-(-tokens // BLOCK) <= 50 // BLOCK for tokens in world.records.input_tokens]
    assert [outcome == "completed" for outcome in world.records.outcome] == fits

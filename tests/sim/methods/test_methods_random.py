"""Every method over random worlds, undisturbed and disturbed, with memories that hold a few prompts or many: the oracle
is content, every request ends, every memory comes back empty, and both modes give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.methods.catalogue import METHODS
from pdflow.routing.effects import DispatchDecode
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import (
    MS,
    RELAXED,
    disturb,
    disturbances,
    random_simulations,
    scenarios,
    within_limits,
)

CORE = ("nixl-push", "nixl-pull")
"""Every other test is about these, as they are by default."""
OTHERS = [name for name in METHODS if name not in CORE]
MB = 1_000_000


@st.composite
def by_method(draw: st.DrawFn, overrides: dict[str, Any]) -> dict[str, Any]:
    """The same by another method. A prompt of 100 tokens takes 1.7 MB of its four layers."""
    method = draw(st.sampled_from([*OTHERS, "nixl-push"]))
    strict = method == "nixl-push" or draw(st.booleans())
    return within_limits(
        overrides
        | {
            "transfer.method": method,
            "transfer.dialect": "strict" if strict else "as-published",
            "transfer.progressive": strict and draw(st.booleans()),
            "transfer.load_by_layer": draw(st.booleans()),
            "transfer.kv_buffer_device": draw(st.sampled_from(["cuda", "cpu"])),
            "transfer.host_buffer_bytes": draw(st.sampled_from([2 * MB, 5 * MB, 1000 * MB])),
            "transfer.kv_buffer_size": draw(st.sampled_from([2 * MB, 5 * MB, 1000 * MB])),
            "transfer.mem_pool_size_gb": draw(st.sampled_from([0, 1])),
            "model.num_layers": 4,
        }
    )


@st.composite
def undisturbed(draw: st.DrawFn) -> dict[str, Any]:
    overrides = draw(by_method(draw(scenarios())))
    if overrides["transfer.method"] == "p2p-nccl-get":
        # What its store evicts is lost.
        overrides["transfer.kv_buffer_size"] = 1000 * MB
    elif overrides["transfer.dialect"] == "as-published":
        # A pool that is full ends D's listener, and a ring that is full may stay so.
        overrides |= {"transfer.mem_pool_size_gb": 1, "transfer.host_buffer_bytes": 1000 * MB}
    return overrides


@st.composite
def disturbed(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(disturbances())
    overrides = draw(by_method(found["overrides"]))
    if overrides["transfer.method"] == "p2p-nccl-get":
        # As published D goes without what P has lost, and the oracle says so.
        overrides["transfer.dialect"] = "strict"
    return found | {"overrides": overrides}


@st.composite
def hindered(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(disturbed_scenarios().filter(lambda found: found["transfer.dialect"] == "strict"))
    return draw(by_method(found)) | {"transfer.dialect": "strict"}


def both_modes(
    overrides: dict[str, Any],
    play: Callable[..., Any],
    lines: Callable[[Any], bytes],
    prepared: Callable[[Any], None] = lambda world: None,
) -> Any:
    fast = play(overrides, prepared=prepared)
    assert len(fast.records) == overrides["workload.requests"]
    assert all(outcome in ("completed", "failed", "cancelled") for outcome in fast.records.outcome)
    assert not (fast.metrics.corrupted and overrides["transfer.dialect"] == "strict"), (
        "decoded with other KV than its prompt's"
    )
    exact = play(overrides, prepared=prepared, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()
    return fast


def all_complete(overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    world = both_modes(overrides, play, lines)
    assert set(world.records.outcome) == {"completed"}, world.records.reason


def all_end(disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    how = dict(disturbed)
    both_modes(how.pop("overrides"), play, lines, lambda world: disturb(world, **how))


@random_simulations(150)
@given(overrides=undisturbed())
def test_by_any_method_every_request_completes(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    all_complete(overrides, play, lines)


@random_simulations(150)
@given(how=disturbed())
def test_by_any_method_every_request_ends(
    how: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    all_end(how, play, lines)


@random_simulations(100)
@given(overrides=hindered())
def test_whatever_goes_wrong_by_any_method_everything_ends(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes(overrides, play, lines)


@st.composite
def in_two_orders(draw: st.DrawFn) -> dict[str, Any]:
    """Memories on both sides that hold two or three prompts; P's blocks hold all."""
    room = draw(st.sampled_from([4 * MB, 6 * MB]))
    return draw(scenarios()) | {
        "transfer.method": draw(st.sampled_from(["cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async"])),
        "transfer.dialect": "strict",
        "transfer.host_buffer_bytes": room,
        "transfer.kv_buffer_size": room,
        "transfer.mem_pool_size_gb": 0,
        "model.num_layers": 4,
        "pool.p.kv_tokens": 4096,
        "pool.p.tp": 1,
        "pool.d.tp": 1,
    }


def all_complete_though_d_asks_in_another_order(overrides: dict[str, Any], play: Callable[..., Any]) -> None:
    def shuffled(world: Any) -> None:
        dispatch = world.router.do[DispatchDecode]

        def later(port: Any, effect: Any) -> None:
            world.clock.call(crc32(b"%d" % effect.request) % 50 * MS, lambda arg: dispatch(*arg), (port, effect))

        world.router.do[DispatchDecode] = later

    records = play(overrides, prepared=shuffled).records
    assert set(records.outcome) == {"completed"}, records.reason
    assert set(records.attempts) == {1}


@random_simulations(100)
@given(overrides=in_two_orders())
def test_no_two_memories_wait_for_each_other(overrides: dict[str, Any], play: Callable[..., Any]) -> None:
    """D asks in another order than P computes."""
    all_complete_though_d_asks_in_another_order(overrides, play)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=in_two_orders())
def test_no_two_memories_wait_for_each_other_at_night(overrides: dict[str, Any], play: Callable[..., Any]) -> None:
    all_complete_though_d_asks_in_another_order(overrides, play)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=undisturbed())
def test_by_any_method_every_request_completes_at_night(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    all_complete(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(how=disturbed())
def test_by_any_method_every_request_ends_at_night(
    how: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    all_end(how, play, lines)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=hindered())
def test_whatever_goes_wrong_by_any_method_everything_ends_at_night(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes(overrides, play, lines)

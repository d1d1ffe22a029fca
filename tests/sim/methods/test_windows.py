"""Models with layers that attend to a window: planning many steps at once changes nothing, every request ends, every
block comes back, and of these layers the end of a prompt is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.methods.posting import Extent
from pdflow.scenario.costs.transfer_time import counters
from pdflow.scenario.validation.fit import moved_shape_of
from tests.sim.support.simulations import (
    both_modes_agree,
    disturbances,
    everything_ends,
    random_simulations,
    scenarios,
)

WINDOWS = ("{ tokens = 20, layers = 16 }", "{ tokens = 7, layers = 27 }", "{ tokens = 64, layers = 32 }")


@st.composite
def windowed(draw: st.DrawFn, overrides: dict[str, Any]) -> dict[str, Any]:
    capacity = draw(st.sampled_from([1280, 8192]))
    return overrides | {
        "model.window": draw(st.sampled_from(WINDOWS)),
        "pool.p.kv_tokens": capacity,
        "pool.d.kv_tokens": capacity,
    }


@random_simulations(100)
@given(overrides=scenarios().flatmap(windowed))
def test_exact_and_fast_are_the_same(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, play, lines)


@random_simulations(100)
@given(disturbed=disturbances(), overrides=st.data())
def test_everything_ends(
    disturbed: dict[str, Any], overrides: st.DataObject, play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    disturbed["overrides"] = overrides.draw(windowed(disturbed["overrides"]))
    everything_ends(disturbed, play, lines)


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize("p_tp", [1, 2])
def test_of_layers_with_a_window_its_blocks_are_moved(play: Callable[..., Any], method: str, p_tp: int) -> None:
    overrides = {
        "transfer.method": method,
        "router.dispatch": "sequential",
        "model.window": "{ tokens = 20, layers = 24 }",
        "pool.p.tp": p_tp,
    }
    world = play(overrides)
    records = world.records
    # Of 4,096 bytes per token and layer 24 layers move three blocks of 16 tokens, 8 whole prompts.
    expected = [4096 * (8 * tokens + 24 * min(tokens, 48)) for tokens in records.input_tokens]
    assert world.totals.bytes_moved == sum(expected)
    assert max(records.input_tokens) > 48 > min(records.input_tokens)


def test_descriptors_are_those_of_each_kind(lay: Callable[..., Any]) -> None:
    """A prompt of 1,000 tokens has 63 blocks, a window of 20 tokens 3; each has a descriptor of K and one of V."""

    def count(key: str, value: str) -> int:
        scenario = lay({"transfer.method": "nixl-push", key: value})
        pools = [(pool, moved_shape_of(scenario.model, pool)) for pool in scenario.pools]
        return counters(pools[0], pools[1], "push", "exactly-once", Extent.TENSOR)[0, 0].count(1000, 0)

    # The last block is not full: with 8 KV heads in the order HND it is 8 pieces, in all layers and in windows alike.
    whole = count("model.num_layers", "32")
    assert whole == 32 * 2 * (62 + 8)
    assert count("model.window", "{ tokens = 20, layers = 24 }") == 8 * 2 * (62 + 8) + 24 * 2 * 3
    assert count("model.linear_attention", HYBRID) == 8 * 2 * (62 + 8) + 24 * 2
    sparse = "{ topk = 64, heads = 4, head_dim = 128, layers = 20 }"
    mla = "{ kv_lora_rank = 512, q_lora_rank = 64, qk_nope_head_dim = 128, qk_rope_head_dim = 64, v_head_dim = 128 }"
    scenario = lay({"model.mla": mla, "model.sparse_attention": sparse})
    pools = [(pool, moved_shape_of(scenario.model, pool)) for pool in scenario.pools]
    found = counters(pools[0], pools[1], "push", "exactly-once", Extent.TENSOR)[0, 0]
    assert found.count(1000, 0) == (32 + 20) * 63
    shape = pools[0][1]
    assert shape.bytes_per_token == scenario.model.kv_bytes_per_token == 32 * 576 * 2 + 20 * 132


HYBRID = "{ layers = 24, key_heads = 16, value_heads = 16, key_head_dim = 16, value_head_dim = 16 }"
STATE_BYTES = 24 * (16 * 16 * 16 * 4 + 3 * 3 * 16 * 16 * 2)


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize("p_tp", [1, 2])
def test_states_are_moved_once(play: Callable[..., Any], lines: Callable[[Any], bytes], method: str, p_tp: int) -> None:
    overrides = {
        "transfer.method": method,
        "router.dispatch": "sequential",
        "model.linear_attention": HYBRID,
        "pool.p.tp": p_tp,
        "pool.d.cost": '{ model = "roofline" }',
    }
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.bytes_moved == sum(8 * 4096 * tokens + STATE_BYTES for tokens in world.records.input_tokens)
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.hybrid])
def test_methods_of_one_group_refuse_states(lay: Callable[..., Any], method: str) -> None:
    overrides = {"transfer.method": method, "router.dispatch": "sequential", "model.linear_attention": HYBRID}
    with pytest.raises(ScenarioError, match="expected nixl-push or nixl-pull with linear_attention"):
        lay(overrides)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_serves_them(
    play: Callable[..., Any], lay: Callable[..., Any], lines: Callable[[Any], bytes], method: str
) -> None:
    """Those that move one KV cache group only, as their originals, keep and move whole contexts in all layers."""
    overrides = {
        "transfer.method": method,
        "router.dispatch": "sequential",
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "model.num_layers": 4,
        "model.window": "{ tokens = 20, layers = 3 }",
    }
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    whole = 4 * 4096 * sum(world.records.input_tokens)
    assert (world.totals.bytes_moved < whole) == METHODS[method].hybrid
    window = lay(overrides).model.window
    assert window.whole_kv != METHODS[method].hybrid
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_progressive_writes_refuse_states(lay: Callable[..., Any]) -> None:
    overrides = {"transfer.method": "nixl-push", "transfer.progressive": True, "model.linear_attention": HYBRID}
    with pytest.raises(ScenarioError, match=r"transfer\.progressive: moves one KV cache group only"):
        lay(overrides)


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize("keys", [{"model.window": "{ tokens = 64, layers = 24 }"}, {"model.linear_attention": HYBRID}])
def test_prompts_that_share_a_prefix_have_all_their_tables(
    play: Callable[..., Any], lines: Callable[[Any], bytes], method: str, keys: dict[str, Any]
) -> None:
    overrides = keys | {
        "transfer.method": method,
        "router.dispatch": "sequential",
        "workload.requests": 30,
        "workload.sessions": "{ turns = 3, think_s = 0.01, new_tokens = 40 }",
        "workload.input_tokens": 300,
        "pool.p.kv_tokens": 65536,
        "pool.d.kv_tokens": 65536,
    }
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_packed_blocks_have_those_of_each_group_of_layers(lay: Callable[..., Any]) -> None:
    """8 layers with whole contexts are one group, 24 with windows three, of which each has 3 blocks for 20 tokens."""
    scenario = lay({"transfer.method": "nixl-push", "model.window": "{ tokens = 20, layers = 24 }"})
    pools = [(pool, moved_shape_of(scenario.model, pool)) for pool in scenario.pools]
    found = counters(pools[0], pools[1], "push", "exactly-once", Extent.BLOCK)[0, 0]
    assert found.count(1008) == 63 + 3 * 3


def test_more_stages_than_layers_with_kv_are_refused(lay: Callable[..., Any]) -> None:
    with pytest.raises(ScenarioError, match="layers with KV"):
        lay({"transfer.method": "nixl-push", "model.linear_attention": HYBRID, "pool.p.pp": 32})

"""Engines that serve requests alone, beside those that share the work, and without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.results.records import FIRST_DECODE, stage_durations_ns
from tests.sim.queueing.test_queueing_theory import lindley, ttfts
from tests.sim.support.simulations import (
    both_modes_agree,
    costs,
    disturbances,
    everything_ends,
    random_simulations,
    scenarios,
)

HERE = Path(__file__).parents[1]
MIXED, ALONE = HERE / "mixed.toml", HERE / "alone.toml"
MS = 1_000_000


def test_a_request_by_hand(play: Callable[..., Any]) -> None:
    """Two hops and a prefill to the first token; then a step for each other one. No KV moves."""
    world = play({"workload.requests": 1, "workload.output_tokens": 4, "network.http_latency_s": 0.003}, file=ALONE)
    records = world.records
    assert ttfts(records) == [106 * MS]
    assert records.last_token_ns[0] - records.first_token_ns[0] == 60 * MS
    assert (records.prefill_engine, records.decode_engine) == (["w-0"], ["w-0"])
    assert world.fabric.messages == 0
    stages = stage_durations_ns(records)
    assert sum(stages)[0] == 106 * MS
    assert stages[FIRST_DECODE][0] == 3 * MS


def test_one_token_each_is_lindleys_recursion(play: Callable[..., Any]) -> None:
    overrides = {"workload.requests": 5000, "workload.arrival.rate_rps": 8.0, "pool.w.max_num_seqs": 1}
    records = play(overrides, file=ALONE, checked=False).records
    worst = max(abs(a - b) for a, b in zip(ttfts(records), lindley(records.arrival_ns), strict=True))
    assert worst <= 1


def test_prompts_and_tokens_share_steps(play: Callable[..., Any]) -> None:
    """What a later prompt takes is added to the running answers' next token: what disaggregation is for."""
    overrides = {
        "workload.requests": 2,
        "workload.arrival": '{ process = "constant", rate_rps = 5.0 }',
        "workload.output_tokens": 10,
    }
    records = play(overrides, file=ALONE).records
    spans = [last - first for first, last in zip(records.first_token_ns, records.last_token_ns, strict=True)]
    assert spans == [9 * 20 * MS + 100 * MS, 9 * 20 * MS]


def test_both_kinds_take_turns(play: Callable[..., Any]) -> None:
    records = play({}, file=MIXED).records
    assert records.prefill_engine.count("w-0") == records.prefill_engine.count("p-0") == 20
    alone = {i for i, name in enumerate(records.prefill_engine) if name == "w-0"}
    assert {records.decode_engine[i] for i in alone} == {"w-0"}
    assert {records.decode_engine[i] for i in range(40) if i not in alone} == {"d-0"}


@st.composite
def mixed(draw: st.DrawFn, others: Callable[[], st.SearchStrategy[dict[str, Any]]]) -> dict[str, Any]:
    drawn = draw(others())
    overrides = drawn.get("overrides", drawn)
    overrides |= {
        "pool.w.replicas": draw(st.integers(1, 2)),
        "pool.w.kv_tokens": draw(st.sampled_from([192, 320, 4096])),
        "pool.w.max_num_seqs": draw(st.sampled_from([1, 2, 256])),
        "pool.w.max_num_batched_tokens": draw(st.sampled_from([32, 8192])),
        "pool.w.cost": draw(costs("decode")),
    }
    return drawn


@random_simulations(150)
@given(overrides=mixed(scenarios))
def test_exact_and_fast_are_the_same(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, partial(play, file=MIXED), lines)


@random_simulations(150)
@given(disturbed=mixed(disturbances))
def test_everything_ends(disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    everything_ends(disturbed, partial(play, file=MIXED), lines)


@pytest.mark.parametrize("engine_id", ["same", "new"])
def test_one_that_dies_loses_its_requests_and_serves_again(play: Callable[..., Any], engine_id: str) -> None:
    fault = f"{{ kind = 'crash', engine = 'w-0', at_s = 0.2, restart_after_s = 0.1, engine_id = '{engine_id}' }}"
    overrides = {"fault": f"[{fault}]", "router.max_attempts": 3, "workload.output_tokens": 40}
    records = play(overrides, file=MIXED).records
    assert set(records.outcome) == {"completed"}
    assert len(records.earlier) == sum(number > 1 for number in records.attempts) > 0, "what had started is resumed"
    after = [name for at, name in zip(records.arrival_ns, records.prefill_engine, strict=True) if at > 400 * MS]
    assert {"same": "w-0", "new": "w-0+1"}[engine_id] in after


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pool.d.role": "aggregated"}, 'no pool has role = "decode"'),
        ({"pool.p.role": "aggregated"}, 'no pool has role = "prefill"'),
        ({"pool.w.pp": 2}, "only prefill engines can have pipeline stages"),
        ({"workload.output_tokens": 9000}, "does not fit an engine of pool w"),
    ],
)
def test_what_cannot_be(lay: Callable[..., Any], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        lay(overrides, file=MIXED)

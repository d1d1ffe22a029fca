"""[noise] in a run: on by default, off for queueing theory, from the seed alone, and no remedy for waves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

Play = Callable[..., Any]

ROOFLINE = {"pool.p.cost": '{ model = "roofline" }', "pool.d.cost": '{ model = "roofline" }'}
NONE = {"noise.steps": 0.0, "noise.api_server": 0.0, "noise.links": 0.0}
LOADED = ROOFLINE | {
    "workload.requests": 200,
    "workload.arrival": '{ process = "poisson", rate_rps = 20.0 }',
    "workload.input_tokens": 500,
    "workload.output_tokens": 40,
    "pool.p.kv_tokens": 100_000,
    "pool.d.kv_tokens": 100_000,
    "network.latency_s": 0.001,
}


def ttfts_ns(world: Any) -> list[int]:
    records = world.records
    assert set(records.outcome) == {"completed"}
    return [first - arrival for first, arrival in zip(records.first_token_ns, records.arrival_ns, strict=True)]


def test_it_is_on_by_default_and_comes_from_the_seed(play: Play) -> None:
    default, again, other = (ttfts_ns(play(LOADED | {"scenario.seed": seed})) for seed in (0, 0, 1))
    assert default == again != other
    assert default != ttfts_ns(play(LOADED | NONE))


@pytest.mark.parametrize("key", ["noise.steps", "noise.api_server", "noise.links"])
def test_each_kind_changes_times_by_itself_and_hardly_their_mean(play: Play, key: str) -> None:
    share = {"noise.steps": 0.05, "noise.api_server": 0.1, "noise.links": 0.4}[key]
    without, with_it = (ttfts_ns(play(LOADED | NONE | {key: value})) for value in (0.0, share))
    assert without != with_it
    assert fmean(with_it) == pytest.approx(fmean(without), rel=0.1)


def test_constant_costs_have_none_unless_it_is_asked_for(play: Play) -> None:
    # small.toml: constant costs, 0 s at API servers; its requests come one by one.
    quiet = {"noise.links": 0.0}
    assert ttfts_ns(play(quiet)) == ttfts_ns(play(quiet | NONE))
    assert ttfts_ns(play(quiet | {"noise.steps": 0.05})) != ttfts_ns(play(quiet))


@pytest.mark.parametrize("noise", [NONE, {}])
def test_a_closed_loop_with_fixed_lengths_stays_in_step(play: Play, noise: dict[str, float]) -> None:
    """As vLLM does (`python -m benchmarks.vllm.closed_loop`): waves do not spread by themselves."""
    clients, rounds = 16, 8
    loop = {
        "workload.requests": clients * rounds,
        "workload.arrival": f'{{ process = "closed", concurrency = {clients} }}',
        "workload.input_tokens": 512,
        "workload.output_tokens": 96,
        "pool.w.cost": '{ model = "roofline" }',
        "pool.w.kv_tokens": 100_000,
        "pool.w.max_num_batched_tokens": 2048,
    }
    world = play(loop | noise, file=Path(__file__).with_name("alone.toml"))
    steps = Counter(world.records.first_token_ns[-clients * rounds // 2 :])
    shared = sum(count for count in steps.values() if count > 1)
    assert shared > 0.7 * clients * rounds / 2

"""Engines that start and stop under way: nobody is lost, whoever is down gets nothing, and load decides how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow_sim.run import RunOptions, conclude, prepare, run
from tests.sim.faults.test_fault_swarm import everything_ends as ends_under_faults
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import RELAXED, both_modes_agree, random_simulations, scenarios

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]
MS = 1_000_000

STEADY = {
    "workload.arrival": '{ process = "constant", rate_rps = 50 }',
    "workload.requests": 100,
    "pool.p.replicas": 2,
    "pool.d.replicas": 2,
}
"""Two seconds."""


def scaled(*tables: str) -> dict[str, Any]:
    return STEADY | {"scale": f"[{', '.join(tables)}]"}


def served(world: Any, column: str, since_ms: float, until_ms: float = 1e9) -> Counter[str]:
    """Who served the requests that arrived then."""
    records = world.records
    engines = zip(records.arrival_ns, getattr(records, column), strict=True)
    return Counter(engine for at, engine in engines if since_ms * MS <= at < until_ms * MS)


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize(("pool", "column"), [("p", "prefill_engine"), ("d", "decode_engine")])
def test_a_schedule_starts_and_stops_engines_and_nobody_is_lost(
    play: Play, lines: Lines, method: str, pool: str, column: str
) -> None:
    up = f'{{ pool = "{pool}", at_s = 0.5, replicas = 4, start_lag_s = 0.2 }}'
    down = f'{{ pool = "{pool}", at_s = 1.2, replicas = 1 }}'
    overrides = scaled(up, down) | {"transfer.method": method}
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert set(world.records.attempts) == {1}
    names = [f"{pool}-{i}" for i in range(4)]
    # A pull's decode leg comes after its prefill, which may take a little.
    assert set(served(world, column, 0, 650)) == set(names[:2])
    assert set(served(world, column, 701, 1150)) == set(names)
    assert set(served(world, column, 1201)) == {names[0]}
    assert world.totals.notes["engine started"] == 2
    assert world.totals.notes["engine stopped"] == 3
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_one_that_stops_ends_what_it_has(play: Play) -> None:
    """A long answer is not cut off, and its engine's GPUs are taken until it is over."""
    slow = '{ model = "constant", prefill_s = 0.02, decode_step_s = 0.05 }'
    overrides = scaled('{ pool = "d", at_s = 0.1, replicas = 1 }') | {"pool.d.cost": slow, "workload.output_tokens": 40}
    world = play(overrides)
    records = world.records
    assert set(records.outcome) == {"completed"}
    last = max(at for at, engine in zip(records.last_token_ns, records.decode_engine, strict=True) if engine == "d-1")
    assert last > 2_000 * MS
    [(since, until)] = world.scaling.pools["d"][1].spans
    assert since == 0
    assert last <= until <= last + 20 * MS


def test_a_prefill_engine_is_there_until_its_kv_has_been_fetched(play: Play) -> None:
    """D has no room for long, and P holds the prompts that it has computed."""
    overrides = scaled('{ pool = "p", at_s = 0.2, replicas = 1 }') | {
        "transfer.method": "nixl-pull",
        "pool.d.max_num_seqs": 1,
        "pool.d.cost": '{ model = "constant", prefill_s = 0.02, decode_step_s = 0.01 }',
        "workload.requests": 30,
    }
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    mine = [i for i, engine in enumerate(world.records.prefill_engine) if engine == "p-1"]
    [(_, until)] = world.scaling.pools["p"][1].spans
    assert until >= max(world.records.ends[8][i] for i in mine)


def test_who_comes_back_before_it_has_left_loses_no_time(play: Play) -> None:
    slow = '{ model = "constant", prefill_s = 0.02, decode_step_s = 0.05 }'
    down, up = (f'{{ pool = "d", at_s = {at}, replicas = {n}, start_lag_s = 10 }}' for at, n in ((0.4, 1), (0.6, 2)))
    world = play(scaled(down, up) | {"pool.d.cost": slow, "workload.output_tokens": 40})
    assert served(world, "decode_engine", 650)["d-1"] > 30
    assert not {"engine started", "engine stopped"} & world.totals.notes.keys()


def test_a_start_can_be_called_off(play: Play) -> None:
    up, down = (f'{{ pool = "d", at_s = {at}, replicas = {n}, start_lag_s = 1 }}' for at, n in ((0.2, 3), (0.5, 2)))
    world = play(scaled(up, down))
    assert set(world.records.decode_engine) == {"d-0", "d-1"}
    assert world.scaling.pools["d"][2].spans == [(200 * MS, 500 * MS)]


def test_new_pairs_shake_hands(play: Play) -> None:
    """The first prompt of an engine that has started waits for it: everybody else has met."""
    overrides = scaled('{ pool = "p", at_s = 1.0, replicas = 3 }') | {
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "network.handshake_s": 0.3,
        "network.warm": False,
        "workload.arrival": '{ process = "constant", rate_rps = 10 }',
    }
    records = play(overrides).records
    waits = [first - at for first, at in zip(records.first_token_ns, records.arrival_ns, strict=True)]
    slow = [i for i, wait in enumerate(waits) if wait > 200 * MS and records.arrival_ns[i] > 900 * MS]
    assert {records.prefill_engine[i] for i in slow} == {"p-1", "p-2"}
    assert max(records.arrival_ns[i] for i in slow) < 2_000 * MS


BURST = {
    "workload.arrival": '{ process = "ramp", from_rps = 20, to_rps = 120, over_s = 2.0 }',
    "workload.requests": 200,
    "pool.p.replicas": 1,
    "pool.p.max_num_seqs": 1,
    "pool.d.replicas": 1,
}
BY_LOAD = '[{ pool = "p", target_queue = 2, max_replicas = 6, every_s = 0.05, calm_s = 0.5, start_lag_s = 0.1 }]'


def test_load_decides_how_many_there_are(play: Play, lines: Lines) -> None:
    one, many = play(BURST), play(BURST | {"scale": BY_LOAD})
    waits = [
        max(first - at for first, at in zip(w.records.first_token_ns, w.records.arrival_ns, strict=True))
        for w in (one, many)
    ]
    assert set(many.records.outcome) == {"completed"}
    assert len(set(many.records.prefill_engine)) >= 3
    assert waits[1] < waits[0] / 4
    assert lines(play(BURST | {"scale": BY_LOAD}, exact=True, checked=False)) == lines(many)


def test_engines_leave_when_load_is_low(play: Play) -> None:
    low_load = {
        "workload.arrival": '{ process = "constant", rate_rps = 5 }',
        "workload.requests": 20,
        "pool.p.replicas": 4,
    }
    world = play(BURST | low_load | {"scale": BY_LOAD})
    assert world.totals.notes["engine stopped"] == 3
    assert set(served(world, "prefill_engine", 1000)) == {"p-0"}


def test_results_count_gpus_while_they_are_taken(lay: Callable[..., Any]) -> None:
    scenario = lay(scaled('{ pool = "p", at_s = 1.0, replicas = 1 }'))
    world, _ = prepare(scenario, RunOptions(), [])
    run(world, None, False)
    totals = conclude(scenario, world, (), False).totals
    first, second = (engine.up_ns for engine in totals.engines if engine.role == "prefill")
    assert first == totals.duration_ns
    assert second is not None
    assert 1000 * MS <= second < 1100 * MS
    assert {engine.up_ns for engine in totals.engines if engine.role == "decode"} == {None}


@st.composite
def changing(draw: st.DrawFn, others: Callable[[], st.SearchStrategy[dict[str, Any]]]) -> dict[str, Any]:
    """Those worlds, whose engines come and go."""
    overrides = draw(others())
    tables = []
    for pool in ("p", "d"):
        lag = draw(st.sampled_from([0.0, 0.02, 0.3]))
        if draw(st.booleans()):
            stabilization_s = draw(st.sampled_from([0.0, 0.1]))
            tables.append(
                f'{{ pool = "{pool}", target_queue = {draw(st.sampled_from([0.5, 2]))}, max_replicas = 3, '
                f"every_s = 0.01, calm_s = {stabilization_s}, start_lag_s = {lag} }}"
            )
        else:
            for at in draw(st.lists(st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.2]), max_size=3)):
                tables.append(
                    f'{{ pool = "{pool}", at_s = {at}, replicas = {draw(st.integers(1, 3))}, start_lag_s = {lag} }}'
                )
    overrides["scale"] = f"[{', '.join(tables)}]"
    if draw(st.booleans()):
        overrides["router.disaggregate_above_tokens"] = draw(st.sampled_from([20, '"auto"']))
    if draw(st.booleans()):
        overrides["router.hedge_after_s"] = 0.02
    return overrides


@random_simulations(100)
@given(overrides=changing(scenarios))
def test_exact_and_fast_are_the_same(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    both_modes_agree(overrides, play, lines)


@random_simulations(100)
@given(overrides=changing(disturbed_scenarios))
def test_whatever_goes_wrong_everything_ends(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=changing(disturbed_scenarios))
def test_whatever_goes_wrong_everything_ends_at_night(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)

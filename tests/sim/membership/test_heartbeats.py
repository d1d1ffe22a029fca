"""Engines that report to the router in the simulated world: deaths are noticed by silence, and a report brings back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.messages import Code
from pdflow_sim.observe.run_metrics import REASONS
from tests.sim.faults.test_fault_swarm import everything_ends as ends_under_faults
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import RELAXED, random_simulations

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]
S = 1_000_000_000

STEADY = {
    "workload.arrival": '{ process = "constant", rate_rps = 4 }',
    "workload.requests": 80,
    "router.heartbeat_s": 3,
    "router.on_failure": "fail",
    "network.http_latency_s": 0.001,
}
"""Twenty seconds. p-0 reports at 0.75 s and then every 3 s, p-1 at 1.5 s, d-0 at 2.25 s, d-1 at 3 s."""


def crash(engine: str, at_s: float, restart_after_s: float) -> dict[str, str]:
    fault = f'{{ kind = "crash", engine = "{engine}", at_s = {at_s}, restart_after_s = {restart_after_s} }}'
    return {"fault": f"[{fault}]"}


def arrived(world: Any, *which: int) -> list[float]:
    return [world.records.arrival_ns[i] / S for i in which]


def lost(world: Any) -> list[int]:
    """Requests that failed, or that took another attempt."""
    records = world.records
    return [i for i in range(len(records)) if records.outcome[i] != "completed" or records.attempts[i] > 1]


def refused(world: Any) -> list[float]:
    """When those came that failed because an engine is dead; not who found, without the router, that it had been."""
    died = REASONS[Code.PEER_DEAD]
    return arrived(world, *(i for i, reason in enumerate(world.records.reason) if reason == died))


def served(world: Any, column: str, engine: str) -> list[float]:
    """When those came that it served."""
    return arrived(world, *(i for i, who in enumerate(getattr(world.records, column)) if who == engine))


@pytest.mark.parametrize("method", METHODS)
def test_a_death_is_noticed_by_silence_alone(play: Play, lines: Lines, method: str) -> None:
    """Its last report comes at 3.751 s: until 8.751 s it gets legs, which are refused. It reports again at 14.1 s."""
    overrides = STEADY | {"transfer.method": method} | crash("p-0", 4.1, 10)
    world = play(overrides)
    when = refused(world)
    assert min(when) >= 4.0
    assert 8.25 <= max(when) <= 8.751
    assert set(world.records.outcome) == {"completed", "failed"}
    gone = [at for at in served(world, "prefill_engine", "p-0") if at > 8.751]
    assert 14.1 < min(gone) < 14.7, "half of them go there"
    assert world.totals.notes["engine fell silent"] == 1
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_without_heartbeats_a_crash_is_seen_by_its_connections(play: Play) -> None:
    seen = {key: value for key, value in STEADY.items() if key != "router.heartbeat_s"}
    assert len(lost(play(seen | crash("p-0", 4.1, 10)))) <= 1
    assert len(lost(play(STEADY | crash("p-0", 4.1, 10)))) > 5


@pytest.mark.parametrize("engine", ["p-0", "d-1"])
def test_what_goes_to_a_dead_one_is_tried_again_if_that_is_the_policy(play: Play, engine: str) -> None:
    world = play(STEADY | crash(engine, 4.1, 10) | {"router.on_failure": "retry"})
    assert set(world.records.outcome) == {"completed"}
    assert len(lost(world)) > 5
    assert set(world.records.attempts) == {1, 2}


def test_one_that_comes_back_in_time_is_not_missed(play: Play) -> None:
    world = play(STEADY | crash("p-0", 4.1, 1))
    assert max(refused(world)) < 5.11
    assert "engine fell silent" not in world.totals.notes


def test_the_time_until_an_engine_is_silent_is_configurable(play: Play) -> None:
    world = play(STEADY | crash("p-0", 4.1, 12) | {"router.silent_after_s": 10})
    assert 13.25 <= max(refused(world)) <= 13.751


def test_an_engine_whose_reports_are_lost_gets_no_requests_and_loses_none(play: Play) -> None:
    """The last report that comes through is that of 3.75 s, the next one that of 15.75 s."""
    partition = '[{ kind = "partition", from = "p-0", to = "router", at_s = 4, for_s = 10 }]'
    world = play(STEADY | {"fault": partition})
    assert not lost(world)
    during = [at for at in served(world, "prefill_engine", "p-0") if at > 8.751]
    assert 15.751 < min(during) < 16.3
    half = '[{ kind = "drop", from = "p-*", to = "router", probability = 1.0 }]'
    world = play(STEADY | {"fault": half, "router.on_failure": "retry"})
    assert max(served(world, "prefill_engine", "p-0")) < 5
    assert set(world.records.outcome) == {"completed", "failed"}, "nobody is left who computes prompts"


def test_requests_of_a_silent_engine_are_taken_back(play: Play) -> None:
    """D stands still for ten seconds. Its answers, which had begun, go on elsewhere once it has missed its reports."""
    pause = {"fault": '[{ kind = "pause", engine = "d-0", at_s = 5, for_s = 10 }]'}
    again = STEADY | pause | {"router.on_failure": "retry", "workload.output_tokens": 200}
    again["router.abandon_stalled"] = "false"
    world = play(again)
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.notes["engine fell silent"] == 1
    assert world.records.earlier
    assert longest_s(world) < 6.5
    assert longest_s(play(again | {"router.abandon_silent": False})) > 10


def longest_s(world: Any) -> float:
    records = world.records
    return max(last - at for last, at in zip(records.last_token_ns, records.arrival_ns, strict=True)) / S


def test_a_pause_is_silence_too_and_ends_with_a_report(play: Play) -> None:
    pause = '[{ kind = "pause", engine = "d-0", at_s = 5, for_s = 6.5 }]'
    world = play(STEADY | {"fault": pause, "transfer.suspect_s": 14, "router.abandon_silent": False})
    assert not lost(world)
    later = [at for at in served(world, "decode_engine", "d-0") if at > 7.251]
    assert min(later) > 10.251, "its last report was that of 2.25 s and 5.25 s never came"


def test_an_engine_that_is_added_gets_legs_after_its_first_report(play: Play) -> None:
    hop = {"network.http_latency_s": 0.4}
    up = {"scale": '[{ pool = "d", at_s = 5, replicas = 3, start_lag_s = 2 }]'}
    world = play(STEADY | hop | up | {"router.dispatch": "concurrent"})
    assert not lost(world)
    assert 7.4 < min(served(world, "decode_engine", "d-2")) < 8.5
    down = {"scale": '[{ pool = "d", at_s = 5, replicas = 1 }, { pool = "d", at_s = 12, replicas = 2 }]'}
    world = play(STEADY | hop | down)
    assert not lost(world)
    again = [at for at in served(world, "decode_engine", "d-1") if at > 5.4]
    assert 12.0 < min(again) < 13.5


@pytest.mark.parametrize("method", ["p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get"])
def test_the_original_has_them(play: Play, lay: Callable[..., Any], method: str) -> None:
    edits = {key: value for key, value in STEADY.items() if key != "router.heartbeat_s"} | {"transfer.method": method}
    assert play(edits).heartbeats is None
    world = play(edits | {"transfer.dialect": "as-published"})
    assert world.heartbeats.every_ns == 3 * S
    assert world.router.port.endpoint.rules.silence_ns == 5 * S
    assert not lost(world)


def test_a_run_without_faults_is_as_it_was(play: Play, lines: Lines) -> None:
    assert lines(play(STEADY)) == lines(play(STEADY | {"router.heartbeat_s": 0.01}))


def test_heartbeats_end_where_nothing_else_goes_on(play: Play) -> None:
    """Every engine is gone for good, and so every request fails: the queue runs empty."""
    forever = '[{ kind = "crash", engine = "*", at_s = 1 }]'
    world = play(STEADY | {"fault": forever})
    assert world.clock.pending == 0
    assert "failed" in world.records.outcome


@st.composite
def reporting(draw: st.DrawFn) -> dict[str, Any]:
    """Worlds in which things go wrong, whose engines report now and then, and perhaps come and go."""
    overrides = draw(disturbed_scenarios())
    overrides["router.heartbeat_s"] = draw(st.sampled_from([0.001, 0.03, 0.5, 3.0]))
    if draw(st.booleans()):
        overrides["router.hedge_after_s"] = 0.02
    if draw(st.booleans()):
        overrides |= {"router.on_failure": "recompute", "router.max_attempts": 2}
    if draw(st.booleans()):
        engine, at, lasts = draw(st.sampled_from(["p-0", "d-*", "*"])), draw(st.sampled_from([0.0, 0.05])), 0.1
        partition = f'{{ kind = "partition", from = "{engine}", to = "router", at_s = {at}, for_s = {lasts} }}'
        overrides["fault"] = overrides["fault"][:-1] + f", {partition}]"
    if draw(st.booleans()):
        pool, lag = draw(st.sampled_from(["p", "d"])), draw(st.sampled_from([0.0, 0.02]))
        by_load = f'{{ pool = "{pool}", target_queue = 1, max_replicas = 3, every_s = 0.01, start_lag_s = {lag} }}'
        overrides["scale"] = f"[{by_load}]"
    return overrides


@random_simulations(40)
@given(overrides=reporting())
def test_whatever_goes_wrong_everything_ends(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=reporting())
def test_whatever_goes_wrong_everything_ends_at_night(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)

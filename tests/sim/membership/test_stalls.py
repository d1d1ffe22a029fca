"""Engines that stall in the simulated world: a process is paused while its connections stay open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.routing.events import RequestArrived
from pdflow.routing.watching import WatchingRouter
from pdflow.version import compiled
from pdflow_sim.clients.first_tokens import FirstTokens
from pdflow_sim.nodes import router_node

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]
S = 1_000_000_000

STEADY = {
    "workload.arrival": '{ process = "constant", rate_rps = 4 }',
    "workload.requests": 120,
    "workload.output_tokens": 200,
    "router.on_failure": "retry",
    "network.http_latency_s": 0.001,
}
"""Thirty seconds; two prefill engines, two decode engines."""


def pause(engine: str, at_s: float = 10, for_s: float = 15) -> dict[str, str]:
    return {"fault": f'[{{ kind = "pause", engine = "{engine}", at_s = {at_s}, for_s = {for_s} }}]'}


def longest_s(world: Any) -> float:
    """Return how long the longest request took."""
    records = world.records
    return max(last - at for last, at in zip(records.last_token_ns, records.arrival_ns, strict=True)) / S


def resent(world: Any) -> int:
    return sum(attempts > 1 for attempts in world.records.attempts)


@pytest.mark.parametrize("engine", ["p-0", "d-0"])
@pytest.mark.parametrize("method", METHODS)
def test_requests_of_a_stalled_engine_go_elsewhere(play: Play, lines: Lines, method: str, engine: str) -> None:
    """It pauses for 15 s. Its silence is too long after 5 s to 7.5 s, and its requests take no longer than that and
    their own time."""
    overrides = STEADY | {"transfer.method": method} | pause(engine)
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.notes["engine stalled"] >= 1
    assert 0 < resent(world) < 60
    left_there = play(overrides | {"router.abandon_stalled": False})
    assert "engine stalled" not in left_there.totals.notes
    assert longest_s(left_there) > 15
    assert longest_s(world) < 11
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


@pytest.fixture
def _whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients that do not stream: the router knows it, and nothing reaches them before the end of an answer."""
    monkeypatch.setattr(router_node, "RequestArrived", partial(RequestArrived, streams=False))
    monkeypatch.setattr(FirstTokens, "delivered", lambda self, attempt: False)


@pytest.mark.skipif(compiled(), reason="methods of a compiled simulator cannot be exchanged")
@pytest.mark.usefixtures("_whole_answers")
def test_whole_answers_leave_a_decode_engine_that_does_not_respond(play: Play) -> None:
    """They take 5 s, longer than an engine may be silent. It gets some again when it responds: no stream tries it."""
    arrival = '{ process = "constant", rate_rps = 1 }'
    slow = {"workload.arrival": arrival, "workload.requests": 60, "workload.output_tokens": 1000}
    overrides = STEADY | slow | {"router.stalled_after_s": 2}
    undisturbed = play(overrides)
    assert longest_s(undisturbed) > 5
    assert "engine stalled" not in undisturbed.totals.notes
    overrides |= pause("d-0", for_s=30)
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.notes["engine stalled"] >= 1
    assert longest_s(world) < 12
    assert longest_s(play(overrides | {"router.abandon_stalled": False})) > 30
    served = [
        at // S for at, who in zip(world.records.arrival_ns, world.records.decode_engine, strict=True) if who == "d-0"
    ]
    assert max(served) > 42
    assert not any(14 < at_s < 40 for at_s in served)


def test_a_limit_of_ones_own_is_kept(play: Play) -> None:
    world = play(STEADY | pause("d-0") | {"router.stalled_after_s": 2})
    assert set(world.records.outcome) == {"completed"}
    assert longest_s(world) < 6


def test_an_engine_that_goes_on_gets_requests_again(play: Play) -> None:
    world = play(STEADY | pause("d-0", for_s=8))
    served = [
        at / S for at, who in zip(world.records.arrival_ns, world.records.decode_engine, strict=True) if who == "d-0"
    ]
    gap_s, after = max((later - at, later) for at, later in pairwise(served))
    assert gap_s > 2, "it got none while it was stalled"
    assert after < 29, "and some when it had been tried"


def test_a_short_pause_is_no_stall(play: Play) -> None:
    world = play(STEADY | pause("d-0", for_s=3))
    assert "engine stalled" not in world.totals.notes
    assert not resent(world)


def test_the_only_engine_of_its_role_keeps_its_requests(play: Play) -> None:
    world = play(STEADY | pause("d-0") | {"pool.d.replicas": 1})
    assert "engine stalled" not in world.totals.notes
    assert set(world.records.outcome) == {"completed"}
    assert not resent(world)


def test_a_queue_is_no_silence(play: Play) -> None:
    """More prompts than P can compute: requests wait for longer than an engine may be silent. None is sent again."""
    overload = {"workload.arrival": '{ process = "constant", rate_rps = 60 }', "workload.requests": 600}
    world = play(STEADY | overload | {"router.stalled_after_s": 1, "pool.p.max_num_batched_tokens": 512})
    assert longest_s(world) > 5
    assert not resent(world)


def test_without_a_fault_no_engine_is_watched(play: Play) -> None:
    assert not isinstance(play(STEADY).router.endpoint, WatchingRouter)
    assert isinstance(play(STEADY | {"router.stalled_after_s": 2}).router.endpoint, WatchingRouter)
    assert not isinstance(play(STEADY | pause("d-0") | {"router.on_failure": "fail"}).router.endpoint, WatchingRouter)

"""What random worlds have found, each made small and named: it must not come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MS = 1_000_000
COMPAT_PUSH = {"transfer.method": "nixl-push", "transfer.dialect": "vllm-compat"}
COMPAT_PULL = {"transfer.method": "nixl-pull", "transfer.dialect": "vllm-compat", "router.dispatch": "sequential"}


def test_a_heartbeat_after_the_lease_has_ended_does_not_make_a_read_fresh(play: Callable[..., Any]) -> None:
    """The first contact takes as long as P's lease; the heartbeat that waited for it left just before the READ ended,
    and D committed blocks that P had freed (S2)."""
    late = {"workload.requests": 1, "transfer.kv_lease_duration_s": 1.0}
    records = play({**COMPAT_PULL, **late, "network.handshake_s": 1.2, "network.warm": False}).records
    assert records.outcome == ["failed"]
    assert records.reason == ["stale"]


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("at_ms", [1, 10, 21, 25, 60])
def test_blocks_leave_quarantine_when_the_client_hangs_up(play: Callable[..., Any], dispatch: str, at_ms: int) -> None:
    """Against a P that cannot be asked, D waits for the end of the prefill leg: nobody told it when the router took
    the legs back, nor in a sequential dispatch at all, and its blocks stayed in quarantine for ever."""
    one = {"workload.requests": 1, "workload.arrival": '{ process = "closed", concurrency = 1 }'}
    cold = {"network.handshake_s": 0.05, "network.warm": False}
    slow = {"router.dispatch": dispatch, "network.http_latency_s": 0.001, **cold}

    def prepared(world: Any) -> None:
        world.clock.call(at_ms * MS, world.router.hang_up, 0)

    world = play({**COMPAT_PUSH, **one, **slow}, prepared=prepared)
    assert world.records.outcome == ["cancelled"]


def test_the_first_token_of_p_takes_no_block_before_it_has_kv(play: Callable[..., Any]) -> None:
    """With first_token = "prefill" D's grant had a block too many where the prompt ended with a block: refused."""
    exact = {"workload.requests": 3, "workload.input_tokens": 64, "workload.output_tokens": 2}
    records = play({**COMPAT_PUSH, **exact, "router.first_token": "prefill"}).records
    assert records.outcome == ["completed"] * 3


def test_a_retry_does_not_take_the_former_attempts_prefill_for_its_own(play: Callable[..., Any]) -> None:
    """The first decode leg ends at its deadline while its prefill is computed; the abort is still under way when the
    engine is done with it."""
    overrides = {
        "workload.requests": 1,
        "workload.arrival": '{ process = "closed", concurrency = 1 }',
        "pool.p.replicas": 1,
        "transfer.deadline_s": 0.019,
        "router.max_attempts": 2,
        "network.http_latency_s": 0.002,
    }
    world = play(overrides)
    assert world.records.attempts == [2]
    assert world.records.outcome == ["failed"]
    assert world.records.reason == ["deadline"]
    assert world.records.first_token_ns == [-1]


def test_nobody_waits_for_the_kv_of_a_prompt_that_is_not_decoded(play: Callable[..., Any]) -> None:
    """One token, P's own, is wanted: P held the blocks until its lease ended, 30 s later, as if a D might come."""
    one = {"workload.requests": 1, "workload.output_tokens": 1, "router.first_token": "prefill"}
    world = play(one)
    assert world.records.outcome == ["completed"]
    assert world.totals.stranded_byte_ns == 0
    assert world.clock.now < 10**9

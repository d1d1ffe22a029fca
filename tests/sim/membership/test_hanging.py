"""Requests that hang in the simulated world: P and D cannot reach each other, and both serve others meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.membership.test_stalls import STEADY, longest_s

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]

CUT_OFF = STEADY | {
    "workload.arrival": '{ process = "constant", rate_rps = 23 }',
    "workload.requests": 900,
    "pool.p.replicas": 3,
    "fault": '[{ kind = "partition", between = ["p-0", "d-0"], at_s = 5, for_s = 100 }]',
}
"""Of three prefill and two decode engines one pair is cut off: a sixth of the requests."""


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull", "p2p-nccl-put", "cpu-staged"])
def test_requests_leave_an_engine_that_passes_them_over(play: Play, lines: Lines, method: str) -> None:
    """An engine may pass a request over 16 times, a quarter of a second apart. Without the rule a request waits until a
    transfer has failed."""
    overrides = CUT_OFF | {"transfer.method": method}
    world = play(overrides | {"router.stalled_after_s": 1})
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.notes["request hung"] > 20
    assert longest_s(world) < 8
    without = play(overrides)
    assert "request hung" not in without.totals.notes
    assert longest_s(without) > 15
    assert lines(play(overrides | {"router.stalled_after_s": 1}, exact=True, checked=False)) == lines(world)


def test_what_waits_for_a_full_engine_is_not_passed_over(play: Play) -> None:
    """More prompts than the engines can take, of very different lengths: some wait five times as long as a request may
    be passed over."""
    overload = {
        "workload.arrival": '{ process = "poisson", rate_rps = 60 }',
        "workload.input_tokens": '{ dist = "uniform", low = 8, high = 3000 }',
        "workload.requests": 600,
        "pool.p.max_num_batched_tokens": 512,
        "pool.d.max_num_seqs": 8,
    }
    world = play(STEADY | overload | {"router.stalled_after_s": 1})
    assert longest_s(world) > 20
    assert "request hung" not in world.totals.notes

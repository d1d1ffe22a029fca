"""`num_workers` of Mooncake V1: how many prompts a P rank writes at once, each of them until its write has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.results.records import XFER_WIRE

Play = Callable[..., Any]

TOGETHER = {
    "workload.requests": 3,
    "workload.arrival": '{ process = "constant", rate_rps = 100000 }',
    "workload.input_tokens": 10,
    "pool.p.replicas": 1,
    "pool.p.cost": '{ model = "constant", prefill_s = 0.0, decode_step_s = 0.0 }',
    "network.latency_s": 0.1,
    "noise.links": 0,
    "transfer.method": "mooncake-v1",
}
"""Three prompts, computed as they come, whose writes take a tenth of a second each."""


def tenths(world: Any) -> list[int]:
    """When each prompt's write has ended, in tenths of a second."""
    assert set(world.records.outcome) == {"completed"}
    return sorted(round(at / 1e8) for at in world.records.ends[XFER_WIRE])


@pytest.mark.parametrize("dialect", ["strict", "as-published"])
@pytest.mark.parametrize(("workers", "ends"), [(1, [1, 2, 3]), (2, [1, 1, 2]), (3, [1, 1, 1])])
def test_so_many_prompts_are_written_at_once(play: Play, dialect: str, workers: int, ends: list[int]) -> None:
    assert tenths(play(TOGETHER | {"transfer.dialect": dialect, "transfer.num_workers": workers})) == ends


def test_there_are_ten_workers_by_default(lay: Callable[..., Any]) -> None:
    assert lay({}).transfer.num_workers == METHODS["mooncake-v1"].strict.sending_lanes == 10


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mooncake-v1"])
def test_other_methods_have_lanes_of_their_own(name: str) -> None:
    method = METHODS[name]
    assert method.adapted(False, False, workers=1) == method

"""A NIC that fails costs time and no byte: what it had left goes over those that work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from pdflow.errors import ScenarioError
from pdflow.protocol.ids import rank_address
from pdflow.results.records import XFER_POST, XFER_WIRE
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.build import build
from pdflow_sim.world import World

Play: TypeAlias = Callable[..., World]

MS = 1_000_000
NBYTES = 131_072_000
ONE = {
    "workload.requests": 1,
    "workload.input_tokens": 1000,
    "workload.output_tokens": 1,
    "network.bandwidth_bytes_per_s": 10**9,
    "network.nics_per_rank": 2,
    "network.slice_bytes": 65_536,
}
"""One request, whose 2,000 slices take two NICs 65.536 ms."""


def ends(world: World, stage: int) -> int:
    return int(world.records.ends[stage][0])


def failing(play: Play, *nics: str, after_ns: int, for_s: float = 100.0, **overrides: object) -> World:
    """The world in which these fail so long after the transfer began."""
    alone = {**ONE, **{key.replace("__", "."): value for key, value in overrides.items()}}
    at_s = (ends(play(alone), XFER_POST) + after_ns) / 1e9
    faults = ", ".join(f"{{ kind = 'nic-down', at_s = {at_s!r}, for_s = {for_s}, {nic} }}" for nic in nics)
    world = play({**alone, "fault": f"[{faults}]"})
    assert world.totals.bytes_moved == NBYTES
    return world


@pytest.mark.parametrize(("method", "mover"), [("nixl-push", "p"), ("nixl-pull", "d")])
def test_the_mover_goes_on_at_once_with_the_nic_that_is_left(play: Play, method: str, mover: str) -> None:
    """Half way each NIC has 32.768 MB left: the other one takes both halves."""
    world = failing(play, f"engine = '{mover}-*', nic = 1", after_ns=32_768_000, transfer__method=method)
    assert ends(world, XFER_WIRE) - ends(world, XFER_POST) == 3 * 32_768_000


def test_the_other_sides_nic_is_missed_when_the_transport_times_out(play: Play) -> None:
    """D's other NIC bounds whatever P sends, then."""
    fault = "engine = 'd-*', nic = 0"
    world = failing(play, fault, after_ns=32_768_000, faults__transport_timeout_s=0.5)
    assert ends(world, XFER_WIRE) - ends(world, XFER_POST) == 32_768_000 + 500 * MS + 32_768_000


def test_what_begins_later_avoids_it(play: Play) -> None:
    world = failing(play, "engine = 'p-*', nic = 1", after_ns=-MS)
    assert ends(world, XFER_WIRE) - ends(world, XFER_POST) == NBYTES


def test_without_any_nic_it_waits_for_one(play: Play) -> None:
    """All goes over the first that works again."""
    both = ("engine = 'p-*', nic = 0", "engine = 'p-*', nic = 1")
    world = failing(play, *both, after_ns=32_768_000, for_s=1.0)
    assert ends(world, XFER_WIRE) - ends(world, XFER_POST) == 32_768_000 + 1000 * MS + 65_536_000
    begun_later = failing(play, *both, after_ns=-MS, for_s=1.0)
    assert ends(begun_later, XFER_WIRE) - ends(begun_later, XFER_POST) == 999 * MS + NBYTES


def test_without_any_nic_for_good_the_operation_fails(play: Play) -> None:
    down = ", ".join(f"{{ kind = 'nic-down', at_s = 0, engine = 'p-*', nic = {nic} }}" for nic in range(2))
    world = play({**ONE, "fault": f"[{down}]"})
    assert world.totals.bytes_moved == 0


def test_the_nics_of_other_gpus_come_second(lay: Callable[..., ResolvedScenario]) -> None:
    paths = build(lay({**ONE, "pool.p.tp": 2})).fabric.paths
    near, far = (rank_address("p-0", rank) for rank in range(2))
    assert paths.working(near) == [(near, 0), (near, 1)]
    paths.fail((near, 0), 1)
    assert paths.working(near) == [(near, 1)]
    paths.fail((near, 1), 1)
    assert paths.working(near) == [(far, 0), (far, 1)]
    paths.fail((near, 0), 1)
    paths.fail((near, 0), -1)
    assert paths.working(near) == [(far, 0), (far, 1)]
    paths.fail((near, 0), -1)
    assert paths.working(near) == [(near, 0)]


@pytest.mark.parametrize("dialect", ["strict", "vllm-compat"])
def test_a_partition_and_a_lost_nic_together(play: Play, dialect: str) -> None:
    partition = "{ kind = 'partition', at_s = 0.045, for_s = 0.3 }"
    lost = "{ kind = 'nic-down', at_s = 0.04, for_s = 0.1, engine = 'd-*', nic = 0 }"
    late = "faults.transport_timeout_s"
    for timeout_s in (0.01, 0.02, 0.4, 7.0):
        world = play({**ONE, "transfer.dialect": dialect, "fault": f"[{partition}, {lost}]", late: timeout_s})
        assert world.totals.bytes_moved in (0, NBYTES)


@pytest.mark.parametrize(
    ("nics", "fault", "message"),
    [
        (1, "engine = 'p-*'", "each GPU has only one NIC"),
        (2, "engine = 'p-*', nic = 2", "is 2, expected at most 1"),
        (2, "engine = 'q-*'", "expected an engine"),
    ],
)
def test_a_nic_that_is_not_there_cannot_fail(
    lay: Callable[..., ResolvedScenario], nics: int, fault: str, message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        lay({**ONE, "network.nics_per_rank": nics, "fault": f"[{{ kind = 'nic-down', at_s = 1, {fault} }}]"})


@pytest.mark.parametrize("method", ["cpu-staged", "p2p-nccl-put-async", "mooncake-v1"])
def test_methods_that_send_in_pieces_lose_none(play: Play, method: str) -> None:
    lost = "[{ kind = 'nic-down', at_s = 0.04, engine = 'p-*', nic = 1 }]"
    alone = {**ONE, "transfer.method": method, "faults.transport_timeout_s": 0.1}
    bare = play({**alone, "network.nics_per_rank": 1, "network.slice_bytes": 0})
    for faults in ("[]", lost):
        world = play({**alone, "fault": faults})
        assert world.totals.bytes_moved == bare.totals.bytes_moved
        assert world.totals.duration_ns > NBYTES // 2

"""The hardware that bytes pass: what each part offers, and who shares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from pdflow.protocol.ids import Reg, Shards, rank_address
from pdflow.protocol.messages import Register
from pdflow.protocol.values import Allocation
from pdflow.results.records import HANDSHAKE, XFER_POST, XFER_WIRE
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.build import build
from pdflow_sim.network.paths import Paths
from pdflow_sim.world import World

Play: TypeAlias = Callable[..., World]

MS = 1_000_000
P = rank_address("p-0", 0)


def paths(lay: Callable[..., ResolvedScenario], **table: object) -> Paths:
    overrides = {"pool.p.gpu": "{ preset = 'a800', hbm_bytes_per_s = 2e12 }"}
    overrides.update({f"network.{key}": str(value) for key, value in table.items()})
    return build(lay(overrides)).fabric.paths


def test_copies_share_the_lane_of_their_gpu_and_direction(lay: Callable[..., ResolvedScenario]) -> None:
    here = paths(lay)
    network = here.network
    down, up = here.lane(P, "d2h"), here.lane(P, "h2d")
    other = here.lane(rank_address("p-1", 0), "d2h")
    assert here.lane(P, "d2h") == down
    assert len({down, up, other}) == 3
    flows = [network.start(path, 21_000_000, 0) for path in (down, down, up, other)]
    assert network.advance(MS) == flows[2:]
    assert network.advance(2 * MS) == flows[:2]


def test_a_copy_within_the_gpu_reads_and_writes_each_byte(lay: Callable[..., ResolvedScenario]) -> None:
    here = paths(lay)
    flow = here.network.start(here.copy(P), 1_000_000_000, 0)
    assert here.network.advance(MS - 1) == []
    assert here.network.advance(MS) == [flow]


def test_a_copy_waits_for_its_gpu(lay: Callable[..., ResolvedScenario]) -> None:
    overrides = {"pool.p.gpu": "{ preset = 'a800', copy_latency_s = 3e-6 }"}
    here = build(lay(overrides)).fabric.paths
    assert here.copy_ns(P) == 3000


def test_used_resources_are_listed_with_their_capacity(lay: Callable[..., ResolvedScenario]) -> None:
    here = paths(lay)
    assert here.names == []
    here.lane(P, "h2d")
    here.copy(P)
    assert [(name, capacity) for name, _, capacity in here.names] == [
        (f"{P} h2d", 21_000_000_000),
        (f"{P} d2d", 10**12),
    ]


def test_a_rank_of_another_name_has_the_hardware_that_it_had(lay: Callable[..., ResolvedScenario]) -> None:
    here = paths(lay, bandwidth_bytes_per_s=1e9)
    restarted = rank_address("p-0+1", 0)
    here.pool_of["p-0+1"] = here.pool_of["p-0"]
    lane, nic = here.lane(P, "d2h"), here.nic(P, "tx")
    here.keep(P, restarted)
    assert here.lane(restarted, "d2h") == lane
    assert here.nic(restarted, "tx") == nic
    assert here.lane(restarted, "h2d") != here.lane(P, "h2d")


SECOND = 10**9
ONE = {
    "workload.requests": 1,
    "workload.input_tokens": 1000,
    "workload.output_tokens": 1,
    "network.bandwidth_bytes_per_s": 10**9,
}
"""One request, of 131,072,000 bytes."""


def wire_ns(world: World) -> int:
    """From the first request's post to its last byte."""
    ends = world.records.ends
    return int(ends[XFER_WIRE][0] - ends[XFER_POST][0])


@pytest.mark.parametrize("nics", [2, 4, 8])
def test_slices_go_over_all_nics_at_once(play: Play, nics: int) -> None:
    world = play({**ONE, "network.nics_per_rank": nics, "network.slice_bytes": 65_536})
    assert wire_ns(world) == 131_072_000 // nics
    assert world.totals.bytes_moved == 131_072_000


def test_what_is_not_split_takes_one_nic_and_the_next_takes_another(play: Play) -> None:
    world = play(
        {**ONE, "workload.requests": 8, "pool.p.replicas": 1, "pool.d.replicas": 1, "network.nics_per_rank": 4}
    )
    assert wire_ns(world) == 131_072_000
    carried = [world.fabric.network.carried_bytes(nic, world.clock.now) for _, nic, _ in world.fabric.paths.names]
    assert carried == [2 * 131_072_000] * 8


def test_small_slices_are_bound_by_their_queue(play: Play) -> None:
    """100 us for each of 2,000 slices, on two NICs; the wire itself would take half of that."""
    sliced = {"network.nics_per_rank": 2, "network.slice_bytes": 65_536, "network.per_slice_s": 131.072e-6}
    for method in ("nixl-push", "nixl-pull"):
        world = play({**ONE, **sliced, "transfer.method": method})
        assert wire_ns(world) == pytest.approx(1000 * 131_072, rel=0.01)
        queues = [name for name, _, _ in world.fabric.paths.names if name.endswith("queue")]
        mover = "p" if method == "nixl-push" else "d"
        assert queues == [f"{rank_address(f'{mover}-0', 0)} nic {number} queue" for number in range(2)]


def test_one_peer_that_is_slow_to_post_does_not_fill_the_other_side(play: Play) -> None:
    """Queues are those of whoever moves the bytes: two P whose queues give half of a NIC fill the NIC of one D."""
    sliced = {"network.slice_bytes": 65_536, "network.per_slice_s": 131.072e-6}
    world = play({**ONE, **sliced, "workload.requests": 2, "workload.arrival.rate_rps": 1e6, "pool.d.replicas": 1})
    assert wire_ns(world) == pytest.approx(2000 * 131_072, rel=0.01)
    assert world.totals.duration_ns < 1.2 * 2000 * 131_072 + 30 * MS


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize("dialect", ["strict", "vllm-compat"])
def test_rails_lose_nothing_in_a_partition(play: Play, method: str, dialect: str) -> None:
    sliced = {"network.nics_per_rank": 3, "network.slice_bytes": 65_536}
    fault = (
        "[{ kind = 'partition', at_s = 0.05, for_s = 0.3 }, { kind = 'slow', engine = 'p-*', at_s = 0.4, factor = 2 }]"
    )
    world = play({**ONE, **sliced, "transfer.method": method, "transfer.dialect": dialect, "fault": fault})
    assert world.totals.bytes_moved == 131_072_000
    assert wire_ns(world) > SECOND * 3 // 10


def test_a_share_that_ends_as_a_partition_begins_does_not_end_its_transfer(play: Play) -> None:
    sliced = {**ONE, "network.nics_per_rank": 3, "network.slice_bytes": 65_536}
    begun = int(play(sliced).records.ends[XFER_POST][0])
    third_ns = 666 * 65_536  # of 2,000 slices
    fault = f"[{{ kind = 'partition', at_s = {(begun + third_ns) / SECOND!r}, for_s = 0.3 }}]"
    world = play({**sliced, "fault": fault})
    # Two slices were left, each for a NIC of its own.
    assert wire_ns(world) == 3 * SECOND // 10 + third_ns + 65_536
    assert world.totals.bytes_moved == 131_072_000


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
def test_blocks_that_follow_each_other_are_one_descriptor(play: Play, method: str) -> None:
    """62 whole blocks of 32 layers, and half a block of 8 heads a layer; the first goes with what is before."""
    priced = {**ONE, "transfer.method": method, "network.per_descriptor_s": 1e-6}
    for coalesce, count in ((False, 62 * 32 + 8 * 32), (True, 8 * 32)):
        ends = play({**priced, "network.coalesce": coalesce}).records.ends
        assert int(ends[XFER_POST][0] - ends[HANDSHAKE][0]) == count * 1000


def test_blocks_that_lie_apart_stay_descriptors(lay: Callable[..., ResolvedScenario]) -> None:
    world = build(lay({"network.coalesce": True, "network.per_descriptor_s": 1e-6}))
    route = world.fabric.paths.route(P, rank_address("d-0", 0))
    blocks = Allocation(1, (4, 5, 7, 8))
    shards = Shards(1, 1, 16)
    reg = Reg("d-0", 0, 0, "")
    registration = Register(reg, "x", 0, shards, blocks, token_start=32, num_tokens=64, digest=0, weights=0, floor=0)
    assert route.joints((0, 1, 2, 3, 4, 6), registration) == 1
    assert route.joints((9, 9, 2, 3, 5, 6, 7), registration) == 2


def test_the_last_nic_of_several_is_known_to_carry_its_paths(lay: Callable[..., ResolvedScenario]) -> None:
    """Should it fail too, what goes over it has to be found."""
    here = paths(lay, nics_per_rank=2, bandwidth_bytes_per_s=1_000_000)
    d = rank_address("d-0", 0)
    for nic in ((P, 0), (d, 0)):
        here.fail(nic, 1)
    rails = here.route(P, d).rails
    assert rails is not None
    assert here.over[P, 1] == here.over[d, 1] == set(rails.paths)

"""The hardware that bytes pass: what each part offers, and who shares it."""

from __future__ import annotations

from collections.abc import Callable

from pdflow.protocol.ids import rank_address
from pdflow.scenario.schema import Scenario
from sim.build import build
from sim.paths import Paths

MS = 1_000_000
P = rank_address("p-0", 0)


def paths(lay: Callable[..., Scenario], **table: object) -> Paths:
    overrides = {"pool.p.gpu": "{ preset = 'a800', hbm_bytes_per_s = 2e12 }"}
    overrides.update({f"network.{key}": str(value) for key, value in table.items()})
    return build(lay(overrides)).fabric.paths


def test_copies_share_the_lane_of_their_gpu_and_direction(lay: Callable[..., Scenario]) -> None:
    here = paths(lay)
    network = here.network
    down, up = here.lane(P, "d2h"), here.lane(P, "h2d")
    other = here.lane(rank_address("p-1", 0), "d2h")
    assert here.lane(P, "d2h") == down
    assert len({down, up, other}) == 3
    flows = [network.start(path, 21_000_000, 0) for path in (down, down, up, other)]
    assert network.advance(MS) == flows[2:]
    assert network.advance(2 * MS) == flows[:2]


def test_a_copy_within_the_gpu_reads_and_writes_each_byte(lay: Callable[..., Scenario]) -> None:
    here = paths(lay)
    flow = here.network.start(here.copy(P), 1_000_000_000, 0)
    assert here.network.advance(MS - 1) == []
    assert here.network.advance(MS) == [flow]


def test_a_copy_waits_for_its_gpu(lay: Callable[..., Scenario]) -> None:
    overrides = {"pool.p.gpu": "{ preset = 'a800', copy_latency_s = 3e-6 }"}
    here = build(lay(overrides)).fabric.paths
    assert here.copy_ns(P) == 3000


def test_what_was_used_is_told_with_its_capacity(lay: Callable[..., Scenario]) -> None:
    here = paths(lay)
    assert here.names == []
    here.lane(P, "h2d")
    here.copy(P)
    assert [(name, capacity) for name, _, capacity in here.names] == [
        (f"{P} h2d", 21_000_000_000),
        (f"{P} d2d", 10**12),
    ]


def test_a_rank_of_another_name_has_the_hardware_that_it_had(lay: Callable[..., Scenario]) -> None:
    here = paths(lay, bandwidth_bytes_per_s=1e9)
    life = rank_address("p-0+1", 0)
    here.pool_of["p-0+1"] = here.pool_of["p-0"]
    lane, nic = here.lane(P, "d2h"), here.nic(P, "tx")
    here.keep(P, life)
    assert here.lane(life, "d2h") == lane
    assert here.nic(life, "tx") == nic
    assert here.lane(life, "h2d") != here.lane(P, "h2d")

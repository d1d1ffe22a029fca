"""One uplink under Poisson arrivals is an M/D/1 processor-sharing queue: every completion against a twelve-line oracle.

The oracle keeps virtual time in exact fractions. 400 sources share one uplink of 671,088,640 B/s for 64 MiB
each at load 0.8, as in the shared-link example of the project's issue.
"""

from __future__ import annotations

import random
from fractions import Fraction
from heapq import heappop, heappush

import pytest

from pdflow.network import FlowNetwork

UPLINK = 671_088_640
SIZE = 67_108_864
S = 10**9


def processor_sharing(arrivals: list[tuple[int, int]], bandwidth: int) -> list[Fraction]:
    """Exact completion times in ns of (ns, bytes) jobs that share one server equally."""
    ends: list[Fraction] = [Fraction(0)] * len(arrivals)
    inside: list[tuple[Fraction, int]] = []  # (point of virtual time at which a job has had all its bytes, job)
    now, virtual = Fraction(0), Fraction(0)
    for job, (at, size) in [*enumerate(arrivals), (-1, (1 << 90, 0))]:
        while inside and now + (inside[0][0] - virtual) * len(inside) * S / bandwidth <= at:
            now += (inside[0][0] - virtual) * len(inside) * S / bandwidth
            virtual, ended = heappop(inside)
            ends[ended] = now
        virtual = virtual + (at - now) * bandwidth / (S * len(inside)) if inside else Fraction(0)
        now = Fraction(at)
        heappush(inside, (virtual + size, job))
    return ends


def poisson(rate_rps: float, count: int, seed: int) -> list[int]:
    generator, at, instants = random.Random(seed), 0.0, []
    for _ in range(count):
        at += generator.expovariate(rate_rps)
        instants.append(round(at * S))
    return instants


def carry(network: FlowNetwork, arrivals: list[tuple[int, int, int]]) -> list[int]:
    """Drive (ns, path, bytes) through a network as a carrier would, and return each completion in ns."""
    ends = [-1] * len(arrivals)
    started = 0
    while True:
        wake = network.wake_at()
        if started < len(arrivals) and (wake is None or arrivals[started][0] <= wake):
            at, path, size = arrivals[started]
            assert network.start(path, size, at) == started
            started += 1
        elif wake is None:
            return ends
        else:
            for flow in network.advance(wake):
                ends[flow] = wake


def ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_completion_on_a_shared_uplink_is_the_oracles(seed: int) -> None:
    instants = poisson(8.0, 5000, seed)
    network = FlowNetwork()
    uplink = network.add_resource("uplink", UPLINK)
    path = network.path([uplink])
    got = carry(network, [(at, path, SIZE) for at in instants])
    expected = [ceil(end) for end in processor_sharing([(at, SIZE) for at in instants], UPLINK)]
    assert got == expected
    assert network.carried_bytes(uplink, max(got)) == 5000 * SIZE


def test_sources_behind_nics_of_their_own_share_the_uplink_alike() -> None:
    """The same queue, but every source has its own NIC, wider than the uplink: 400 paths in place of one."""
    instants = poisson(8.0, 2000, 3)
    network = FlowNetwork()
    uplink = network.add_resource("uplink", UPLINK)
    paths = [network.path([network.add_resource(f"nic{i}", 50 * S), uplink]) for i in range(400)]
    got = carry(network, [(at, paths[i % 400], SIZE) for i, at in enumerate(instants)])
    expected = [ceil(end) for end in processor_sharing([(at, SIZE) for at in instants], UPLINK)]
    assert got == expected


def test_an_overloaded_uplink_drifts_by_nothing_in_one_long_busy_period() -> None:
    """Load 3, sizes of all kinds: hundreds of flows at once, and thousands of departures before the link idles."""
    generator = random.Random(5)
    jobs = [(at, generator.randint(1, 2 * SIZE)) for at in poisson(30.0, 900, 4)]
    network = FlowNetwork()
    path = network.path([network.add_resource("uplink", UPLINK)])
    got = carry(network, [(at, path, size) for at, size in jobs])
    expected = [ceil(end) for end in processor_sharing(jobs, UPLINK)]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= 1
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1  # a snap of 2**-20 ns is that rare


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 41, 399])
def test_equal_flows_end_together_at_n_times_one(count: int) -> None:
    network = FlowNetwork()
    path = network.path([network.add_resource("uplink", UPLINK)])
    for _ in range(count):
        network.start(path, SIZE, 5)
    assert network.wake_at() == 5 + count * 100_000_000
    assert network.advance(5 + count * 100_000_000) == list(range(count))
    assert network.wake_at() is None

"""What a watched network tells: as many bytes as it carries, and nothing that changes what it does."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdflow.network import FlowNetwork, PathId, ResourceId
from pdflow.network.watched import WatchedNetwork

S = 10**9
LARGEST = 13 * 10**8
Flows = list[tuple[int, int, int]]
Rates = dict[ResourceId, dict[int, int]]


def watched() -> tuple[WatchedNetwork, Rates]:
    """And what it tells, without what it tells again."""
    rates: Rates = defaultdict(dict)

    def record_rate(link: ResourceId, ns: int, rate: int) -> None:
        if ns in rates[link] or rate != list(rates[link].values() or [0])[-1]:
            rates[link][ns] = rate

    return WatchedNetwork(record_rate), rates


def integral(changes: dict[int, int], until: int) -> float:
    return sum(rate * (end - at) / S for (at, rate), (end, _) in pairwise([*changes.items(), (until, 0)]))


def test_a_link_of_two_flows_is_full_until_both_are_gone() -> None:
    network, rates = watched()
    narrow, wide = network.add_resource("narrow", 100), network.add_resource("wide", 1000)
    alone, through = network.path([wide]), network.path([narrow, wide])
    network.start(alone, 900, 0)
    network.start(through, 150, 0)
    network.advance(3 * S)
    assert rates[narrow] == {0: 100, 1_500_000_000: 0}
    assert rates[wide] == {0: 1000, 1 * S: 100, 1_500_000_000: 0}


def test_pausing_and_lifting_a_limit_are_observed() -> None:
    network, rates = watched()
    link = network.add_resource("link", 100)
    path = network.path([link])
    network.start(path, 1000, 0)
    network.set_bandwidth(link, 0, 1 * S)
    network.set_bandwidth(link, 50, 2 * S)
    network.advance(3 * S)
    network.set_bandwidth(link, None, 4 * S)
    assert rates[link] == {0: 100, 1 * S: 0, 2 * S: 50, 4 * S: 0}


def test_a_cancelled_flow_carries_no_more() -> None:
    network, rates = watched()
    link = network.add_resource("link", 100)
    network.cancel(network.start(network.path([link]), 1000, 0), 2 * S)
    assert rates[link] == {0: 100, 2 * S: 0}


def carry(network: FlowNetwork, flows: Flows, cancelled: set[int]) -> tuple[list[tuple[int, int]], int]:
    """Gaps, paths and bytes on three links of which each two are a path; (ns, flow) of the ends, and the last ns."""
    links = [network.add_resource(f"l{i}", bandwidth) for i, bandwidth in enumerate((7 * 10**8, 10**9, LARGEST))]
    paths: list[PathId] = [network.path(pair) for pair in ((links[0],), links[:2], links[1:], links)]
    now, ends = 0, []
    for gap, path, nbytes in flows:
        now += gap
        while (wake := network.wake_at()) is not None and wake <= now:
            ends += [(wake, flow) for flow in network.advance(wake)]
        flow = network.start(paths[path], nbytes, now)
        if flow in cancelled:
            if flow % 2:
                network.set_bandwidth(links[0], 10**8 * flow, now)
            else:
                network.cancel(flow, now)
    while (wake := network.wake_at()) is not None:
        now = wake
        ends += [(wake, flow) for flow in network.advance(wake)]
    return ends, now


@given(
    flows=st.lists(st.tuples(st.integers(0, 2 * S), st.integers(0, 3), st.integers(0, 3 * 10**9)), max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_observed_rates_add_up_to_the_bytes_carried(flows: Flows, cancelled: set[int]) -> None:
    network, rates = watched()
    ends, last = carry(network, flows, cancelled)
    assert (ends, last) == carry(FlowNetwork(), flows, cancelled)
    for link in range(3):
        carried = network.carried_bytes(link, last)
        # A byte per flow that was cancelled, half of one per second, and of each change up to an ns of the link.
        rounded = len(cancelled) + last / S / 2 + len(rates[link]) * LARGEST / S
        assert abs(integral(rates[link], last) - carried) <= rounded
        assert list(rates[link]) == sorted(rates[link])
        assert not rates[link] or list(rates[link].values())[-1] == 0

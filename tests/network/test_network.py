"""Life of a flow: nothing to wait for, cancelled, paused, slowed, counted; and what a long queue leaves behind."""

from __future__ import annotations

import pytest

from pdflow.network import FlowNetwork

MS = 10**6
S = 10**9


def one_link(bandwidth: int | None) -> tuple[FlowNetwork, int, int]:
    network = FlowNetwork()
    link = network.add_resource("link", bandwidth)
    return network, link, network.path([link])


def test_unlimited_and_empty_flows_end_when_they_start() -> None:
    network, link, path = one_link(None)
    assert [network.start(path, 10**9, 7), network.start(network.path([]), 5, 7)] == [0, 1]
    assert network.wake_at() == 7
    assert network.advance(7) == [0, 1]
    assert network.wake_at() is None
    assert network.carried_bytes(link, 7) == 10**9
    limited, _, path = one_link(1)
    limited.start(path, 0, 3)
    assert limited.advance(3) == [0]


def test_a_lone_flow_ends_after_bytes_over_bandwidth_rounded_up() -> None:
    network, _, path = one_link(3)
    network.start(path, 1, 0)
    assert network.wake_at() == 333_333_334
    assert network.advance(333_333_333) == []
    assert network.advance(333_333_334) == [0]


def test_paths_are_interned_and_checked() -> None:
    network = FlowNetwork()
    a, b = network.add_resource("a", 1), network.add_resource("b", 1)
    assert network.path([a, b]) == network.path([b, a])
    assert network.path([a]) != network.path([a, b])
    with pytest.raises(ValueError, match="once"):
        network.path([a, a])
    with pytest.raises(ValueError, match="names resources 0 to 1"):
        network.path([2])


def test_misuse_raises_and_changes_nothing() -> None:
    network, link, path = one_link(10)
    network.start(path, 10, 5)
    with pytest.raises(ValueError, match="forward"):
        network.start(path, 10, 4)
    with pytest.raises(ValueError, match="0 bytes or more"):
        network.start(path, -1, 5)
    with pytest.raises(ValueError, match="bandwidth"):
        network.set_bandwidth(link, -1, 5)
    with pytest.raises(KeyError):
        network.cancel(1, 5)
    assert network.wake_at() == 5 + S


def test_a_cancelled_flow_frees_its_share_and_returns_the_bytes_carried() -> None:
    network, link, path = one_link(1000)
    first, second = network.start(path, 1000, 0), network.start(path, 1000, 0)
    assert network.cancel(first, S) == 500
    assert network.wake_at() == S + 500 * MS
    assert network.advance(S + 500 * MS) == [second]
    assert network.carried_bytes(link, S + 500 * MS) == 1500
    with pytest.raises(KeyError):
        network.cancel(first, 2 * S)


def test_a_cancel_at_the_end_is_too_late() -> None:
    network, _, path = one_link(1000)
    flow = network.start(path, 1000, 0)
    assert network.cancel(flow, S) is None
    assert network.advance(S) == [flow]


def test_departures_between_two_calls_free_their_share_at_once() -> None:
    """The first flow ends at 1.5 s exactly; nobody looks until 10 s, and the second has still had all from 1.5 s on."""
    network, link, path = one_link(1000)
    network.start(path, 750, 0)
    network.start(path, 1750, 0)
    network.start(network.path([]), 0, 2 * S)
    assert network.carried_bytes(link, 2 * S) == 2000
    assert network.wake_at() == 1500 * MS
    assert network.advance(10 * S) == [0, 2, 1]  # at 1.5, 2.0 and 2.5 s


def test_a_paused_link_holds_its_flows_and_a_changed_one_resumes_them() -> None:
    network, link, path = one_link(1000)
    network.start(path, 1000, 0)
    network.set_bandwidth(link, 0, 400 * MS)
    assert network.wake_at() is None
    network.start(path, 1, 500 * MS)
    assert network.wake_at() is None
    network.set_bandwidth(link, 100, S)
    assert network.wake_at() == S + 20 * MS  # 1 byte at 50 B/s
    assert network.advance(S + 20 * MS) == [1]
    network.set_bandwidth(link, None, 2 * S)
    assert network.advance(2 * S) == [0]
    assert network.busy_ns(link, 3 * S) == 2 * S
    network.set_bandwidth(link, 1, 3 * S)
    network.start(path, 1, 3 * S)
    assert network.wake_at() == 4 * S


def test_lifting_one_limit_leaves_the_other() -> None:
    network = FlowNetwork()
    a, b = network.add_resource("a", 100), network.add_resource("b", 300)
    over_both, over_b = network.path([a, b]), network.path([b])
    network.start(over_both, 1000, 0)
    network.start(over_b, 1000, 0)
    assert (network.rate(over_both), network.rate(over_b)) == (100, 200)
    network.set_bandwidth(a, None, S)
    assert (network.rate(over_both), network.rate(over_b)) == (150, 150)
    assert network.in_flight(a) == 0
    network.set_bandwidth(a, 50, 2 * S)
    assert (network.rate(over_both), network.rate(over_b)) == (50, 250)
    assert network.in_flight(a) == 1


def test_busy_time_counts_overlapping_flows_once() -> None:
    network, link, path = one_link(1000)
    network.start(path, 1000, 0)
    network.start(path, 1000, 500 * MS)
    assert network.advance(2 * S) == [0, 1]
    network.start(path, 500, 3 * S)
    assert network.busy_ns(link, 3 * S + 250 * MS) == 2 * S + 250 * MS
    assert network.carried_bytes(link, 3 * S + 250 * MS) == 2250


def test_one_pair_of_nics_does_not_look_at_the_others() -> None:
    """A flow's cost does not depend on how many other pairs are busy: their wake-up entries do not even move."""
    network = FlowNetwork()
    paths = [network.path([network.add_resource(f"tx{i}", S), network.add_resource(f"rx{i}", S)]) for i in range(50)]
    for path in paths[:-1]:
        network.start(path, 10 * S, 0)
    before = [(path.since, path.due) for path in network._paths[:-1]]
    network.start(paths[-1], 1000, 5)
    network.advance(2000)
    assert [(path.since, path.due) for path in network._paths[:-1]] == before


def test_stale_wake_ups_do_not_pile_up() -> None:
    network, _, path = one_link(10)
    for at in range(2000):
        network.start(path, 10**6, at)
        network.wake_at()
    assert len(network._dues) <= 64 + 4 + 1

"""S10, S11, L8, L11 and L12 on endpoints that are driven by hand: what they notice, and what they let pass.

The checker asserts them in every step and state at rest (sim/pdflow_sim/check); planted faults of the rules are its
mutants (sim/pdflow_sim/check/mutants/bookkeeping.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.protocol.consumer.cell import HELD, QUEUED
from pdflow.protocol.invariants.accounting import miscounted, overadmitted, underadmitted
from pdflow.protocol.invariants.queues import overtaken, overtaken_in
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.invariants.timers import assume_scheduled, too_late, unscheduled
from pdflow.protocol.producer.tombstones import WINDOW
from pdflow.protocol.timers import Timer, TimerKind
from tests.support.cluster import Cluster

SYNC = Timer(TimerKind.SYNC, "P")


def waiting() -> Cluster:
    """A prompt that is computed, and a request that has registered for it."""
    cluster = Cluster()
    cluster.prefill("x")
    cluster.finish("x")
    cluster.decode("r", "x")
    cluster.admit("r")
    return cluster


def in_order(cluster: Cluster) -> None:
    for endpoint in cluster.endpoints.values():
        assert unscheduled(endpoint) == ""
        assert miscounted(endpoint) == ""
        assert too_late(endpoint, cluster.now) == ""


def test_at_rest_nothing_is_left_but_what_is_kept_on_purpose() -> None:
    cluster = waiting()
    in_order(cluster)
    cluster.run()
    in_order(cluster)
    assert cluster.outcomes["r"] == ["COMMITTED"]
    for endpoint in cluster.endpoints.values():
        assert leftovers(endpoint) == {}


def test_what_is_under_way_is_left() -> None:
    cluster = waiting()
    assert leftovers(cluster.endpoints["P"]) == {"prompts": 1}
    assert leftovers(cluster.endpoints["D"])["blocks of peers"] == 4
    assert leftovers(cluster.endpoints["D.r0"])["peers that are being connected"] == 1


def test_an_armed_timer_without_an_entry_is_noticed() -> None:
    scheduler = waiting().endpoints["D"]
    heap = scheduler.deadlines.heap
    heap[:] = [entry for entry in heap if entry[2] != SYNC]
    assert unscheduled(scheduler) == "SYNC of P is armed, but schedules no wake-up"


def test_an_entry_that_is_late_is_noticed_and_one_that_is_early_is_not() -> None:
    scheduler = waiting().endpoints["D"]
    peer = scheduler.store.peers["P"]
    peer.sync_at += 1
    assert unscheduled(scheduler) == ""
    peer.sync_at -= 2
    assert "but its wake-up is later" in unscheduled(scheduler)


def test_a_fork_is_assumed_to_be_scheduled_but_for_what_has_fired() -> None:
    scheduler = waiting().endpoints["D"]
    fork = scheduler.fork()
    assert unscheduled(fork)
    assume_scheduled(fork, scheduler, scheduler.armed())
    assert unscheduled(fork) == ""
    fork = scheduler.fork()
    assume_scheduled(fork, scheduler, scheduler.armed(), SYNC)
    assert unscheduled(fork) == "SYNC of P is armed, but schedules no wake-up"


def quarantine(scheduler: Any) -> None:
    scheduler.store.quarantined_blocks += 1


def share(scheduler: Any) -> None:
    scheduler.store.peers["P"].blocks -= 1


def index(scheduler: Any) -> None:
    scheduler.store.peers["P"].requests.clear()


def floor(scheduler: Any) -> None:
    scheduler.store.floor += 1


def closed(scheduler: Any) -> None:
    scheduler.store.closed.add(1)


def no_sync(scheduler: Any) -> None:
    scheduler.store.peers["P"].sync_at = None


@pytest.mark.parametrize("spoil", [quarantine, share, index, floor, closed, no_sync])
def test_a_wrong_count_at_ds_scheduler_is_noticed(spoil: Callable[[Any], None]) -> None:
    scheduler = waiting().endpoints["D"]
    assert miscounted(scheduler) == ""
    spoil(scheduler)
    assert miscounted(scheduler)


def test_frames_for_a_connection_that_nobody_makes_are_noticed() -> None:
    rank = waiting().endpoints["D.r0"]
    rank.peers.connecting.clear()
    assert miscounted(rank) == "frames wait for ['P.r0'], but no connection is under way"


def test_a_tombstone_beyond_the_window_is_noticed() -> None:
    cluster = waiting()
    cluster.run()
    rank = cluster.endpoints["P.r0"]
    tombs = rank.store.tombs["D"]
    tombs.floor -= WINDOW
    assert "not within the window" in miscounted(rank)


def test_a_prompt_under_a_wrong_key_is_noticed() -> None:
    rank = waiting().endpoints["P.r0"]
    rank.store.keys.clear()
    assert "are indexed by" in miscounted(rank)


def test_admission_beyond_a_limit_and_below_it_is_noticed() -> None:
    cluster = waiting()
    scheduler = cluster.endpoints["D"]
    before = scheduler.fork()
    cluster.prefill("y")
    cluster.finish("y")
    cluster.decode("s", "y")
    assert overadmitted(before, scheduler, 0) == underadmitted(before, scheduler, 0) == ""
    scheduler.store.pool_blocks = 7
    assert overadmitted(before, scheduler, 0) == "['s'] are admitted, and P binds 8 blocks of 7"
    cluster = waiting()
    scheduler = cluster.endpoints["D"]
    scheduler.store.pool_blocks = 7
    before = scheduler.fork()
    cluster.prefill("y")
    cluster.finish("y")
    cluster.decode("s", "y")
    assert underadmitted(before, scheduler, 0) == ""
    scheduler.store.pool_blocks = 8
    assert underadmitted(before, scheduler, 0) == "s is held back, but P binds only 4 blocks of 8"


def test_a_repetition_that_is_put_off_for_too_long_is_noticed() -> None:
    cluster = waiting()
    scheduler = cluster.endpoints["D"]
    peer = scheduler.store.peers["P"]
    peer.sync_at += 1
    assert too_late(scheduler, cluster.now) == "the next SYNC to P is due in 1000000001, later than 1000000000"
    peer.sync_at -= 1
    cluster.abort("r")
    cell = scheduler.store.cells["r"]
    assert too_late(scheduler, cluster.now) == ""
    scheduler.store.cells["r"] = cell.with_cancel(cluster.now + 2_000_000_001, cell.cancel_wait)
    assert too_late(scheduler, cluster.now) == "the next CANCEL of r is due in 2000000001, later than 2000000000"


@pytest.mark.parametrize("address", ["D.r0", "P.r0"])
def test_a_back_off_beyond_its_limit_and_one_that_is_not_reset_are_noticed(address: str) -> None:
    cluster = waiting()
    rank = cluster.endpoints[address]
    timers = cluster.endpoints["D"].store.context.timers
    for _ in range(20):
        rank.peers.unreached("X.r0", cluster.now, timers)
    assert too_late(rank, cluster.now) == ""
    rank.peers.retry_at["X.r0"] = cluster.now + timers.backoff_last_ns + 1
    assert "X.r0 is tried again in 60000000001" in too_late(rank, cluster.now)
    rank.peers.answered("X.r0", 1)
    assert too_late(rank, cluster.now) == ""
    rank.peers.failures["X.r0"] = 1
    assert "failed handshakes with them still count" in too_late(rank, cluster.now)


def test_a_held_request_that_is_overtaken_is_noticed() -> None:
    cluster = waiting()
    scheduler = cluster.endpoints["D"]
    scheduler.store.pool_blocks = 7
    for name in ("y", "z"):
        cluster.prefill(name)
        cluster.finish(name)
        cluster.decode(f"of {name}", name)
    assert [scheduler.cells[name].phase for name in ("of y", "of z")] == [HELD, HELD]
    before = scheduler.fork()
    assert overtaken(before, scheduler) == ""
    scheduler.store.cells["of z"] = scheduler.cells["of z"].becoming_queued()
    assert overtaken(before, scheduler) == "of z has overtaken of y, which came before it and still waits"
    scheduler.store.cells["of y"] = scheduler.cells["of y"].becoming_queued()
    assert scheduler.cells["of y"].phase is QUEUED
    assert overtaken(before, scheduler) == ""


def test_what_left_a_queue_before_is_not_taken_for_overtaking() -> None:
    assert overtaken_in(["a", "b", "c"], {"b"}, {"a"}) == ""
    assert overtaken_in(["a", "b", "c"], {"b"}, {"c"}) == "c has overtaken b, which came before it and still waits"
    assert overtaken_in(["a", "b", "c"], {"b"}, set()) == ""

"""S12 as a function of endpoints and memory: what it asks for, and what it lets pass."""

from __future__ import annotations

import pytest

from pdflow.protocol.invariants.obligations import outlived, unexposed, wrong_quarantine
from pdflow.protocol.values import Allocation
from tests.support.cluster import Cluster


def reading() -> Cluster:
    """A finished prompt that D reads, and a request that waits for it."""
    cluster = Cluster(pulls=True)
    cluster.prefill("x")
    cluster.finish("x")
    cluster.decode("r", "x")
    cluster.admit("r")
    return cluster


class GrantedBlocks:
    """What D's driver has granted, by hand."""

    def __init__(self, *held: Allocation) -> None:
        self.held = list(held)
        self.in_quarantine: list[Allocation] = []

    @property
    def quarantined(self) -> int:
        return sum(len(allocation.blocks) for allocation in self.in_quarantine)

    def holds(self, allocation: Allocation) -> bool:
        return allocation in self.held or allocation in self.in_quarantine

    def is_quarantined(self, allocation: Allocation) -> bool:
        return allocation in self.in_quarantine


def granted(cluster: Cluster) -> Allocation:
    """The blocks of r."""
    allocation: Allocation = cluster.endpoints["D"].cells["r"].allocation
    return allocation


def test_blocks_are_held_while_a_request_waits() -> None:
    cluster = reading()
    scheduler, pool = cluster.endpoints["D"], GrantedBlocks(granted(cluster))
    assert wrong_quarantine(scheduler, pool) == ""
    pool.in_quarantine = [pool.held.pop()]
    assert wrong_quarantine(scheduler, pool) == "r waits for KV, but its blocks are in quarantine"
    pool.in_quarantine = []
    assert wrong_quarantine(scheduler, pool) == "r waits for KV, but its blocks are not held"


def test_blocks_in_quarantine_are_those_of_requests_in_quarantine() -> None:
    cluster = reading()
    scheduler, pool = cluster.endpoints["D"], GrantedBlocks(granted(cluster))
    cluster.abort("r")
    assert wrong_quarantine(scheduler, pool) == "the blocks of r must be in quarantine, but are not"
    pool.in_quarantine = [pool.held.pop()]
    assert wrong_quarantine(scheduler, pool) == ""
    pool.in_quarantine.append(Allocation(99, (90, 91, 92)))
    assert wrong_quarantine(scheduler, pool) == "7 blocks are in quarantine, but 4 must be"


def test_staging_memory_is_held_and_has_no_quarantine() -> None:
    cluster = reading()
    scheduler, pool, generation = cluster.endpoints["D"], GrantedBlocks(), granted(cluster).generation
    for _ in range(2):
        assert wrong_quarantine(scheduler, pool, {generation}) == ""
        assert "granted for r, is not held" in wrong_quarantine(scheduler, pool, set())
        cluster.abort("r")


@pytest.mark.parametrize("slots", [0, 1])
def test_the_lease_word_of_a_finished_prompt_is_found(slots: int) -> None:
    rank = reading().endpoints["P.r0"]
    lease_word = rank.cells["x"].source.lease_word
    slot = lease_word.index % slots if slots else lease_word.index
    assert unexposed(rank, {slot: lease_word.value}, slots) == ""
    assert outlived(rank, {slot: lease_word.value}) == ""
    for exposed in ({}, {slot: lease_word.value + 1}):
        assert unexposed(rank, exposed, slots) == "the lease of x lasts, but readers do not find its lease word"
    assert "no prompt has lease word" in outlived(rank, {slot: lease_word.value, slot + 1: 7})


def test_of_two_words_in_one_slot_the_newer_one_stands() -> None:
    cluster = reading()
    cluster.prefill("y")
    cluster.finish("y")
    rank = cluster.endpoints["P.r0"]
    words = [rank.cells[xid].source.lease_word.value for xid in ("x", "y")]
    assert unexposed(rank, {0: words[1]}, 1) == ""
    assert unexposed(rank, {0: words[0]}, 1) == "the lease of y lasts, but readers do not find its lease word"


def test_the_lease_word_of_a_released_prompt_is_not_found() -> None:
    cluster = reading()
    rank = cluster.endpoints["P.r0"]
    lease_word = rank.cells["x"].source.lease_word
    cluster.run()
    assert not rank.cells
    assert unexposed(rank, {}) == ""
    assert "no prompt has lease word" in outlived(rank, {lease_word.index: lease_word.value})

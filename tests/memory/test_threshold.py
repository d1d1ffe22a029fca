"""The buffer that spills, against a list of names and sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdflow.memory.buddy import BuddyPool
from pdflow.memory.paged import PoolError
from pdflow.memory.threshold import ThresholdBuffer, Where
from tests.memory.support import lines

NAMES = st.integers(0, 7)


class BufferAgainstModel(RuleBasedStateMachine):
    """The model: (name, size, where) in the order in which they came. The pool is judged by its own tests."""

    @initialize(threshold=st.integers(0, 40), capacity=st.sampled_from([0, 8, 32]))
    def build(self, threshold: int, capacity: int) -> None:
        self.threshold, self.capacity = threshold, capacity
        self.buffer = self.fresh()
        self.entries: list[tuple[int, int, Where]] = []

    def fresh(self) -> ThresholdBuffer:
        pool = BuddyPool(self.capacity, least_bytes=4) if self.capacity else None
        return ThresholdBuffer(self.threshold, pool)

    def where(self, name: int) -> Where:
        return next((where for known, _, where in self.entries if known == name), Where.NOWHERE)

    @rule(name=NAMES, size=st.integers(1, 45))
    def put(self, name: int, size: int) -> None:
        if self.where(name) is not Where.NOWHERE:
            self.raises_and_changes_nothing(lambda buffer: buffer.put(name, size))
            return
        pool = self.buffer.pool
        used = sum(size for _, size, where in self.entries if where is Where.BUFFER)
        expected = Where.BUFFER
        if used + size > self.threshold:
            expected = Where.POOL if pool is not None and size <= pool.largest_free_bytes else Where.NOWHERE
        before = self.buffer.fingerprint()
        assert self.buffer.put(name, size) is expected
        if expected is Where.NOWHERE:
            assert self.buffer.fingerprint() == before
        else:
            self.entries.append((name, size, expected))

    @rule(name=NAMES)
    def drop(self, name: int) -> None:
        where = self.where(name)
        if where is Where.NOWHERE:
            self.raises_and_changes_nothing(lambda buffer: buffer.drop(name))
            self.raises_and_changes_nothing(lambda buffer: buffer.address(name))
            return
        assert self.buffer.drop(name) is where
        self.entries = [entry for entry in self.entries if entry[0] != name]

    @rule(data=st.data())
    def once_all_is_dropped_it_is_as_fresh(self, data: st.DataObject) -> None:
        other, before = self.buffer.fork(), self.buffer.fingerprint()
        for name in data.draw(st.permutations([name for name, _, _ in self.entries])):
            other.drop(name)
        assert other.fingerprint() == self.fresh().fingerprint()
        assert other.used_bytes == 0
        assert other.pool is None or other.pool.held_bytes == 0
        assert self.buffer.fingerprint() == before, "a fork is its own, with its pool"

    @rule()
    def go_on_with_a_fork(self) -> None:
        self.buffer = self.buffer.fork()

    def raises_and_changes_nothing(self, act: Callable[[ThresholdBuffer], object]) -> None:
        before = self.buffer.fingerprint()
        with pytest.raises(PoolError):
            act(self.buffer)
        assert self.buffer.fingerprint() == before

    @invariant()
    def agrees(self) -> None:
        buffer, pool = self.buffer, self.buffer.pool
        assert buffer.used_bytes == sum(size for _, size, where in self.entries if where is Where.BUFFER)
        assert buffer.used_bytes <= self.threshold
        spilled = [(buffer.address(name), size) for name, size, where in self.entries if where is Where.POOL]
        assert len({address for address, _ in spilled}) == len(spilled)
        assert None not in {address for address, _ in spilled}
        assert (0 if pool is None else pool.asked_bytes) == sum(size for _, size in spilled)
        for name in range(8):
            assert (name in buffer) is (self.where(name) is not Where.NOWHERE)
        assert all(buffer.address(name) is None for name, _, where in self.entries if where is Where.BUFFER)


TestBuffer = BufferAgainstModel.TestCase


def test_the_newest_spills_and_what_is_there_stays() -> None:
    buffer = ThresholdBuffer(100, BuddyPool(64, least_bytes=8))
    assert [buffer.put(name, 40) for name in "abcd"] == [Where.BUFFER, Where.BUFFER, Where.POOL, Where.NOWHERE]
    assert (buffer.address("a"), buffer.address("c")) == (None, 0)
    assert buffer.drop("a") is Where.BUFFER
    assert buffer.address("c") == 0, "room in the buffer moves nothing into it"
    assert buffer.put("d", 60) is Where.BUFFER, "to the threshold, and not beyond"
    assert buffer.drop("c") is Where.POOL
    assert buffer.put("e", 40) is Where.POOL


def test_what_no_pool_could_hold_is_refused_and_raises_nothing() -> None:
    """Its size is a peer's word, and #18242's listener died of it."""
    buffer = ThresholdBuffer(10, BuddyPool(64, least_bytes=8))
    assert buffer.put("a", 65) is Where.NOWHERE
    assert ThresholdBuffer(10).put("a", 11) is Where.NOWHERE


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ThresholdBuffer(-1), "must be 0 or more"),
        (lambda: ThresholdBuffer(9).put("a", 0), "must be 1 or more"),
    ],
)
def test_misuse_is_named(act: Callable[[], object], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        act()


def test_no_act_costs_more_among_many_entries() -> None:
    def costs(entries: int) -> list[int]:
        buffer = ThresholdBuffer(entries)
        for name in range(entries):
            buffer.put(name, 1)
        acts: list[Callable[[], object]] = [
            lambda: buffer.drop(0),
            lambda: buffer.put(0, 1),
        ]
        return [lines(act) for act in acts]

    assert costs(10) == costs(4000)

"""The buddy pool against a map of every least block, and what must hold for any buddies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from pdflow.memory.buddy import BuddyPool
from pdflow.memory.paged import PoolError
from tests.memory.support import lines

LEAST = 8


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: for each least block whether it is in use. Free blocks are found by halving the whole each time."""

    blocks = Bundle("blocks")

    @initialize(levels=st.integers(0, 5), below=st.integers(0, 2))
    def build(self, levels: int, below: int) -> None:
        self.greatest = LEAST << max(levels - below, 0)
        self.capacity = LEAST << levels
        self.pool = BuddyPool(self.capacity, least_bytes=LEAST, greatest_bytes=self.greatest)
        self.used = [False] * (1 << levels)
        self.live: dict[int, tuple[int, int]] = {}
        """Address -> size, and what was asked for."""

    def free_blocks(self, start: int, size: int) -> list[tuple[int, int]]:
        """(size, address) of each free block within a range."""
        inside = self.used[start // LEAST : (start + size) // LEAST]
        if size <= self.greatest and not any(inside):
            return [(size, start)]
        if size == LEAST:
            return []
        half = size // 2
        return self.free_blocks(start, half) + self.free_blocks(start + half, half)

    def tree(self, node: int, start: int, size: int) -> dict[int, int]:
        """What the pool should know of a node and of all below it."""
        if not any(self.used[start // LEAST : (start + size) // LEAST]):
            return {}
        buddy_orders = 0
        for free, _ in self.free_blocks(start, size):
            buddy_orders |= free // LEAST
        if self.live.get(start, (0, 0))[0] == size:
            return {node: buddy_orders}
        half = size // 2
        return {node: buddy_orders} | self.tree(2 * node, start, half) | self.tree(2 * node + 1, start + half, half)

    @rule(target=blocks, order=st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5]), less=st.integers(0, LEAST // 2))
    def allocate(self, order: int, less: int) -> object:
        asked = (LEAST << order) - less
        if asked > self.greatest:
            self.raises_and_changes_nothing(lambda pool: pool.allocate(asked))
            return multiple()
        size = LEAST
        while size < asked:
            size *= 2
        assert self.pool.rounded(asked) == size
        found = min((block for block in self.free_blocks(0, self.capacity) if block[0] >= size), default=None)
        before = self.pool.fingerprint()
        address = self.pool.allocate(asked)
        if found is None:
            assert address is None
            assert self.pool.fingerprint() == before
            return multiple()
        assert address == found[1], "of the smallest that are large enough the lowest"
        assert address % size == 0
        self.mark(address, size, True)
        self.live[address] = size, asked
        return address

    @rule(address=blocks)
    def release(self, address: int) -> None:
        if address not in self.live:
            self.raises_and_changes_nothing(lambda pool: pool.release(address))
            return
        size, _ = self.live.pop(address)
        assert self.pool.release(address) == size
        self.mark(address, size, False)

    @rule(data=st.data())
    def release_one_of_those_in_use(self, data: st.DataObject) -> None:
        """More often than chance would have it, or the pool would be full."""
        if self.live:
            self.release(data.draw(st.sampled_from(sorted(self.live))))

    @rule(off=st.integers(-300, 300))
    def release_what_is_nobodys(self, off: int) -> None:
        for address in [off, *(known + off for known in self.live)]:
            if address not in self.live:
                self.raises_and_changes_nothing(lambda pool, at=address: pool.release(at))  # type: ignore[misc]

    @rule(data=st.data())
    def in_any_order_all_merges_back(self, data: st.DataObject) -> None:
        pool = self.pool.fork()
        before = self.pool.fingerprint()
        for address in data.draw(st.permutations(sorted(self.live))):
            pool.release(address)
        fresh = BuddyPool(self.capacity, least_bytes=LEAST, greatest_bytes=self.greatest)
        assert (pool._open, pool._asked, pool.fingerprint()) == (fresh._open, fresh._asked, fresh.fingerprint())
        assert pool.largest_free_bytes == self.greatest
        assert (pool.held_bytes, pool.asked_bytes, pool.free_bytes) == (0, 0, self.capacity)
        assert self.pool.fingerprint() == before, "a fork is its own"

    def mark(self, address: int, size: int, used: bool) -> None:
        for block in range(address // LEAST, (address + size) // LEAST):
            assert self.used[block] is not used, "no two overlap"
            self.used[block] = used

    @rule()
    def go_on_with_a_fork(self) -> None:
        self.pool = self.pool.fork()

    def raises_and_changes_nothing(self, act: Callable[[BuddyPool], object]) -> None:
        before = self.pool.fingerprint(), self.pool.free_bytes
        with pytest.raises(PoolError):
            act(self.pool)
        assert (self.pool.fingerprint(), self.pool.free_bytes) == before

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        free = self.free_blocks(0, self.capacity)
        assert pool.held_bytes == sum(size for size, _ in self.live.values()) == LEAST * sum(self.used)
        assert pool.asked_bytes == sum(asked for _, asked in self.live.values())
        assert pool.free_bytes == sum(size for size, _ in free)
        assert pool.largest_free_bytes == max((size for size, _ in free), default=0)
        assert pool._open == self.tree(1, 0, self.capacity), "it follows from the blocks in use, and is no larger"


TestPool = PoolAgainstModel.TestCase


def test_a_block_is_split_and_merged_with_its_buddy_only() -> None:
    pool = BuddyPool(64, least_bytes=LEAST)
    assert [pool.allocate(16) for _ in range(4)] == [0, 16, 32, 48]
    pool.release(16)
    pool.release(32)
    assert pool.free_bytes == 32
    assert pool.largest_free_bytes == 16, "they touch, but are no buddies"
    pool.release(0)
    assert pool.largest_free_bytes == 32
    assert pool.allocate(17) == 0


def test_the_smallest_that_fits_goes_before_the_lowest() -> None:
    pool = BuddyPool(64, least_bytes=LEAST)
    blocks = [pool.allocate(8) for _ in range(8)]
    for address in (0, 8, 56):
        assert address in blocks
        pool.release(address)
    assert pool.allocate(8) == 56
    assert pool.allocate(8) == 0


def test_exhaustion_is_an_answer() -> None:
    """#18242's pool raises it in the listener's thread, which then receives nothing more."""
    pool = BuddyPool(1024)
    assert pool.allocate(1024) == 0
    assert pool.allocate(1) is None
    assert pool.release(0) == 1024
    assert pool.allocate(513) == 0
    assert (pool.held_bytes, pool.asked_bytes) == (1024, 513)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pool: BuddyPool(1000), "power of two"),
        (lambda pool: BuddyPool(0), "power of two"),
        (lambda pool: BuddyPool(256), "blocks of 512 to 256 bytes"),
        (lambda pool: BuddyPool(512, greatest_bytes=1024), "blocks of 512 to 1024 bytes"),
        (lambda pool: pool.allocate(0), "1 to 2048"),
        (lambda pool: pool.allocate(2049), "1 to 2048"),
        (lambda pool: pool.release(512), "begins at 512"),
        (lambda pool: pool.release(-4096), "begins at -4096"),
    ],
)
def test_misuse_is_named(act: Callable[[BuddyPool], object], message: str) -> None:
    pool = BuddyPool(4096, greatest_bytes=2048)
    pool.allocate(513)
    before = pool.fingerprint()
    with pytest.raises(PoolError, match=message):
        act(pool)
    assert pool.fingerprint() == before


def worst(levels: int, blocks: int) -> int:
    """The most lines that an act takes in a pool of least blocks, up to this many in use, given back in any order."""
    generator = random.Random(3)
    pool = BuddyPool(LEAST << levels, least_bytes=LEAST)
    spent, addresses = 0, []
    for _ in range(blocks):
        spent = max(spent, lines(lambda: addresses.append(pool.allocate(LEAST << generator.randrange(3)))))
    generator.shuffle(addresses)
    for address in addresses:
        spent = max(spent, lines(lambda at=address: pool.release(at)))  # type: ignore[misc]
    return spent


def test_an_act_costs_a_walk_down_and_up_however_many_blocks_there_are() -> None:
    few, many, deep = worst(12, 2), worst(12, 500), worst(24, 500)
    assert max(few, many) <= 10 * 12 + 40
    assert deep <= 10 * 24 + 40


def test_a_pool_costs_memory_for_what_is_in_use() -> None:
    pool = BuddyPool(1 << 40)
    addresses = [pool.allocate(512) for _ in range(100)]
    assert len(pool._open) <= 100 * 32
    for address in addresses:
        assert address is not None
        pool.release(address)
    assert not pool._open

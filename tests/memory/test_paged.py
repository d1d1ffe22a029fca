"""The paged pool against a model that keeps a set per state and knows nothing of runs and cursors."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pdflow.memory.paged import PagedPool, PoolError
from pdflow.protocol.values import NO_BLOCK, Allocation


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: which generation owns each block, in a plain dict, and two dicts of what is held and quarantined."""

    live = Bundle("live")
    dead = Bundle("dead")

    @initialize(num_blocks=st.integers(0, 40))
    def build(self, num_blocks: int) -> None:
        self.pool = PagedPool(num_blocks)
        self.owner: dict[int, int | None] = dict.fromkeys(range(num_blocks))
        self.freed_at: dict[int, int] = {block: block - num_blocks for block in range(num_blocks)}
        self.clock = 0
        self.held: dict[int, Allocation] = {}
        self.still: dict[int, Allocation] = {}
        self.grown = 0
        self.generations: set[int] = set()

    def model_free(self) -> list[int]:
        return [block for block, owner in self.owner.items() if owner is None]

    @rule(target=live, count=st.integers(0, 12))
    def allocate(self, count: int) -> Allocation:
        free = sorted(self.model_free(), key=lambda block: self.freed_at[block])
        got = self.pool.allocate(count)
        if count > len(free) - self.grown:
            assert got is None
            return Allocation(-1, ())
        assert got is not None
        assert list(got.blocks) == free[:count], "first freed, first reused"
        assert got.generation not in self.generations
        self.generations.add(got.generation)
        self.held[got.generation] = got
        for block in got.blocks:
            self.owner[block] = got.generation
        return got

    @rule(target=dead, allocation=consumes(live))
    def release(self, allocation: Allocation) -> Allocation:
        if allocation.generation not in self.held and allocation.generation not in self.still:
            with pytest.raises(PoolError):
                self.pool.release(allocation)
            return allocation
        # An equal copy (decoded from a frame, say) is as good as the object itself.
        self.pool.release(Allocation(allocation.generation, (*allocation.blocks,)))
        self.held.pop(allocation.generation, None)
        self.still.pop(allocation.generation, None)
        for block in allocation.blocks:
            self.clock += 1
            self.owner[block] = None
            self.freed_at[block] = self.clock
        return allocation

    @rule(target=live, allocation=consumes(live), count=st.integers(0, 5))
    def extend(self, allocation: Allocation, count: int) -> Allocation:
        generation = allocation.generation
        if generation not in self.held:
            with pytest.raises(PoolError):
                self.pool.extend(allocation, count)
            return allocation
        free = sorted(self.model_free(), key=lambda block: self.freed_at[block])
        longer = self.pool.extend(allocation, count)
        if count > len(free) - self.grown:
            assert longer is None
            return allocation
        assert longer == Allocation(generation, (*allocation.blocks, *free[:count]))
        assert not count or not self.pool.holds(allocation), "what was is not what is"
        self.held[generation] = longer
        self.owner.update(dict.fromkeys(longer.blocks, generation))
        return longer

    @rule(allocation=live)
    def quarantine(self, allocation: Allocation) -> None:
        if allocation.generation not in self.held:
            with pytest.raises(PoolError):
                self.pool.quarantine(allocation)
            return
        self.pool.quarantine(allocation)
        self.still[allocation.generation] = self.held.pop(allocation.generation)

    @rule(allocation=dead)
    def touch_the_dead(self, allocation: Allocation) -> None:
        for act in (self.pool.release, self.pool.quarantine):
            with pytest.raises(PoolError):
                act(allocation)
        assert not self.pool.holds(allocation)

    @rule(allocation=live)
    def release_an_altered_one(self, allocation: Allocation) -> None:
        altered = Allocation(allocation.generation, (*allocation.blocks, 1000))
        assert not self.pool.holds(altered)
        for act in (self.pool.release, self.pool.quarantine):
            with pytest.raises(PoolError):
                act(altered)

    @rule(count=st.integers(0, 12))
    def grow(self, count: int) -> None:
        fits = count <= len(self.model_free()) - self.grown
        assert self.pool.grow(count) is fits
        self.grown += count if fits else 0

    @rule(count=st.integers(0, 12))
    def shrink(self, count: int) -> None:
        if count > self.grown:
            with pytest.raises(PoolError):
                self.pool.shrink(count)
            return
        self.pool.shrink(count)
        self.grown -= count

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.free == len(self.model_free()) - self.grown
        assert pool.allocated == sum(len(a.blocks) for a in self.held.values())
        assert pool.quarantined == sum(len(a.blocks) for a in self.still.values())
        assert pool.grown == self.grown
        assert pool.free + pool.allocated + pool.quarantined + pool.grown == pool.num_blocks
        assert pool.owners() == {block: owner for block, owner in self.owner.items() if owner is not None}
        for block, owner in self.owner.items():
            assert pool.owner_of(block) == owner
        for allocation in self.held.values():
            assert pool.holds(allocation)
            assert not pool.is_quarantined(allocation)
        for allocation in self.still.values():
            assert pool.holds(allocation)
            assert pool.is_quarantined(allocation)


TestPool = PoolAgainstModel.TestCase


def test_a_refused_allocation_changes_nothing() -> None:
    pool = PagedPool(4)
    assert pool.grow(2)
    assert pool.allocate(3) is None
    assert (pool.free, pool.allocated, pool.grown) == (2, 0, 2)
    first = pool.allocate(2)
    assert first is not None
    assert first.generation == 1, "a refusal takes no generation"


def test_an_allocation_may_have_a_table_of_its_last_blocks() -> None:
    pool = PagedPool(10)
    whole = pool.allocate(6)
    assert whole is not None
    divided = pool.divided(whole, 4)
    assert divided == Allocation(1, (0, 1, 2, 3, 4, 5), ((0, 1, 2, 3), (NO_BLOCK, NO_BLOCK, 4, 5)))
    assert pool.holds(divided)
    pool.release(divided)
    assert pool.free == 10
    with pytest.raises(PoolError, match="divided: generation 1 was already released"):
        pool.divided(divided, 4)


def test_a_block_gets_a_new_generation_with_each_allocation() -> None:
    pool = PagedPool(1)
    generations = []
    for _ in range(5):
        blocks = pool.allocate(1)
        assert blocks is not None
        assert pool.owner_of(0) == blocks.generation
        generations.append(blocks.generation)
        pool.release(blocks)
        assert pool.owner_of(0) is None
    assert generations == sorted(set(generations))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pool: PagedPool(-1), "must be 0 or more"),
        (lambda pool: pool.allocate(-1), "must be 0 or more"),
        (lambda pool: pool.grow(-1), "use shrink"),
        (lambda pool: pool.shrink(-1), "between 0 and"),
        (lambda pool: pool.owner_of(9), "blocks 0 to 3"),
        (lambda pool: pool.release(Allocation(7, (1,))), "never allocated"),
    ],
)
def test_misuse_is_named(act: object, message: str) -> None:
    with pytest.raises(PoolError, match=message):
        act(PagedPool(4))  # type: ignore[operator]


def test_ids_taken_do_not_pile_up() -> None:
    pool = PagedPool(3000)
    for _ in range(500):
        allocation = pool.allocate(700)
        assert allocation is not None
        pool.release(allocation)
    assert sum(len(run) for run in pool._free_runs) <= 2 * 3000


def test_a_pool_costs_memory_for_what_it_has_handed_out() -> None:
    """A thousand idle engines of half a million tokens each took a gigabyte."""
    tracemalloc.start()
    pool = PagedPool(1_000_000)
    allocation = pool.allocate(10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocation is not None
    assert allocation.blocks == tuple(range(10))
    assert peak < 50_000

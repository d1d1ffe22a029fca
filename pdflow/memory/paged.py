"""The paged KV pool of one engine: which blocks are free, held by a request, or in quarantine until no write can land.

It decides names (block ids, generations) and counts; it does not decide when a block may be released or how long it
stays quarantined: that is `pdflow.protocol`. No two allocations share a block; the pool in which prompts do is
`caching.py`.

Blocks are reused first in, first out. A stale write that escaped every other guard then lands in a block that has
been free for as long as the pool allows, rather than in the one that was handed out a moment ago, and it costs no more
than a stack: the free blocks are a queue of the tuples that were given back, the first of them used up to a cursor, so
that giving back is one append and taking is a slice or two. The order is a function of the calls alone.

Blocks that decoding needs one by one are only counted (`grow`) in simulation: the protocol never names them, no peer
can write to them, and a simulator has no use for their ids. A real engine does, and takes them by `extend`.

Source: S1 and S6 (exclusive destinations, one release).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pdflow.protocol.values import NO_BLOCK, Allocation


class PoolError(ValueError):
    """A wrong call: a double release, another pool's allocation, an impossible count. The pool is unchanged."""


class PagedPool:
    """The pool: `num_blocks` blocks, each free, held, quarantined, or counted as grown."""

    __slots__ = (
        "_cursor",
        "_free_runs",
        "_generation",
        "_held",
        "_quarantine",
        "free",
        "grown",
        "num_blocks",
        "quarantined",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise PoolError(f"a pool of {num_blocks} blocks: the number of blocks must be 0 or more")
        # Plain attributes, read only for everyone else: an engine asks for them several times per request.
        self.num_blocks = num_blocks
        self.free = num_blocks
        """Blocks that `allocate` or `grow` could still take."""
        self.grown = 0
        """Blocks in use that were only counted, never named."""
        self.quarantined = 0
        # Free and grown blocks, in the order of their next use; no run is empty, none but the first is begun.
        # The first is a range, so that a pool costs memory for the blocks that it has handed out, not for all it has.
        self._free_runs: deque[Sequence[int]] = deque()
        self._cursor = 0
        if num_blocks:
            self._free_runs.append(range(num_blocks))
        self._generation = 0
        self._held: dict[int, Allocation] = {}
        self._quarantine: dict[int, Allocation] = {}

    @property
    def allocated(self) -> int:
        """Named blocks that requests hold; quarantined and grown ones are not among them."""
        return self.num_blocks - self.free - self.grown - self.quarantined

    @property
    def newest_generation(self) -> int:
        """The generation of the latest allocation so far; 0 before the first."""
        return self._generation

    def allocate(self, count: int) -> Allocation | None:
        """Take `count` blocks under a new generation, or return None and change nothing if fewer are free.

        A count of 0 gives an empty allocation with a generation of its own. O(count), at the speed of a slice.
        """
        if count > self.free:
            return None
        if count < 0:
            raise PoolError(f"allocate({count}): the count must be 0 or more")
        start = self._cursor
        end = start + count
        runs = self._free_runs
        if runs and end < len(runs[0]):
            blocks = tuple(runs[0][start:end])
            self._cursor = end
        else:
            blocks = self._take_over_runs(count)
        self.free -= count
        self._generation = generation = self._generation + 1
        self._held[generation] = allocation = Allocation(generation, blocks)
        return allocation

    def extend(self, allocation: Allocation, count: int) -> Allocation | None:
        """Return the allocation, in its generation, with `count` more blocks at its end; None if fewer are free.

        Where decoding really computes, its blocks need ids. Raises PoolError if the allocation is not held.
        """
        mine = self._held.get(allocation.generation)
        if mine is None:
            raise self._unknown(allocation, "extend")
        self._demand_same(mine, allocation)
        more = self.allocate(count)
        if more is None:
            return None
        del self._held[more.generation]
        self._held[allocation.generation] = longer = Allocation(allocation.generation, mine.blocks + more.blocks)
        return longer

    def divided(self, allocation: Allocation, count: int) -> Allocation:
        """Return the allocation, in its generation, as two block tables: its first `count` blocks, by token position,
        and all others, which are for other layers and stand for the last positions.

        Raises PoolError if the allocation is not held.
        """
        mine = self._held.get(allocation.generation)
        if mine is None:
            raise self._unknown(allocation, "divided")
        self._demand_same(mine, allocation)
        first, others = mine.blocks[:count], mine.blocks[count:]
        tables = (first, (NO_BLOCK,) * (count - len(others)) + others)
        self._held[allocation.generation] = found = Allocation(allocation.generation, mine.blocks, tables)
        return found

    def release(self, allocation: Allocation) -> None:
        """Make the blocks free again, whether they were held or quarantined.

        Raises PoolError on a second release and on an allocation that this pool did not make.
        """
        blocks = self._take_back(allocation).blocks
        if blocks:
            self.free += len(blocks)
            self._free_runs.append(blocks)

    def quarantine(self, allocation: Allocation) -> None:
        """Put the blocks into quarantine: no request owns them, and none gets them until `release`.

        Raises PoolError if the allocation is not held (already released or quarantined, or another pool's).
        """
        generation = allocation.generation
        mine = self._held.get(generation)
        if mine is None:
            raise self._unknown(allocation, "quarantine")
        self._demand_same(mine, allocation)
        del self._held[generation]
        self._quarantine[generation] = mine
        self.quarantined += len(mine.blocks)

    def grow(self, count: int) -> bool:
        """Count `count` more blocks as in use without naming them; False, and nothing changed, if fewer are free."""
        if count < 0:
            raise PoolError(f"grow({count}): the count must be 0 or more; use shrink to give blocks back")
        if count > self.free:
            return False
        self.free -= count
        self.grown += count
        return True

    def shrink(self, count: int) -> None:
        """Give back `count` blocks that were grown. Raises PoolError for more than are grown."""
        if not 0 <= count <= self.grown:
            raise PoolError(f"shrink({count}): between 0 and the {self.grown} grown blocks can be given back")
        self.free += count
        self.grown -= count

    def holds(self, allocation: Allocation) -> bool:
        """Whether these blocks, in this generation, are still held or quarantined here. O(1) for an object that this
        pool returned."""
        generation = allocation.generation
        mine = self._held.get(generation) or self._quarantine.get(generation)
        return mine is not None and (mine is allocation or mine == allocation)

    def is_quarantined(self, allocation: Allocation) -> bool:
        mine = self._quarantine.get(allocation.generation)
        return mine is not None and (mine is allocation or mine == allocation)

    def owner_of(self, block: int) -> int | None:
        """Return the generation that now holds or quarantines a block, None if it is free.

        For checking only: it looks through every allocation. For many blocks, use `owners()`.
        """
        if not 0 <= block < self.num_blocks:
            raise PoolError(f"owner_of({block}): this pool has blocks 0 to {self.num_blocks - 1}")
        for table in (self._held, self._quarantine):
            for generation, allocation in table.items():
                if block in allocation.blocks:
                    return generation
        return None

    def owners(self) -> dict[int, int]:
        """Return block -> generation, for every named block that is not free. O(blocks in use); for checking only."""
        owners: dict[int, int] = {}
        for table in (self._held, self._quarantine):
            for generation, allocation in table.items():
                owners.update(dict.fromkeys(allocation.blocks, generation))
        return owners

    def _take_back(self, allocation: Allocation) -> Allocation:
        """Remove an allocation, held or quarantined, from the pool's tables; its blocks are not free yet."""
        generation = allocation.generation
        mine = self._held.get(generation)
        if mine is not None:
            if mine is not allocation:
                self._demand_same(mine, allocation)
            del self._held[generation]
            return mine
        mine = self._quarantine.get(generation)
        if mine is None:
            raise self._unknown(allocation, "release")
        self._demand_same(mine, allocation)
        del self._quarantine[generation]
        self.quarantined -= len(mine.blocks)
        return mine

    def _take_over_runs(self, count: int) -> tuple[int, ...]:
        """Take the next `count` blocks, which use up the first run of free blocks."""
        runs = self._free_runs
        blocks: list[int] = []
        if runs:
            blocks += runs.popleft()[self._cursor :]
            count -= len(blocks)
        while count and len(runs[0]) <= count:
            run = runs.popleft()
            blocks += run
            count -= len(run)
        if count:
            blocks += runs[0][:count]
        self._cursor = count
        return tuple(blocks)

    def _demand_same(self, mine: Allocation, given: Allocation) -> None:
        if mine is not given and mine.blocks != given.blocks:
            raise PoolError(
                f"generation {given.generation} holds other blocks in this pool: "
                "the allocation comes from another pool or was altered"
            )

    def _unknown(self, allocation: Allocation, verb: str) -> PoolError:
        generation = allocation.generation
        if generation in self._quarantine:
            return PoolError(f"{verb}: generation {generation} is already in quarantine")
        if 0 < generation <= self._generation:
            return PoolError(f"{verb}: generation {generation} was already released")
        return PoolError(f"{verb}: generation {generation} was never allocated by this pool (last: {self._generation})")

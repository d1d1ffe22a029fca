"""A paged pool that remembers the KV of prompts and shares it with prompts that begin the same: prefix caching.

It decides what is remembered and what is forgotten when blocks run out. What a prompt begins with is told by names, one
for each prefix block. Such a block is `span` KV blocks long, and its name stands for it *and all before it*, as vLLM's
block hashes and Mooncake's `hash_ids` do. So the KV of equal names is equal, and what is found is a chain from the
start.

A remembered prefix block is shared by those that hold it. Once nobody does, its KV blocks count as free, and are handed
out when no others are left: least recently used first, and of one prompt its end first, so that what is left is always
a chain. Two that compute the same at once keep their own; the later one's are not remembered, nor is what follows them.

It differs from vLLM (v1/core/kv_cache_manager.py, block_pool.py) in two things: vLLM hands out free blocks in the order
in which they were given back, whether it remembers them or not, and forgets a little earlier; and it names each KV
block, so that a prompt's last prefix block may be found in part.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pdflow.memory.paged import PagedPool, PoolError
from pdflow.protocol.values import Allocation

Prefix = tuple[int, ...]


class PrefixBlock:
    """KV blocks that hold what a name stands for: `span` of a prompt's own ones, from the position `at` on."""

    __slots__ = ("at", "holders", "name", "source")

    def __init__(self, name: int, source: tuple[int, ...], at: int) -> None:
        self.name: Final = name
        # Not a slice of it: copying a tuple touches every number in it, and costs more than all else here.
        self.source: Final = source
        self.at: Final = at
        self.holders = 1


class PrefixHolding:
    """What one prompt holds: prefix blocks from its start on, of which it `found` the first ones and made the rest out
    of its own KV blocks."""

    __slots__ = ("chain", "closed", "found", "prefix")

    def __init__(self, prefix: Prefix, chain: list[PrefixBlock]) -> None:
        self.prefix: Final = prefix
        self.chain: Final = chain
        self.found: Final = len(chain)
        self.closed = False
        """What comes next is remembered as another's."""


class CachingPool(PagedPool):
    """A pool whose `free` blocks include those that are remembered and that nobody holds."""

    __slots__ = ("_holdings", "_idle", "_known", "idle", "span")

    def __init__(self, num_blocks: int, span: int) -> None:
        super().__init__(num_blocks)
        if span < 1:
            raise PoolError(f"a prefix block of {span} KV blocks: it must be 1 or more")
        self.span: Final = span
        self.idle = 0
        """Free blocks that are remembered."""
        self._known: dict[int, PrefixBlock] = {}
        self._idle: OrderedDict[int, PrefixBlock] = OrderedDict()
        self._holdings: dict[int, PrefixHolding] = {}

    # Prefixes.

    def find(self, prefix: Prefix, most: int) -> int:
        """How many prefix blocks are here, from the start on, of the first `most`."""
        known, count = self._known, 0
        for name in prefix:
            if count == most or name not in known:
                break
            count += 1
        return count

    def held(self, prefix: Prefix, most: int) -> int:
        """How many KV blocks somebody holds anyway of the first `most` prefix blocks: to share them takes no free one.

        Forgetting never changes this number, and giving back takes from it what it adds to `free`.
        """
        known, count = self._known, 0
        for name in prefix:
            if count == most:
                break
            block = known.get(name)
            if block is None or not block.holders:
                break
            count += 1
        return count * self.span

    def share(self, prefix: Prefix, found: int, count: int) -> Allocation | None:
        """Hold the first `found` prefix blocks, which must be here, and take `count` KV blocks of one's own to go on.

        The allocation has the latter; `table` has all. None, and nothing changed, if fewer are free.
        """
        known = self._known
        chain = [known[name] for name in prefix[:found]]
        resting = sum(1 for block in chain if not block.holders)
        if count + resting * self.span > self.free:
            return None
        for block in chain:
            if not block.holders:
                del self._idle[block.name]
                self.idle -= self.span
                self.free -= self.span
            block.holders += 1
        allocation = self.allocate(count)
        assert allocation is not None
        self._holdings[allocation.generation] = PrefixHolding(prefix, chain)
        return allocation

    def remember(self, allocation: Allocation, count: int) -> None:
        """Of this prompt, which came in by `share`, the first `count` prefix blocks are computed."""
        holding = self._holdings[allocation.generation]
        if holding.closed:
            return
        known, chain, source = self._known, holding.chain, allocation.blocks
        at = (len(chain) - holding.found) * self.span
        for name in holding.prefix[len(chain) : count]:
            if name in known:
                holding.closed = True
                return
            block = known[name] = PrefixBlock(name, source, at)
            chain.append(block)
            at += self.span

    def named(self, allocation: Allocation, grown: int) -> Allocation:
        """The same allocation with `grown` more blocks, which were grown for it and get names now: an answer's, to be
        remembered as what follows the prompt."""
        self.shrink(grown)
        # These were free of memories when they were grown: nothing is forgotten for them now.
        longer = self.extend(allocation, grown)
        assert longer is not None
        return longer

    def table(self, allocation: Allocation) -> tuple[int, ...]:
        """All blocks of a prompt in order, the shared ones first. O(blocks)."""
        holding = self._holdings.get(allocation.generation)
        if holding is None or not holding.found:
            return allocation.blocks
        blocks: list[int] = []
        for block in holding.chain[: holding.found]:
            blocks += block.source[block.at : block.at + self.span]
        return (*blocks, *allocation.blocks)

    # What the other pool does, too.

    def allocate(self, count: int) -> Allocation | None:
        """As of the other pool; what is remembered goes last."""
        if self.idle and count <= self.free:
            self._forget(count)
        return super().allocate(count)

    def grow(self, count: int) -> bool:
        """As of the other pool; what is remembered goes last."""
        if self.idle and count <= self.free:
            self._forget(count)
        return super().grow(count)

    def release(self, allocation: Allocation) -> None:
        """Make a prompt's own blocks free again, and let go of what it shares or could have shared."""
        holding = self._holdings.get(allocation.generation)
        if holding is None:
            super().release(allocation)
            return
        blocks = self._take_back(allocation).blocks[(len(holding.chain) - holding.found) * self.span :]
        del self._holdings[allocation.generation]
        if blocks:
            self.free += len(blocks)
            self._free_runs.append(blocks)
        idle, rested = self._idle, 0
        for block in reversed(holding.chain):
            block.holders -= 1
            if not block.holders:
                idle[block.name] = block
                rested += self.span
        self.idle += rested
        self.free += rested

    def quarantine(self, allocation: Allocation) -> None:
        """As of the other pool. What it found stays held, too. Raises PoolError if some of it has been remembered."""
        holding = self._holdings.get(allocation.generation)
        if holding is not None and len(holding.chain) > holding.found:
            raise PoolError(f"quarantine: blocks of generation {allocation.generation} are remembered for others")
        super().quarantine(allocation)

    def owner_of(self, block: int) -> int | None:
        """As of the other pool; a prefix block has an owner for as long as somebody holds it."""
        super().owner_of(block)
        return self.owners().get(block)

    def owners(self) -> dict[int, int]:
        """As of the other pool; the owner of a shared block is one of those that hold it."""
        owners: dict[int, int] = {}
        for table in (self._held, self._quarantine):
            for generation, allocation in table.items():
                owners.update(dict.fromkeys(self.table(allocation), generation))
        return owners

    def _forget(self, count: int) -> None:
        """Forget as much as `count` blocks ask for, beyond those that hold nothing."""
        idle, known, span = self._idle, self._known, self.span
        source: tuple[int, ...] = ()
        start = end = 0
        spans = -(-(count - self.free + self.idle) // span)
        for _ in range(spans):
            name, block = idle.popitem(last=False)
            del known[name]
            # Of one prompt the end goes first: what goes together is given back as one run.
            if block.source is not source or block.at + span != start:
                if end:
                    self._free_runs.append(source[start:end])
                source, end = block.source, block.at + span
            start = block.at
        if end:
            self._free_runs.append(source[start:end])
            self.idle -= spans * span

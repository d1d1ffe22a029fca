"""A paged pool that remembers the KV of prompts and shares it with prompts that begin the same: prefix caching.

It decides what is remembered and what is forgotten when blocks run out. A prompt's prefix is given by names, one
for each prefix block. Such a block is `span` KV blocks long, and its name stands for it *and all before it*, as vLLM's
block hashes and Mooncake's `hash_ids` do. So the KV of equal names is equal, and what is found is a chain from the
start.

A remembered prefix block is shared by the prompts that hold it. Once none does, its KV blocks count as free, and are
handed out when no others are left: least recently used first, and of one prompt its end first, so that what is left is
always a chain. Two that compute the same at once keep their own; the later one's are not remembered, nor is what
follows them.

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
    """The KV blocks of one prefix name: `span` blocks of the prompt that computed them, from the position `at` on."""

    __slots__ = ("at", "holders", "name", "source")

    def __init__(self, name: int, source: tuple[int, ...], at: int) -> None:
        self.name: Final = name
        # Not a slice of it: copying a tuple touches every number in it, and costs more than all else here.
        self.source: Final = source
        self.at: Final = at
        self.holders = 1


class PrefixHolding:
    """The prefix blocks of one prompt, from its start on: it `found` the first ones and made the rest out of its own KV
    blocks."""

    __slots__ = ("chain", "closed", "found", "prefix")

    def __init__(self, prefix: Prefix, chain: list[PrefixBlock]) -> None:
        self.prefix: Final = prefix
        self.chain: Final = chain
        self.found: Final = len(chain)
        self.closed = False
        """The next prefix block is remembered as another prompt's, so none of this one's is added."""


class CachingPool(PagedPool):
    """A paged pool with prefix caching. `free` includes remembered blocks that no prompt holds."""

    __slots__ = ("_holdings", "_idle", "_known", "idle", "span")

    def __init__(self, num_blocks: int, span: int) -> None:
        super().__init__(num_blocks)
        if span < 1:
            raise PoolError(f"a prefix block of {span} KV blocks: it must be 1 or more")
        self.span: Final = span
        self.idle = 0
        """Remembered blocks that no prompt holds; they count as free."""
        self._known: dict[int, PrefixBlock] = {}
        self._idle: OrderedDict[int, PrefixBlock] = OrderedDict()
        self._holdings: dict[int, PrefixHolding] = {}

    # Prefixes.

    def find(self, prefix: Prefix, most: int) -> int:
        """Return how many of the first `most` prefix blocks are remembered, from the start on."""
        known, count = self._known, 0
        for name in prefix:
            if count == most or name not in known:
                break
            count += 1
        return count

    def held(self, prefix: Prefix, most: int) -> int:
        """Return how many KV blocks of the first `most` prefix blocks other prompts hold: sharing them takes no free
        block.

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
        """Hold the first `found` prefix blocks, which must be remembered, and take `count` more KV blocks.

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
        """Remember the first `count` prefix blocks of a prompt that `share` admitted: they are computed."""
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
        """Return the allocation with the `grown` blocks that decoding counted for it, which get ids now, so that an
        answer is remembered behind its prompt."""
        self.shrink(grown)
        # These were free of memories when they were grown: nothing is forgotten for them now.
        longer = self.extend(allocation, grown)
        assert longer is not None
        return longer

    def table(self, allocation: Allocation) -> tuple[int, ...]:
        """Return all blocks of a prompt in order, the shared ones first. O(blocks)."""
        holding = self._holdings.get(allocation.generation)
        if holding is None or not holding.found:
            return allocation.blocks
        blocks: list[int] = []
        for block in holding.chain[: holding.found]:
            blocks += block.source[block.at : block.at + self.span]
        return (*blocks, *allocation.blocks)

    # What the other pool does, too.

    def allocate(self, count: int) -> Allocation | None:
        """Take blocks as `PagedPool` does; remembered blocks are taken last."""
        if self.idle and count <= self.free:
            self._forget(count)
        return super().allocate(count)

    def grow(self, count: int) -> bool:
        """Count blocks as `PagedPool` does; remembered blocks are taken last."""
        if self.idle and count <= self.free:
            self._forget(count)
        return super().grow(count)

    def release(self, allocation: Allocation) -> None:
        """Make a prompt's own blocks free again, and stop holding its prefix blocks, found or made."""
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
        """Quarantine as `PagedPool` does; prefix blocks that the prompt found stay held. Raises PoolError if some of
        its own blocks are remembered."""
        holding = self._holdings.get(allocation.generation)
        if holding is not None and len(holding.chain) > holding.found:
            raise PoolError(f"quarantine: blocks of generation {allocation.generation} are remembered for others")
        super().quarantine(allocation)

    def owner_of(self, block: int) -> int | None:
        """Return the owner as `PagedPool` does; a prefix block has an owner for as long as a prompt holds it."""
        super().owner_of(block)
        return self.owners().get(block)

    def owners(self) -> dict[int, int]:
        """Return the owners as `PagedPool` does; the owner of a shared block is one of the prompts that hold it."""
        owners: dict[int, int] = {}
        for table in (self._held, self._quarantine):
            for generation, allocation in table.items():
                owners.update(dict.fromkeys(self.table(allocation), generation))
        return owners

    def _forget(self, count: int) -> None:
        """Forget remembered blocks, least recently used first, until `count` free blocks hold nothing."""
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

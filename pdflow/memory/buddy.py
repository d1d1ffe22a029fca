"""A buddy pool: blocks of bytes whose sizes are powers of two, split from larger ones and merged with their buddies.

It decides where an entry of any size lies in pinned host memory. It does not decide what goes there (`threshold.py`),
nor what to do when there is no space: its caller gets None, where #18242's raised in the listener's thread and
ended it. Size is rounded up to a power of two; what that wastes is counted.

Of the free blocks that are large enough the smallest is used, of these the one with the lowest address; a block given
back merges as far as it can. So where a block lies follows from those that are in use, and from nothing else.

The pool is a binary tree, its nodes numbered as in a heap: 1 is the whole, 2n and 2n+1 are the halves of n. A node that
is wholly free is not stored, and neither is anything below it; so merging is forgetting. Of the others the tree keeps
which sizes are free within them, as bits: finding a block, splitting and merging are each one walk between the root and
a block. Memory is for what is in use, not for the capacity.

A block is identified by its address, which a later block may have again: a caller that could give one back twice names
it.

Source: TensorMemoryPool of vLLM #18242 (`tensor_memory_pool.py`): 512 bytes at least, the capacity at most.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from pdflow.memory.paged import PoolError


class BuddyPool:
    """The pool: `free + held` bytes are its capacity; `asked` of the held bytes were asked for."""

    __slots__ = (
        "_asked",
        "_levels",
        "_open",
        "_top",
        "asked_bytes",
        "capacity_bytes",
        "greatest_bytes",
        "held_bytes",
        "least_bytes",
    )

    def __init__(self, capacity_bytes: int, *, least_bytes: int = 512, greatest_bytes: int = 0) -> None:
        """Make an empty pool. Sizes are powers of two. `greatest_bytes` = 0: the greatest block is the whole pool."""
        greatest_bytes = greatest_bytes or capacity_bytes
        for size in (capacity_bytes, least_bytes, greatest_bytes):
            if size < 1 or size & (size - 1):
                raise PoolError(f"a buddy pool of sizes that include {size} bytes: each must be a power of two")
        if not least_bytes <= greatest_bytes <= capacity_bytes:
            raise PoolError(f"blocks of {least_bytes} to {greatest_bytes} bytes, in a pool of {capacity_bytes}")
        self.capacity_bytes: Final = capacity_bytes
        self.least_bytes: Final = least_bytes
        self.greatest_bytes: Final = greatest_bytes
        self.held_bytes = 0
        self.asked_bytes = 0
        # An order n is a size of least_bytes << n.
        self._levels: Final = (capacity_bytes // least_bytes).bit_length() - 1
        self._top: Final = (greatest_bytes // least_bytes).bit_length() - 1
        self._asked: dict[int, int] = {}
        """Address of each block in use -> bytes that were asked for."""
        self._open: dict[int, int] = {}
        """Node that is not wholly free -> the orders of which a free block is in it, a bit each; 0 if it is in use."""

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.held_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest size that `allocate` would grant now; 0 if there is none. O(1)."""
        free = self._free_in(1, self._levels)
        return self.least_bytes << (free.bit_length() - 1) if free else 0

    def rounded(self, size_bytes: int) -> int:
        """Return the size of the block that an entry takes."""
        return self.least_bytes << self._order(size_bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Take a block and return its address, a multiple of its size. None, and nothing changed, if no free one is
        large enough.

        Raises PoolError for a size beyond the greatest block's, for which waiting would never end. O(log n).
        """
        if not 0 < size_bytes <= self.greatest_bytes:
            raise PoolError(f"allocate: {size_bytes} bytes; a block has 1 to {self.greatest_bytes}")
        needed_order = self._order(size_bytes)
        large_enough = self._free_in(1, self._levels) >> needed_order << needed_order
        if not large_enough:
            return None
        bit = large_enough & -large_enough
        node, order = 1, self._levels
        while order > needed_order and node in self._open:
            node, order = 2 * node, order - 1
            if not self._free_in(node, order) & bit:
                node += 1
        node <<= order - needed_order
        self._open[node] = 0
        self._update_ancestors(node, needed_order)
        size = self.least_bytes << needed_order
        address = (node << needed_order) * self.least_bytes - self.capacity_bytes
        self._asked[address] = size_bytes
        self.asked_bytes += size_bytes
        self.held_bytes += size
        return address

    def release(self, address: int) -> int:
        """Give a block back, and return its size in bytes. Raises PoolError if none in use begins there. O(log n)."""
        asked = self._asked.pop(address, 0)
        if not asked:
            raise PoolError(f"release: no block in use begins at {address}")
        order = self._order(asked)
        node = (self.capacity_bytes + address) // self.least_bytes >> order
        del self._open[node]
        self._update_ancestors(node, order)
        size = self.least_bytes << order
        self.asked_bytes -= asked
        self.held_bytes -= size
        return size

    def fork(self) -> BuddyPool:
        other = BuddyPool(self.capacity_bytes, least_bytes=self.least_bytes, greatest_bytes=self.greatest_bytes)
        other.held_bytes, other.asked_bytes = self.held_bytes, self.asked_bytes
        other._asked = self._asked.copy()
        other._open = self._open.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state: the blocks in use, from which the tree follows."""
        return frozenset(self._asked.items())

    def _order(self, size_bytes: int) -> int:
        return (-(-size_bytes // self.least_bytes) - 1).bit_length()

    def _free_in(self, node: int, order: int) -> int:
        """Return the orders of the free blocks in a node of this order; none is greater than the greatest."""
        return self._open.get(node, 1 << min(order, self._top))

    def _update_ancestors(self, node: int, order: int) -> None:
        """Update the nodes above a changed node of this order: which orders are free in them, or that they are wholly
        free."""
        tree = self._open
        while node > 1:
            if node not in tree and node ^ 1 not in tree:
                del tree[node >> 1]
            else:
                tree[node >> 1] = self._free_in(node, order) | self._free_in(node ^ 1, order)
            node, order = node >> 1, order + 1

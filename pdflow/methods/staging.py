"""Staging memory, which is separate from an engine's KV blocks, and the order in which prompts get room there.

A prompt gets room for all of its KV at once, or waits: first come, first served. So no prompt holds a part and waits
for the rest (the deadlock of a full ring, vLLM #18332), and a large prompt is not overtaken forever. A
prompt has one part per layer, so a piece is found by its layer and its tokens, wherever a chunk of the prompt ended.
Every rank of an engine has such a memory. All are filled alike, so one of them is kept here, in bytes of a rank.

Where P writes, it asks for room with the WRITE, when the prompt has room at D. So a prompt that waits at D has no room
at P, and a prompt that has room at P waits for none: the two memories never wait for each other. Where D reads, it
allocates its blocks last instead.

The protocol decides when nothing can reach the bytes any more. `method.py` says what a method copies in and out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

from pdflow.memory.buddy import BuddyPool
from pdflow.memory.paged import PoolError
from pdflow.memory.ring import Ring
from pdflow.memory.threshold import ThresholdBuffer, Where
from pdflow.methods.method import MemoryKind, Method, PipelinePolicy
from pdflow.protocol.values import Allocation, Value

NO_LIMIT = 1 << 62


class TooLargeError(ValueError):
    """A prompt that does not fit into an empty memory, and would wait forever."""


def comes_with_the_write(method: Method, pipeline_policy: PipelinePolicy) -> bool:
    """Whether a prompt gets room at P when a WRITE of it is posted, not when it is computed. Until then it stays in P's
    blocks."""
    return pipeline_policy.guards.reserves_whole and not method.pulls


class KvSize(Value, frozen=True, gc=False):
    """The KV of one rank: its layers, and the bytes of one token in one of them."""

    layers: int
    bytes_per_token: int


class Staging:
    """The prompts that wait for room in a staging memory, and those that have it. Subclasses decide where the bytes
    lie."""

    def __init__(self, size: KvSize, evicts: bool = False) -> None:
        self.size = size
        self.evicts = evicts
        """Prompts that have room are evicted for the first in the queue."""
        self.waiting: OrderedDict[str, int] = OrderedDict()
        """Name -> tokens, in the order of their coming."""
        self.held: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Generation -> the name of the prompt, and its extents."""
        self.generation = 0

    # What subclasses do.

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether an empty memory could hold so much."""
        raise NotImplementedError

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        """Take room for all layers of a prompt and return its extents, one for each. None, and nothing changed, if
        there is none."""
        raise NotImplementedError

    def give_back(self, extents: tuple[int, ...]) -> None:
        raise NotImplementedError

    def where(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents in the form in which peers get them."""
        return extents

    def lacks(self, num_tokens: int) -> int:
        """Return, with `evicts`, how much room is missing for so many tokens; 0, or less, if nothing has to be
        evicted."""
        raise NotImplementedError

    def brings(self, extents: tuple[int, ...]) -> int:
        """Return how much of the missing room these extents give back."""
        raise NotImplementedError

    def fork(self) -> Staging:
        raise NotImplementedError

    # The interface of all memories.

    def enqueue(self, name: str, num_tokens: int) -> None:
        """Queue for room. Raises TooLargeError for a prompt that would wait forever."""
        if not self.fits_ever(num_tokens):
            raise TooLargeError(f"{num_tokens} tokens take {self.bytes_of(num_tokens)} bytes, more than the memory has")
        self.waiting[name] = num_tokens

    def admit_next(self) -> tuple[str, Allocation] | None:
        """Give room to the next prompt in the queue and return it with its allocation; None if there is no room. To be
        called after `enqueue`, `forget` and `release`, until it returns None."""
        if not self.waiting:
            return None
        name, num_tokens = next(iter(self.waiting.items()))
        extents = self.take(num_tokens)
        if extents is None:
            return None
        del self.waiting[name]
        self.generation += 1
        self.held[self.generation] = (name, extents)
        return name, Allocation(self.generation, self.where(extents))

    def forget(self, name: str) -> bool:
        """Take a prompt out of the queue. False if it was not waiting."""
        return self.waiting.pop(name, None) is not None

    def release(self, allocation: Allocation) -> None:
        """Give back bytes that nothing reads or writes any more. Raises PoolError if they were given back before."""
        if allocation.generation not in self.held:
            raise PoolError(f"release: generation {allocation.generation} is not held")
        _, extents = self.held.pop(allocation.generation)
        self.give_back(extents)

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes that a prompt's KV takes of one rank's memory."""
        return self.size.layers * self.size.bytes_per_token * num_tokens

    def victims(self) -> list[str]:
        """Return the prompts whose leases have to end so that the first in the queue may be served, where a method
        evicts: those that are first in `held`."""
        names: list[str] = []
        if not self.evicts or not self.waiting:
            return names
        lacking = self.lacks(next(iter(self.waiting.values())))
        for name, extents in self.held.values():
            if lacking <= 0:
                break
            names.append(name)
            lacking -= self.brings(extents)
        return names

    def copied_to(self, other: Staging) -> None:
        """Copy the state that all kinds of memory share into a fork."""
        other.waiting = self.waiting.copy()
        other.held = self.held.copy()
        other.generation = self.generation

    def fingerprint(self) -> Hashable:
        return tuple(self.waiting.items()), tuple(sorted(self.held.items())), self.generation


class RingStaging(Staging):
    """A ring of pinned host memory (PR #18332). A part holds whole blocks of `block_size` tokens."""

    def __init__(self, size: KvSize, ring: Ring, block_size: int = 1) -> None:
        super().__init__(size)
        self.ring = ring
        self.block_size = block_size

    @classmethod
    def of_bytes(cls, size: KvSize, capacity_bytes: int, step_bytes: int = 4096, block_size: int = 1) -> RingStaging:
        """Return a ring in which no part is larger than a layer's share; there are no marks but full and not full."""
        step = min(step_bytes, capacity_bytes)
        capacity = capacity_bytes // step * step
        layer_bytes = max(step, capacity // size.layers // step * step)
        ring = Ring(
            capacity, step_bytes=step, greatest_bytes=layer_bytes, high_bytes=capacity, low_bytes=capacity - step
        )
        return cls(size, ring, block_size)

    def layer_bytes(self, num_tokens: int) -> int:
        """Return the bytes that one layer of a prompt takes."""
        blocks = -(-num_tokens // self.block_size)
        return self.ring.rounded(self.size.bytes_per_token * blocks * self.block_size)

    def fits_ever(self, num_tokens: int) -> bool:
        layer_bytes = self.layer_bytes(num_tokens)
        return layer_bytes <= self.ring.greatest_bytes and layer_bytes * self.size.layers <= self.ring.capacity_bytes

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        layer_bytes, layers = self.layer_bytes(num_tokens), self.size.layers
        if not self.ring.reserve(self, layer_bytes * layers):
            return None
        extents = tuple([self.ring.allocate(self, layer_bytes) for _ in range(layers)])
        self.ring.unreserve(self)
        return extents

    def give_back(self, extents: tuple[int, ...]) -> None:
        for position in extents:
            self.ring.release(position)

    def where(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Return positions in steps from the start of the ring: positions only grow, and would outgrow the 32 bits of a
        frame, as would the bytes of a large ring."""
        ring = self.ring
        return tuple([position % ring.capacity_bytes // ring.step_bytes for position in extents])

    def fork(self) -> RingStaging:
        other = RingStaging(self.size, self.ring.fork(), self.block_size)
        self.copied_to(other)
        return other


class BufferStaging(Staging):
    """GPU memory up to a threshold, pinned host memory behind it (PR #18242). A part may lie in either."""

    def __init__(self, size: KvSize, buffer: ThresholdBuffer) -> None:
        super().__init__(size)
        self.buffer = buffer
        self.next_extent = 0

    @classmethod
    def of_bytes(cls, size: KvSize, threshold_bytes: int, pool_bytes: int) -> BufferStaging:
        """Return a buffer with a pool behind it. The pool's size is rounded up to a power of two; 0 for none."""
        pool = BuddyPool(max(512, 1 << (pool_bytes - 1).bit_length())) if pool_bytes else None
        return cls(size, ThresholdBuffer(threshold_bytes, pool))

    def fits_ever(self, num_tokens: int) -> bool:
        layer_bytes, layers, buffer = self.size.bytes_per_token * num_tokens, self.size.layers, self.buffer
        in_buffer = min(layers, buffer.threshold_bytes // layer_bytes)
        if in_buffer == layers or buffer.pool is None or layer_bytes > buffer.pool.greatest_bytes:
            return in_buffer == layers
        return (layers - in_buffer) * buffer.pool.rounded(layer_bytes) <= buffer.pool.capacity_bytes

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        layer_bytes = self.size.bytes_per_token * num_tokens
        extents: list[int] = []
        for _ in range(self.size.layers):
            self.next_extent += 1
            if self.buffer.put(self.next_extent, layer_bytes) is Where.NOWHERE:
                self.give_back(tuple(extents))
                return None
            extents.append(self.next_extent)
        return tuple(extents)

    def give_back(self, extents: tuple[int, ...]) -> None:
        for extent in extents:
            self.buffer.drop(extent)

    def spilled(self, allocation: Allocation) -> int:
        """Return how many of a prompt's layers lie in the pool."""
        return sum(self.buffer.address(extent) is not None for extent in allocation.blocks)

    def fork(self) -> BufferStaging:
        other = BufferStaging(self.size, self.buffer.fork())
        other.next_extent = self.next_extent
        self.copied_to(other)
        return other


class ThresholdStaging(Staging):
    """Whole prompts up to a threshold of bytes, which the last of them may exceed (the lookup buffer of PR #10884).

    With `evicts`, the one that was used least recently makes room for the next instead (P2P NCCL's store for GET).
    """

    def __init__(self, size: KvSize, threshold_bytes: int, evicts: bool = False) -> None:
        super().__init__(size, evicts)
        self.threshold_bytes = threshold_bytes
        self.used_bytes = 0

    def fits_ever(self, num_tokens: int) -> bool:
        return not self.evicts or self.bytes_of(num_tokens) <= self.threshold_bytes

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        size = self.bytes_of(num_tokens)
        after = self.used_bytes + size
        if (after if self.evicts else self.used_bytes + 1) > self.threshold_bytes and self.held:
            return None
        self.used_bytes = after
        return (size,)

    def give_back(self, extents: tuple[int, ...]) -> None:
        self.used_bytes -= extents[0]

    def lacks(self, num_tokens: int) -> int:
        return self.used_bytes + self.bytes_of(num_tokens) - self.threshold_bytes

    def brings(self, extents: tuple[int, ...]) -> int:
        return extents[0]

    def touch(self, allocation: Allocation) -> None:
        """Mark a prompt as used just now."""
        self.held[allocation.generation] = self.held.pop(allocation.generation)

    def fork(self) -> ThresholdStaging:
        other = ThresholdStaging(self.size, self.threshold_bytes, self.evicts)
        other.used_bytes = self.used_bytes
        self.copied_to(other)
        return other

    def fingerprint(self) -> Hashable:
        """Return the state, with prompts in the order of their use."""
        return tuple(self.waiting.items()), tuple(self.held.items()), self.generation


class PagedStaging(Staging):
    """Any of these memories where its bytes have addresses: pages of `block_size` tokens, each with all layers.

    With `evicts`, the prompt that was given room first makes room for the next.
    """

    def __init__(self, size: KvSize, block_size: int, num_pages: int, evicts: bool = False) -> None:
        super().__init__(size, evicts)
        self.block_size = block_size
        self.num_pages = num_pages
        self.free: deque[int] = deque(range(num_pages))

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_ever(self, num_tokens: int) -> bool:
        return self.pages(num_tokens) <= self.num_pages

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        pages = self.pages(num_tokens)
        if pages > len(self.free):
            return None
        return tuple([self.free.popleft() for _ in range(pages)])

    def give_back(self, extents: tuple[int, ...]) -> None:
        self.free.extend(extents)

    def lacks(self, num_tokens: int) -> int:
        return self.pages(num_tokens) - len(self.free)

    def brings(self, extents: tuple[int, ...]) -> int:
        return len(extents)

    def fork(self) -> PagedStaging:
        other = PagedStaging(self.size, self.block_size, self.num_pages, self.evicts)
        other.free = self.free.copy()
        self.copied_to(other)
        return other

    def fingerprint(self) -> Hashable:
        """Return the state with the free pages, in the order of their next use."""
        return super().fingerprint(), tuple(self.free)


def staging_of(
    memory: MemoryKind, size: KvSize, ring_bytes: int, buffer_bytes: int, pool_bytes: int, reserves_whole: bool = True
) -> Staging:
    """Return an empty memory of this kind, of one rank. Without `reserves_whole` (`guards.py`) each piece is queued for
    by itself, under a name of its own: here it is then a prompt of one layer."""
    if not reserves_whole:
        size = KvSize(1, size.bytes_per_token)
    if memory is MemoryKind.RING:
        return RingStaging.of_bytes(size, ring_bytes)
    if memory is MemoryKind.BUFFER:
        return BufferStaging.of_bytes(size, buffer_bytes, pool_bytes)
    if memory is MemoryKind.TENSORS:
        return ThresholdStaging(size, NO_LIMIT)
    return ThresholdStaging(size, buffer_bytes, evicts=memory is MemoryKind.STORE)

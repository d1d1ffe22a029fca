"""The memory of a store's node: which objects are there, which prompts get room, and which objects are evicted for it.

An object is the KV of a prompt, or of one of its blocks, under a key of its content; it never changes. `enqueue` finds
the objects at a prompt's start that the store already has. It gives room for the rest, at once or later, in the order
of the calls. The prompt then holds all of them, under one generation, until `release`: first while they are written,
then while they are read, for as long as the lease runs. An object that is held is never evicted, complete or not.

An object that no prompt holds stays if the store keeps objects (get), and is removed if it does not (drop_select). The
store evicts the least recently used objects first, and the end of a prompt before its start, so that what is left is
found from the start. It evicts before the memory is full: above the high-water mark, a twentieth at once. An object
that a second prompt has found is pinned softly for half an hour: it is evicted last.

The protocol decides when nothing can reach the bytes any more. Source: Mooncake Store, Mooncake at 3b5a5941.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import takewhile

from pdflow.memory.paged import PagedPool, PoolError
from pdflow.methods.store.keys import Key
from pdflow.protocol.values import Allocation, Instant, S, Value

FREED = 0.05
"""The share of the memory that is freed when it is fuller than the high-water mark."""
PIN_NS = 30 * 60 * S


class Item(Value, frozen=True, gc=False):
    """One object of a prompt: its key, and the blocks of memory that it takes."""

    key: Key
    blocks: int


class Placed(Value, frozen=True, gc=False):
    """A prompt that has been given room."""

    name: str
    found_blocks: int
    """At its start, that were there."""
    target: Allocation
    """Room for the others."""


class StoredObject:
    __slots__ = ("found", "holders", "key", "own", "pinned_until")

    def __init__(self, key: Key, own: Allocation) -> None:
        self.key = key
        self.own = own
        self.holders = 1
        self.found = False
        """The object has been found by another prompt than the one that brought it: it will be pinned."""
        self.pinned_until: Instant = 0


class StoredPrompt:
    """The objects that one prompt holds."""

    __slots__ = ("objects", "token")

    def __init__(self, token: Allocation, objects: list[StoredObject]) -> None:
        self.token = token
        """An allocation of no blocks, which gives the holding a generation of its own."""
        self.objects = objects


class StoreMemory:
    """The objects of one node, and the prompts that wait for room.

    Args:
        num_blocks: of one node, each of them the same tokens' KV on all of its ranks.
        keeps: whether objects stay when they have been read.
        high_water: the share of the memory above which objects are evicted.
    """

    def __init__(self, num_blocks: int, keeps: bool, high_water: float = 0.9) -> None:
        self.pool = PagedPool(num_blocks)
        self.keeps = keeps
        self.high_blocks = int(num_blocks * high_water)
        self.low_blocks = max(0, self.high_blocks - max(1, int(num_blocks * FREED)))
        self.waiting: OrderedDict[str, tuple[Item, ...]] = OrderedDict()
        self.held: dict[int, StoredPrompt] = {}
        self.known: dict[Key, StoredObject] = {}
        """Objects that are complete, and can be found by others."""
        self.idle: OrderedDict[Key, StoredObject] = OrderedDict()
        """Those of `known` that no prompt holds, in the order of their use."""
        self.pinned: OrderedDict[Key, StoredObject] = OrderedDict()
        """The same, of those that are pinned softly."""
        self.evicted = 0

    @property
    def used(self) -> int:
        return self.pool.num_blocks - self.pool.free

    # Who gets room.

    def fits_ever(self, num_blocks: int) -> bool:
        return num_blocks <= self.pool.num_blocks

    def enqueue(self, name: str, items: tuple[Item, ...]) -> None:
        """Queue for room. Raises PoolError for a prompt that would wait forever."""
        blocks = blocks_of(items)
        if not self.fits_ever(blocks):
            raise PoolError(f"enqueue: {blocks} blocks, but there are {self.pool.num_blocks}")
        self.waiting[name] = items

    def forget(self, name: str) -> bool:
        """Take a prompt out of the queue. False if it was not waiting."""
        return self.waiting.pop(name, None) is not None

    def admit_waiting(self, now: Instant) -> list[Placed]:
        """Give room to waiting prompts, in turn, and return them. To be called after every `enqueue`, `forget` and
        `release`."""
        admitted: list[Placed] = []
        while self.waiting:
            name, items = next(iter(self.waiting.items()))
            placed = self._allocate_objects(name, items, now)
            if placed is None:
                break
            del self.waiting[name]
            admitted.append(placed)
        return admitted

    def bring(self, items: tuple[Item, ...], now: Instant) -> Placed | None:
        """Take room for objects that are whole elsewhere, or return None: they neither wait for room nor overtake a
        prompt that does."""
        if self.waiting or not self.fits_ever(blocks_of(items)):
            return None
        return self._allocate_objects("", items, now)

    def _allocate_objects(self, name: str, items: tuple[Item, ...], now: Instant) -> Placed | None:
        objects = self._hold(self.find(items), items)
        found = len(objects)
        new = items[found:] if found else items
        if not self._make_room(blocks_of(new), now):
            self._release_objects(objects, now)
            return None
        for item in new:
            objects.append(StoredObject(item.key, self._allocate(item.blocks)))
        token = self._allocate(0)
        self.held[token.generation] = StoredPrompt(token, objects)
        return Placed(name, blocks_of(items[:found]), Allocation(token.generation, joined(objects[found:])))

    def _allocate(self, blocks: int) -> Allocation:
        own = self.pool.allocate(blocks)
        assert own is not None, "room was made for it"
        return own

    # What is there.

    def find(self, items: tuple[Item, ...]) -> int:
        """Return how many of these objects are there, from the first on."""
        count = 0
        for item in items:
            if item.key not in self.known:
                break
            count += 1
        return count

    def lease(self, items: tuple[Item, ...]) -> Allocation | None:
        """Hold what is there of these, from the first on; None if nothing is."""
        count = self.find(items)
        if not count:
            return None
        token = self._allocate(0)
        objects = self._hold(count, items)
        self.held[token.generation] = StoredPrompt(token, objects)
        return self.table(token.generation)

    def complete(self, generation: int) -> Allocation:
        """Record that all that a prompt holds has been written. Return its allocation, with the blocks of all its
        objects."""
        if self.keeps:
            for stored in self.held[generation].objects:
                # Of two that put the same at once, only the first one's is found by others.
                self.known.setdefault(stored.key, stored)
        return self.table(generation)

    def table(self, generation: int) -> Allocation:
        return Allocation(generation, joined(self.held[generation].objects))

    def release(self, generation: int, now: Instant) -> None:
        """Release all that a prompt holds: it has been read, or its lease is over, or it was not written and no peer
        can write it any more. Raises PoolError if it held nothing."""
        holding = self.held.pop(generation, None)
        if holding is None:
            raise PoolError(f"release: generation {generation} is not held")
        self._release_objects(holding.objects, now)
        self.pool.release(holding.token)

    def _hold(self, count: int, items: tuple[Item, ...]) -> list[StoredObject]:
        objects = []
        for item in items[:count]:
            stored = self.known[item.key]
            self.idle.pop(stored.key, None)
            self.pinned.pop(stored.key, None)
            stored.holders += 1
            stored.found = True
            objects.append(stored)
        return objects

    def _release_objects(self, objects: list[StoredObject], now: Instant) -> None:
        for stored in reversed(objects):
            stored.holders -= 1
            if stored.holders:
                continue
            if self.known.get(stored.key) is not stored:
                self.pool.release(stored.own)
            elif stored.found:
                stored.pinned_until = now + PIN_NS
                self.pinned[stored.key] = stored
            else:
                self.idle[stored.key] = stored

    # What goes.

    def _make_room(self, need: int, now: Instant) -> bool:
        """Evict what must go for so many blocks more. True if there is room now."""
        if self.used + need > self.high_blocks:
            self._unpin(now)
            while self.used + need > self.low_blocks and (self.idle or self.pinned):
                queue = self.idle or self.pinned
                key, stored = queue.popitem(last=False)
                del self.known[key]
                self.pool.release(stored.own)
                self.evicted += 1
        return need <= self.pool.free

    def _unpin(self, now: Instant) -> None:
        """Unpin objects whose half hour is over: they have not been used for as long, so they go before all others."""
        over = list(takewhile(lambda stored: stored.pinned_until <= now, self.pinned.values()))
        for stored in reversed(over):
            del self.pinned[stored.key]
            stored.found = False
            self.idle[stored.key] = stored
            self.idle.move_to_end(stored.key, last=False)

    # At the end.

    def fingerprint(self) -> Hashable:
        known = tuple([(key, one.own, one.holders, one.found, one.pinned_until) for key, one in self.known.items()])
        held = tuple([(name, tuple([(one.key, one.own) for one in it.objects])) for name, it in self.held.items()])
        return tuple(self.waiting.items()), held, known, tuple(self.idle), tuple(self.pinned), self.pool.free

    def assert_empty(self, name: str) -> None:
        """Assert that nothing is held or waits, and that what is there is what was kept."""
        assert not self.held, f"{name} is still held: {list(self.held)}"
        assert not self.waiting, f"{name} is still waited for: {list(self.waiting)}"
        kept = sum(len(stored.own.blocks) for stored in self.known.values())
        assert self.used == kept, f"{name} has lost {self.used - kept} blocks"
        assert len(self.known) == len(self.idle) + len(self.pinned)


def blocks_of(items: tuple[Item, ...]) -> int:
    """Return the number of blocks that these objects take."""
    return sum([item.blocks for item in items])


def joined(objects: list[StoredObject]) -> tuple[int, ...]:
    """Return the blocks of these objects, in order."""
    if len(objects) == 1:
        return objects[0].own.blocks
    return tuple([block for stored in objects for block in stored.own.blocks])

"""The memory of a store against a naive one that looks at everything each time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdflow.memory.paged import PoolError
from pdflow.methods.store.memory import FREED, PIN_NS, Item, Placed, StoreMemory

BLOCKS = 40
MINUTE = PIN_NS // 30


class NaiveObject:
    def __init__(self, key: str, blocks: int) -> None:
        self.key = key
        self.blocks = blocks
        self.holders = 1
        self.found = False
        self.released_at = 0
        self.released = 0
        self.findable = False


class NaiveStore:
    """Objects in a list; who goes is found by sorting."""

    def __init__(self, keeps: bool, high_water: float) -> None:
        self.keeps = keeps
        self.high = int(BLOCKS * high_water)
        self.low = max(0, self.high - max(1, int(BLOCKS * FREED)))
        self.objects: list[NaiveObject] = []
        self.queue: list[tuple[str, tuple[Item, ...]]] = []
        self.clock = 0

    @property
    def used(self) -> int:
        return sum(stored.blocks for stored in self.objects)

    def findable(self, key: str) -> NaiveObject | None:
        return next((stored for stored in self.objects if stored.findable and stored.key == key), None)

    def hold(self, items: tuple[Item, ...]) -> list[NaiveObject]:
        held = []
        for item in items:
            stored = self.findable(item.key)
            if stored is None:
                break
            stored.holders += 1
            stored.found = True
            held.append(stored)
        return held

    def allocate(self, items: tuple[Item, ...], now: int) -> tuple[int, list[NaiveObject]] | None:
        held = self.hold(items)
        found = len(held)
        need = sum(item.blocks for item in items[found:])
        if self.used + need > self.high:
            while self.used + need > self.low and (evictable := [o for o in self.objects if not o.holders]):
                self.objects.remove(min(evictable, key=lambda o: self.worth(o, now)))
        if self.used + need > BLOCKS:
            self.release(held, now)
            return None
        for item in items[found:]:
            self.objects.append(NaiveObject(item.key, item.blocks))
            held.append(self.objects[-1])
        return found, held

    def worth(self, stored: NaiveObject, now: int) -> tuple[int, int]:
        """First whose pin is over, then who was never pinned, then who is."""
        if not stored.found:
            return 1, stored.released
        return (2 if stored.released_at + PIN_NS > now else 0), stored.released

    def complete(self, held: list[NaiveObject]) -> None:
        for stored in held:
            stored.findable |= self.keeps and self.findable(stored.key) is None

    def release(self, held: list[NaiveObject], now: int) -> None:
        for stored in reversed(held):
            stored.holders -= 1
            self.clock += 1
            stored.released = self.clock
            stored.released_at = now
            if not stored.holders and not stored.findable:
                self.objects.remove(stored)


KEYS = "abcdefgh"


class StoreMachine(RuleBasedStateMachine):
    keeps = True
    high_water = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.real = StoreMemory(BLOCKS, self.keeps, self.high_water)
        self.naive = NaiveStore(self.keeps, self.high_water)
        self.now = 0
        self.names = 0
        self.held: dict[int, tuple[Any, list[NaiveObject], bool]] = {}
        """Generation -> its blocks at the time, the naive one's objects, whether it is complete."""

    def admit_waiting(self) -> None:
        expected: list[tuple[str, int, list[NaiveObject]]] = []
        while self.naive.queue:
            name, items = self.naive.queue[0]
            placed = self.naive.allocate(items, self.now)
            if placed is None:
                break
            self.naive.queue.pop(0)
            expected.append((name, *placed))
        got: list[Placed] = self.real.admit_waiting(self.now)
        assert [placed.name for placed in got] == [name for name, _, _ in expected]
        for given, (_, found, objects) in zip(got, expected, strict=True):
            assert given.found_blocks == sum(stored.blocks for stored in objects[:found])
            assert len(given.target.blocks) == sum(stored.blocks for stored in objects[found:])
            generation = given.target.generation
            assert generation not in self.held
            self.held[generation] = (self.real.table(generation).blocks, objects, False)

    @rule(start=st.integers(0, 3), length=st.integers(1, 5), size=st.integers(1, 6), tail=st.integers(1, 8))
    def enqueue(self, start: int, length: int, size: int, tail: int) -> None:
        """Prompts that begin alike: a chain of keys, and an end that nobody else has."""
        self.names += 1
        chain = [Item(f"{size}{KEYS[start : start + index + 1]}", size) for index in range(length)]
        items = (*chain, Item(f"end {self.names}", tail))
        name = f"n{self.names}"
        if sum(item.blocks for item in items) > BLOCKS:
            with pytest.raises(PoolError, match="enqueue"):
                self.real.enqueue(name, items)
            return
        self.real.enqueue(name, items)
        self.naive.queue.append((name, items))
        self.admit_waiting()

    @precondition(lambda self: self.naive.queue)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.naive.queue))
        self.naive.queue.remove(item)
        assert self.real.forget(item[0])
        assert not self.real.forget(item[0])
        self.admit_waiting()

    @precondition(lambda self: any(not complete for _, _, complete in self.held.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from([g for g, (_, _, complete) in self.held.items() if not complete]))
        blocks, objects, _ = self.held[generation]
        self.naive.complete(objects)
        assert self.real.complete(generation).blocks == blocks
        self.held[generation] = (blocks, objects, True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(list(self.held)))
        self.naive.release(self.held.pop(generation)[1], self.now)
        self.real.release(generation, self.now)
        with pytest.raises(PoolError, match="release"):
            self.real.release(generation, self.now)
        self.admit_waiting()

    @rule(start=st.integers(0, 3), length=st.integers(1, 5), size=st.integers(1, 6))
    def lease(self, start: int, length: int, size: int) -> None:
        items = tuple(Item(f"{size}{KEYS[start : start + index + 1]}", size) for index in range(length))
        objects = self.naive.hold(items)
        found = self.real.lease(items)
        assert (found is None) == (not objects)
        if found is not None:
            assert len(found.blocks) == size * len(objects)
            self.held[found.generation] = (found.blocks, objects, True)

    @rule(start=st.integers(0, 3), length=st.integers(1, 5), size=st.integers(1, 20))
    def bring(self, start: int, length: int, size: int) -> None:
        """At once, or not at all while others wait."""
        items = tuple(Item(f"{size}{KEYS[start : start + index + 1]}", size) for index in range(length))
        placed = None
        if not self.naive.queue and size * length <= BLOCKS:
            placed = self.naive.allocate(items, self.now)
        given = self.real.bring(items, self.now)
        assert (given is None) == (placed is None)
        if given is not None and placed is not None:
            assert len(given.target.blocks) == size * (length - placed[0])
            generation = given.target.generation
            self.held[generation] = (self.real.table(generation).blocks, placed[1], False)

    @rule(minutes=st.sampled_from([1, 10, 31]))
    def wait(self, minutes: int) -> None:
        self.now += minutes * MINUTE

    @invariant()
    def counts_agree(self) -> None:
        assert self.real.used == self.naive.used
        assert set(self.real.known) == {stored.key for stored in self.naive.objects if stored.findable}

    @invariant()
    def what_is_held_stays_where_it_is(self) -> None:
        for generation, (blocks, _, _) in self.held.items():
            assert self.real.table(generation).blocks == blocks

    @invariant()
    def no_block_is_two_objects(self) -> None:
        there = {
            id(o): o for o in (*self.real.known.values(), *(o for h in self.real.held.values() for o in h.objects))
        }
        blocks = [block for stored in there.values() for block in stored.own.blocks]
        assert len(blocks) == len(set(blocks)) == self.real.used

    def teardown(self) -> None:
        self.real.waiting.clear()
        for generation in list(self.held):
            self.real.release(generation, self.now)
        self.real.assert_empty("it")
        assert self.keeps or not self.real.used


class LowMark(StoreMachine):
    high_water = 0.4


class ConsumeOnce(StoreMachine):
    keeps = False


for machine in (StoreMachine, LowMark, ConsumeOnce):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestStore = StoreMachine.TestCase
TestLowMark = LowMark.TestCase
TestConsumeOnce = ConsumeOnce.TestCase

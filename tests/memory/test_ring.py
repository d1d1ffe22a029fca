"""The ring against a list of byte ranges; what is reserved can be placed; marks; the deadlock of #18332, and none."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.memory.paged import PoolError
from pdflow.memory.ring import Ring
from tests.memory.support import lines

STEP = 4
GAP = -1
"""A range's owner, if it is skipped or was given back."""


def plain(steps: int, greatest: int = 0, high: int = 0, low: int | None = None) -> Ring:
    """A ring of this many steps; without marks it stops writers when it is full, and only then."""
    return Ring(
        STEP * steps,
        step_bytes=STEP,
        greatest_bytes=STEP * (greatest or steps),
        high_bytes=STEP * (high or steps),
        low_bytes=STEP * (steps - 1 if low is None else low),
    )


def counters(ring: Ring) -> tuple[int, ...]:
    return ring.held_bytes, ring.stranded_bytes, ring.skipped_bytes, ring.reserved_bytes, ring.free_bytes


class RingAgainstModel(RuleBasedStateMachine):
    """The model: (position, steps, is it skipped) of ranges from the oldest part on, and which parts are given back."""

    @initialize(steps=st.integers(3, 10), greatest=st.integers(1, 5), high=st.integers(0, 10), low=st.integers(0, 9))
    def build(self, steps: int, greatest: int, high: int, low: int) -> None:
        self.steps, self.greatest = steps, min(greatest, steps)
        # Often without marks: what the end of the ring does to requests is seen when it is full.
        self.high = high if 0 < high < steps else steps
        self.low = min(low, self.high - 1) if self.high < steps else steps - 1
        self.ring = plain(steps, self.greatest, self.high, self.low)
        self.ranges: list[tuple[int, int, bool]] = []
        self.back: set[int] = set()
        self.owners = 0
        self.head = 0
        self.promised: dict[int, int] = {}
        self.pressed = False

    def span(self) -> int:
        return sum(size for _, size, _ in self.ranges)

    def fits(self, size: int) -> bool:
        """Try every part that could be the first to meet the end, after anything that could be placed before it."""
        promised = sum(self.promised.values()) + size
        room = self.steps - self.head % self.steps
        skips = [
            room - before
            for before in range(min(room, promised) + 1)
            for next_size in range(1, min(self.greatest, promised - before) + 1)
            if 0 < room - before < next_size
        ]
        return not self.pressed and self.span() + promised + max(skips, default=0) <= self.steps

    def put(self, size: int) -> int:
        room = self.steps - self.head % self.steps
        if size > room:
            self.ranges.append((self.head, room, True))
            self.head += room
        position = self.head
        self.ranges.append((position, size, False))
        self.head += size
        self.heed()
        return position * STEP

    def heed(self) -> None:
        taken = self.span() + sum(self.promised.values())
        if taken >= self.high:
            self.pressed = True
        if taken <= self.low:
            self.pressed = False

    def live(self) -> list[int]:
        return [at * STEP for at, _, skipped in self.ranges if not skipped and at * STEP not in self.back]

    @precondition(lambda self: not self.pressed)
    @rule(need=st.integers(1, 10), odd=st.integers(0, STEP - 1))
    def reserve(self, need: int, odd: int) -> None:
        owner, need = self.owners, min(need, self.steps)
        fits = self.fits(need)
        assert self.ring.reserve(owner, need * STEP - odd) is fits
        if fits:
            self.owners += 1
            self.promised[owner] = need
            self.heed()

    @precondition(lambda self: any(self.promised.values()))
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner, left in self.promised.items() if left]))
        self.allocate_for(owner, data.draw(st.integers(1, 5)))

    def allocate_for(self, owner: int, size: int) -> None:
        size = min(size, self.greatest, self.promised[owner])
        self.promised[owner] -= size
        position = self.put(size)
        assert self.ring.allocate(owner, size * STEP) == position

    @precondition(lambda self: not self.pressed)
    @rule(size=st.integers(1, 5))
    def take(self, size: int) -> None:
        size = min(size, self.greatest)
        if not self.fits(size):
            assert self.ring.take(size * STEP) is None
            return
        position = self.put(size)
        assert self.ring.take(size * STEP) == position

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.promised))))

    def end(self, owner: int) -> None:
        assert self.ring.unreserve(owner) == self.promised.pop(owner) * STEP
        self.heed()

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.sampled_from(self.live())))

    @rule(
        entries=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8),
        need=st.integers(1, 10),
        behind=st.integers(0, 3),
    )
    def turn(self, entries: list[tuple[bool, int]], need: int, behind: int) -> None:
        """Parts pass through, a few at a time: by chance alone the ring would seldom meet its end."""
        if not self.pressed:
            self.reserve(need, 0)
        for mine, size in entries:
            owner = next((owner for owner, left in self.promised.items() if left), None)
            if mine and owner is not None:
                self.allocate_for(owner, size)
            elif not self.pressed:
                self.take(size)
            self.agrees()
            if len(self.live()) > behind:
                self.give_back(self.live()[0])
            self.agrees()

    def give_back(self, position: int) -> None:
        self.back.add(position)
        before = self.span()
        while self.ranges and (self.ranges[0][2] or self.ranges[0][0] * STEP in self.back):
            self.ranges.pop(0)
        if not self.ranges:
            self.head = -(-self.head // self.steps) * self.steps
        self.heed()
        assert self.ring.release(position) == (before - self.span()) * STEP

    @rule()
    def misuse_raises_and_changes_nothing(self) -> None:
        ring = self.ring
        before = ring.fingerprint(), counters(ring)
        for owner, left in self.promised.items():
            with pytest.raises(PoolError):
                ring.reserve(owner, STEP)
            with pytest.raises(PoolError):
                ring.allocate(owner, left * STEP + 1)
        for act in (ring.unreserve, ring.release):
            with pytest.raises(PoolError):
                act(-1)
        with pytest.raises(PoolError):
            ring.reserve(-1, self.steps * STEP + 1)
        with pytest.raises(PoolError):
            ring.take(self.greatest * STEP + 1)
        for position in set(range(ring.low - STEP, ring.head + STEP)).union(self.back).difference(self.live()):
            with pytest.raises(PoolError):
                ring.release(position)
        assert (ring.fingerprint(), counters(ring)) == before

    @rule()
    def go_on_with_a_fork(self) -> None:
        self.ring = self.ring.fork()

    @rule(data=st.data())
    def whatever_is_promised_can_be_placed_and_all_given_back(self, data: st.DataObject) -> None:
        ring, left = self.ring.fork(), dict(self.promised)
        before = self.ring.fingerprint()
        positions = self.live()
        while any(left.values()):
            owner = data.draw(st.sampled_from(sorted(owner for owner, steps in left.items() if steps)))
            size = data.draw(st.integers(1, min(left[owner], self.greatest)))
            left[owner] -= size
            positions.append(ring.allocate(owner, size * STEP))
        assert self.ring.fingerprint() == before, "a fork is its own"
        for position in data.draw(st.permutations(positions)):
            ring.release(position)
        for owner in left:
            ring.unreserve(owner)
        fresh = plain(self.steps, self.greatest, self.high, self.low)
        assert ring.fingerprint()[1:] == fresh.fingerprint()[1:]
        assert counters(ring) == counters(fresh)
        assert ring.low == ring.head
        assert ring.offset(ring.head) == 0, "as fresh, some laps later"

    @invariant()
    def agrees(self) -> None:
        ring = self.ring
        live = [(at, size) for at, size, skipped in self.ranges if not skipped and at * STEP not in self.back]
        held = sum(size for _, size in live)
        skipped = sum(size for _, size, skipped in self.ranges if skipped)
        promised = sum(self.promised.values())
        free = self.steps - self.span() - promised
        model = (held, self.span() - held - skipped, skipped, promised, free)
        assert counters(ring) == tuple(steps * STEP for steps in model)
        assert sum(counters(ring)) == ring.capacity_bytes
        assert min(counters(ring)) >= 0
        assert ring.pressed is self.pressed
        if self.pressed:
            assert ring.take(STEP) is None
            assert not ring.reserve(-1, STEP)
        offsets = sorted((ring.offset(at * STEP), size * STEP) for at, size in live)
        assert all(at + size <= ring.capacity_bytes for at, size in offsets), "a part is contiguous"
        assert all(at + size <= other for (at, size), (other, _) in pairwise(offsets)), "no two overlap"


TestRing = RingAgainstModel.TestCase


@pytest.mark.parametrize("steps", [5, 8, 10])
def test_a_ring_that_has_turned_many_times_agrees(steps: int) -> None:
    """The same model, on a walk long enough to meet the end of the ring in every state."""
    generator = random.Random(steps)
    machine = RingAgainstModel()
    machine.build(steps, 3, steps if steps < 10 else 8, 5)
    for _ in range(200):
        entries = [(generator.random() < 0.5, generator.randint(1, 3)) for _ in range(4)]
        machine.turn(entries, generator.randint(1, steps), generator.randrange(3))
        for owner in sorted(machine.promised):
            if generator.random() < 0.4:
                machine.end(owner)
        if generator.random() < 0.5:
            machine.go_on_with_a_fork()
        if machine.live() and generator.random() < 0.5:
            machine.give_back(generator.choice(machine.live()))
        machine.agrees()


def test_without_reservations_requests_that_are_half_there_fill_the_ring_for_ever() -> None:
    """Two requests of two layers each in #18332's ring, each with its first."""
    ring = plain(4)
    assert (ring.take(8), ring.take(8)) == (0, 8)
    assert ring.take(8) is None, "and neither request is complete, so neither gives anything back"


def test_with_reservations_whoever_begins_can_end() -> None:
    ring = plain(4)
    assert ring.reserve("a", 16)
    assert not ring.reserve("b", 16)
    layers = [ring.allocate("a", 8), ring.allocate("a", 8)]
    assert ring.unreserve("a") == 0
    assert [ring.release(layer) for layer in layers] == [8, 8]
    assert ring.reserve("b", 16)


def test_no_reserved_request_waits_behind_one_without() -> None:
    ring = plain(8)
    assert ring.reserve("a", 16)
    while ring.take(4) is not None:
        pass
    assert ring.free_bytes == 0
    assert [ring.allocate("a", 8) for _ in range(2)] == [16, 24]


def test_the_end_is_skipped_and_the_tail_comes_back_with_the_lap() -> None:
    ring = plain(5, greatest=3)
    first, second = ring.take(12), ring.take(4)
    assert (first, second) == (0, 12)
    assert ring.release(0) == 12
    third = ring.take(8)
    assert third == 20
    assert ring.offset(third) == 0
    assert counters(ring) == (12, 0, 4, 0, 4)
    assert ring.release(third) == 0, "an older part is there"
    assert counters(ring) == (4, 8, 4, 0, 4)
    assert ring.release(12) == 16
    assert counters(ring) == (0, 0, 0, 0, 20)
    with pytest.raises(PoolError, match="no part at 12"):
        ring.release(12)


def test_what_may_be_skipped_is_kept_free_for_those_that_were_promised_more_than_lies_before_the_end() -> None:
    ring = plain(10, greatest=4)
    assert [ring.take(16), ring.take(8), ring.take(4)] == [0, 16, 24]
    assert ring.release(0) == 16
    # Three steps before the end and four after it: all seven, if no part of four could meet the end.
    assert not ring.reserve("a", 28)
    assert ring.reserve("a", 16)
    assert ring.allocate("a", 16) == 40
    assert counters(ring) == (28, 0, 12, 0, 0)


def test_a_release_behind_an_older_allocation_distinguishes_two_states() -> None:
    ring = plain(4)
    assert ring.take(4) == 0
    other = ring.fork()
    position = other.take(4)
    assert position is not None
    other.release(position)
    assert ring.fingerprint() != other.fingerprint()


def test_back_pressure_goes_on_and_off_exactly_at_the_marks() -> None:
    ring = plain(10, high=6, low=2)
    positions = [ring.take(STEP) for _ in range(5)]
    assert not ring.pressed
    positions.append(ring.take(STEP))
    assert ring.pressed
    assert ring.take(STEP) is None
    assert not ring.reserve("a", STEP)
    pressed = []
    for position in positions:
        assert position is not None
        ring.release(position)
        pressed.append(ring.pressed)
    assert pressed == [True, True, True, False, False, False]


def test_a_promise_counts_at_the_marks_and_those_that_have_one_go_on() -> None:
    ring = plain(10, high=6, low=2)
    assert ring.reserve("a", 6 * STEP)
    assert ring.pressed
    assert not ring.reserve("b", STEP)
    for _ in range(3):
        ring.allocate("a", STEP)
    assert ring.unreserve("a") == 3 * STEP
    assert ring.pressed
    ring.release(0)
    assert not ring.pressed


def test_one_as_large_as_the_ring_need_only_wait_until_it_is_empty() -> None:
    ring = plain(5, greatest=2)
    assert ring.take(8) == 0
    assert not ring.reserve("a", 20)
    ring.release(0)
    assert ring.reserve("a", 20)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ring: plain(0), "one or more steps"),
        (lambda ring: plain(4, greatest=5), "whole steps within"),
        (lambda ring: plain(4, high=3, low=3), "must rise"),
        (lambda ring: plain(4, high=5), "must rise"),
        (lambda ring: ring.take(0), "must be 1 to 8"),
        (lambda ring: ring.take(9), "must be 1 to 8"),
        (lambda ring: ring.reserve("a", 4), "has a reservation already"),
        (lambda ring: ring.reserve("b", 0), "0 bytes for 'b'"),
        (lambda ring: ring.reserve("b", 17), "of a ring of 16"),
        (lambda ring: ring.allocate("a", 5), "'a' has 4 reserved"),
        (lambda ring: ring.allocate("b", 4), "'b' has 0 reserved"),
        (lambda ring: ring.unreserve("b"), "no reservation"),
        (lambda ring: ring.release(0), "no part at 0"),
    ],
)
def test_misuse_is_named(act: Callable[[Ring], object], message: str) -> None:
    ring = plain(4, greatest=2)
    assert ring.reserve("a", 4)
    before = ring.fingerprint()
    with pytest.raises(PoolError, match=message):
        act(ring)
    assert ring.fingerprint() == before


def test_no_operation_costs_more_among_many_allocations() -> None:
    def costs(count: int) -> list[int]:
        ring = plain(2 * count)
        for owner in range(count // 2):
            ring.reserve(owner, STEP)
        positions = [ring.allocate(owner, STEP) for owner in range(count // 2)]
        acts: list[Callable[[], object]] = [
            lambda: ring.reserve("a", STEP),
            lambda: ring.allocate("a", STEP),
            lambda: ring.take(STEP),
            lambda: ring.unreserve("a"),
            lambda: ring.release(positions[-1]),
        ]
        spent = [lines(act) for act in acts]
        for position in positions[1:-1]:
            ring.release(position)
        return [*spent, lines(lambda: ring.release(positions[0]))]

    assert costs(10) == costs(4000)

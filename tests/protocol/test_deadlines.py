"""The heap of timers: what is due comes once, in its order, and what its cell has moved or forgotten does not."""

from __future__ import annotations

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Instant

TIMERS = [Timer(TimerKind.LEASE, f"x{i}") for i in range(3)]


def heap_of(deadlines: dict[Timer, Instant]) -> Deadlines:
    heap = Deadlines()
    for timer, at in deadlines.items():
        heap.push(at, timer)
    return heap


def test_the_only_timer_comes_when_it_is_due() -> None:
    deadlines: dict[Timer, Instant] = {TIMERS[0]: 5}
    heap = heap_of(deadlines)
    assert heap.first_due(4, deadlines.get) is None
    assert heap.first_due(5, deadlines.get) == TIMERS[0]
    assert heap.first_due(5, deadlines.get) is None


def test_timers_come_in_the_order_of_their_deadlines() -> None:
    deadlines: dict[Timer, Instant] = {TIMERS[0]: 7, TIMERS[1]: 3, TIMERS[2]: 9}
    heap = heap_of(deadlines)
    assert [heap.first_due(8, deadlines.get) for _ in range(3)] == [TIMERS[1], TIMERS[0], None]
    assert heap.wake_at() == 9


def test_a_timer_that_was_moved_comes_at_its_new_deadline() -> None:
    deadlines: dict[Timer, Instant] = {TIMERS[0]: 3}
    heap = heap_of(deadlines)
    deadlines[TIMERS[0]] = 6
    assert heap.first_due(3, deadlines.get) is None
    assert heap.wake_at() == 6
    assert heap.first_due(6, deadlines.get) == TIMERS[0]


def test_a_timer_whose_cell_is_gone_never_comes() -> None:
    deadlines: dict[Timer, Instant] = {TIMERS[0]: 3, TIMERS[1]: 4}
    heap = heap_of(deadlines)
    deadlines.clear()
    assert heap.first_due(3, deadlines.get) is None
    assert heap.wake_at() is None

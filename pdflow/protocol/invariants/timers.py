"""A check that an endpoint's driver wakes it in time (S10): every armed timer stands in the heap of deadlines.

A driver has only the heap, whose entries may be too early, never too late (`pdflow/protocol/deadlines.py`). An entry is
removed when its timer fires, so a timer that fires and moves on must be pushed again; so must one that moves nearer.

Off the hot path: drivers never call this.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Instant

STANDS_FOR = {TimerKind.EXPECT: TimerKind.REGISTRATION}
"""Kinds without entries of their own, each with the kind whose deadline is never later: P's rank has one entry for both
deadlines of a registration that waits for its prompt."""


def entry_of(timer: Timer) -> Timer:
    """Return the timer whose entry in the heap wakes the endpoint for this one."""
    kind = STANDS_FOR.get(timer.kind)
    return timer if kind is None else Timer(kind, timer.key)


def unscheduled(endpoint: object) -> str:
    """Return, in words, which armed timer of an endpoint its driver would miss; "" if none."""
    if not isinstance(endpoint, (ProducerRank, ConsumerScheduler)):
        return ""
    armed = endpoint.armed()
    if not armed:
        return ""
    entries: dict[Timer, Instant] = {}
    for at, _, timer in sorted(endpoint.deadlines.heap, key=_instant, reverse=True):
        entries[timer] = at
    wake_at = endpoint.wake_at()
    for timer in armed:
        due = endpoint.deadline(timer)
        if due is None:
            return f"{timer.kind.name} of {timer.key} is armed, but has no deadline"
        entry = entries.get(entry_of(timer))
        if entry is None:
            return f"{timer.kind.name} of {timer.key} is armed, but schedules no wake-up"
        if entry > due or wake_at is None or wake_at > due:
            return f"{timer.kind.name} of {timer.key} is due at {due}, but its wake-up is later"
    return ""


def _instant(entry: tuple[Instant, int, Timer]) -> Instant:
    return entry[0]


def assume_scheduled(fork: object, original: object, armed: Iterable[Timer], fired: Timer | None = None) -> None:
    """Add to the heap of a fork, which begins empty, as little as S10 leaves its original: for each timer that is armed
    there an entry at its deadline, but for the entry that was removed as `fired` fired."""
    if not isinstance(fork, (ProducerRank, ConsumerScheduler)) or not isinstance(original, type(fork)):
        return
    removed = None if fired is None else entry_of(fired)
    heap = fork.deadlines.heap
    for number, timer in enumerate(armed):
        entry, due = entry_of(timer), original.deadline(timer)
        if due is not None and entry != removed:
            heap.append((due, -1 - number, entry))
    heapify(heap)

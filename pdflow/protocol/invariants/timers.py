"""Checks of an endpoint's timers: its driver wakes it in time (S10), and what it repeats, it repeats soon enough (L12).

A driver has only the heap, whose entries may be too early, never too late (`pdflow/protocol/deadlines.py`). An entry is
removed when its timer fires, so a timer that fires and moves on must be pushed again; so must one that moves nearer.

A SYNC (in vllm-compat, a heartbeat), a CANCEL and a handshake are repeated after a period that has a limit, so that one
peer's outage delays a request by no more than that after it has ended. An answer ends a back-off.

Off the hot path: drivers never call this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify

from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import NEVER, Instant

STANDS_FOR = {TimerKind.EXPECT: TimerKind.REGISTRATION}
"""Kinds without entries of their own, each with the kind whose deadline is never later: P's rank has one entry for both
deadlines of a registration that waits for its prompt."""


def entry_of(timer: Timer) -> Timer:
    """Return the timer whose entry in the heap wakes the endpoint for this one."""
    kind = STANDS_FOR.get(timer.kind)
    return timer if kind is None else Timer(kind, timer.key)


def unscheduled(endpoint: object, armed: Sequence[Timer] | None = None) -> str:
    """Return, in words, which armed timer of an endpoint its driver would miss; "" if none. `armed`: the armed timers,
    where they are known."""
    if not isinstance(endpoint, (ProducerRank, ConsumerScheduler)):
        return ""
    armed = endpoint.armed() if armed is None else armed
    if not armed:
        return ""
    entries: dict[Timer, Instant] = {}
    for at, _, timer in endpoint.deadlines.heap:
        before = entries.get(timer)
        if before is None or at < before:
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


def too_early(before: object, after: object, armed: Iterable[Timer], now: Instant) -> str:
    """Return, in words, which of the armed timers an event has armed, or moved, to a time that has passed (L12); "" if
    none: it would fire at once, whatever it waits for."""
    if not isinstance(after, (ProducerRank, ConsumerScheduler)) or not isinstance(before, type(after)):
        return ""
    for timer in armed:
        due = after.deadline(timer)
        if due is not None and due < now and due != before.deadline(timer):
            return f"{timer.kind.name} of {timer.key} is armed for a time that has passed, {now - due} ago"
    return ""


def too_late(endpoint: object, now: Instant) -> str:
    """Return, in words, what an endpoint repeats later than its largest period allows, or has not reset (L12); "" if
    nothing."""
    if isinstance(endpoint, ConsumerScheduler):
        return next(_late_repetitions(endpoint, now), "")
    if isinstance(endpoint, (ConsumerRank, ProducerRank)):
        timers = endpoint.timers if isinstance(endpoint, ConsumerRank) else endpoint.store.context.timers
        return next(_late_handshakes(endpoint.peers, timers, now), "")
    return ""


def _late_repetitions(scheduler: ConsumerScheduler, now: Instant) -> Iterator[str]:
    context = scheduler.store.context
    timers = context.timers
    period = timers.sync_ns if context.dialect.control_frames else timers.heartbeat_ns
    for engine, peer in scheduler.store.peers.items():
        if peer.sync_at is not None and peer.sync_at > now + period:
            yield f"the next SYNC to {engine} is due in {peer.sync_at - now}, later than {period}"
    for request_id, cell in scheduler.cells.items():
        if now + timers.cancel_last_ns < cell.cancel_at < NEVER:
            due = cell.cancel_at - now
            yield f"the next CANCEL of {request_id} is due in {due}, later than {timers.cancel_last_ns}"


def _late_handshakes(peers: Peers, timers: Timers, now: Instant) -> Iterator[str]:
    for peer, at in peers.retry_at.items():
        if at > now + timers.backoff_last_ns:
            yield f"{peer} is tried again in {at - now}, later than {timers.backoff_last_ns}"
    remembered = peers.connected & (peers.failures.keys() | peers.retry_at.keys())
    if remembered:
        yield f"{sorted(remembered)} have answered, but failed handshakes with them still count"


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

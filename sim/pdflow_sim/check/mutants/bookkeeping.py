"""Mutants of an endpoint's bookkeeping: wake-ups that are scheduled again, counts, and what is forgotten in the end.

No request and no block notices any of them in a scope of one or two requests: the checker fires a timer whether or not
it is in the heap, a count limits nothing before memory is full, and an entry that stays is in nobody's way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heapify

from pdflow.methods.lanes import Lanes
from pdflow.methods.staging import Staging
from pdflow.protocol.consumer.cell import HELD, QUARANTINED, CancelDue, ConsumerCell, ConsumerContext, Stepped
from pdflow.protocol.consumer.cells import ConsumerCells, PrefillPeer
from pdflow.protocol.consumer.rules import cancel_due
from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.effects import Effects
from pdflow.protocol.events import FlushEnded
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import NEVER, Address, Allocation, Instant, Xid
from pdflow.serving.decode import DecodeCore
from pdflow.serving.events import EngineDropped
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope


def _unpush(deadlines: Deadlines, timer: Timer) -> None:
    """Remove the entries of a timer from the heap."""
    deadlines.heap[:] = [entry for entry in deadlines.heap if entry[2] != timer]
    heapify(deadlines.heap)


# Wake-ups.


def _cancel_not_scheduled_again(
    self: ConsumerCells, before: ConsumerCell, after: ConsumerCell, now: Instant
) -> Effects:
    effects = _put(self, before, after, now)
    if before.cancel_at != NEVER:
        _unpush(self.deadlines, Timer(TimerKind.CANCEL, after.request_id))
    return effects


def _sync_not_scheduled_again(self: ConsumerCells, peer: PrefillPeer, at: Instant) -> None:
    known = peer.sync_at is not None
    _sync_again(self, peer, at)
    if known:
        _unpush(self.deadlines, Timer(TimerKind.SYNC, peer.info.engine))


def _registration_not_scheduled_again(self: ProducerRank, timer: Timer, now: Instant) -> Effects:
    effects = _fire(self, timer, now)
    _unpush(self.deadlines, Timer(TimerKind.REGISTRATION, timer.key))
    return effects


def _last_wake_up(self: Deadlines) -> Instant | None:
    return max(self.heap)[0] if self.heap else None


_put = ConsumerCells.put
_sync_again = ConsumerCells.sync_again
_fire = ProducerRank._fire

# Periods and queues.


def _back_off_unlimited(self: Peers, peer: Address, now: Instant, timers: Timers) -> None:
    failures = self.failures.get(peer, 0)
    _unreached(self, peer, now, timers)
    self.retry_at[peer] = now + (timers.backoff_first_ns << failures)


def _back_off_kept(self: Peers, peer: Address, incarnation: int) -> int | None:
    failures = self.failures.get(peer, 0)
    before = _answered(self, peer, incarnation)
    if failures:
        self.failures[peer] = failures
    return before


def _cancels_ever_later(cell: ConsumerCell, event: CancelDue, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = cancel_due(cell, event, now, ctx)
    wait = cell.cancel_wait * 2
    return after.with_cancel(now + wait, wait), effects


def _last_held_first(self: ConsumerCells, peer: PrefillPeer, now: Instant) -> Effects:
    peer.held.reverse()
    effects = _make_room(self, peer, now)
    peer.held.reverse()
    return effects


def _last_staged_first(self: Staging) -> tuple[str, Allocation] | None:
    if self.waiting:
        self.waiting.move_to_end(next(reversed(self.waiting)), last=False)
    return _admit_next(self)


_unreached = Peers.unreached
_answered = Peers.answered
_make_room = ConsumerCells.make_room
_admit_next = Staging.admit_next

# Counts.


def _quarantine_count_kept(self: ConsumerCells, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
    if before.phase is QUARANTINED:
        self.quarantined_blocks += len(before.allocation.blocks)
    return _remove(self, before, after, now)


def _share_kept(self: ConsumerCells, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
    if before.phase is not HELD:
        self.peers[after.params.prefill.engine].blocks += after.num_blocks
    return _remove(self, before, after, now)


def _no_room_made(self: ConsumerCells, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
    peer = self.peers[after.params.prefill.engine]
    held, peer.held = peer.held, deque()
    effects = _remove(self, before, after, now)
    peer.held = held
    return effects


_remove = ConsumerCells._remove

# What is left.


def _flushes_kept(self: ProducerRank, event: FlushEnded, now: Instant) -> Effects:
    waiting = self.store.flushes.get(event.peer)
    effects = _flushed(self, event, now)
    if waiting:
        self.store.flushes[event.peer] = waiting
    return effects


def _pieces_kept(self: Lanes[Hashable], xid: Xid) -> None:
    self._of_prompt.pop(xid, None)


def _drops_kept(self: DecodeCore, event: EngineDropped) -> None:
    dropping = self.requests.dropping
    protocol_frees = dropping[event.handle]
    _dropped(self, event)
    dropping[event.handle] = protocol_frees


_flushed = ProducerRank._flushed
_dropped = DecodeCore._dropped

BOOKKEEPING: tuple[Mutant, ...] = (
    Mutant(
        name="cancel-not-scheduled-again",
        drops="D schedules the next CANCEL when one was repeated. Without it, a driver repeats a CANCEL once.",
        source="spec 5; S10",
        patches=(Swap(_put, _cancel_not_scheduled_again),),
        scope=Scope(drop=1, deadline=0, stall=0),
        breaks="S10",
    ),
    Mutant(
        name="sync-not-scheduled-again",
        drops="D schedules the next SYNC when it has sent one. Without it, a driver sends one SYNC to each engine.",
        source="spec 2.8; spec 5; S10",
        patches=(Swap(_sync_again, _sync_not_scheduled_again),),
        scope=Scope(sync=1, abort=0, deadline=0, stall=0),
        breaks="S10",
    ),
    Mutant(
        name="registration-not-scheduled-again",
        drops="P schedules the end of a registration when it has asked whether its prompt exists. Without it, a driver "
        "never ends a registration that D has forgotten.",
        source="spec 2.2; spec 5; S10",
        patches=(Swap(_fire, _registration_not_scheduled_again),),
        scope=Scope(abort=0, deadline=0, stall=0),
        breaks="S10",
    ),
    Mutant(
        name="last-deadline-first",
        drops="An endpoint asks to be woken at the first of its deadlines. Without it, all "
        "timers but the last are late.",
        source="spec 5; S10",
        patches=(Swap(Deadlines.wake_at, _last_wake_up),),
        scope=Scope(abort=0, deadline=0, stall=0),
        breaks="S10",
    ),
    Mutant(
        name="back-off-without-limit",
        drops="The pause after failed handshakes has a limit. Without it, a peer that was away for long is not tried "
        "again for as long.",
        source="spec 2.10; C9; L12",
        patches=(Swap(_unreached, _back_off_unlimited),),
        scope=Scope(pulls=True, unreachable=3, horizon=3, abort=0),
        breaks="L12",
    ),
    Mutant(
        name="back-off-never-reset",
        drops="A handshake that succeeds ends the back-off of its peer. Without it, the next failure counts as one of "
        "a long row.",
        source="spec 2.10; C9; L12",
        patches=(Swap(_answered, _back_off_kept),),
        scope=Scope(unreachable=1, sync=1, deadline=0, stall=0),
        breaks="L12",
    ),
    Mutant(
        name="cancels-ever-later",
        drops="The pause between two CANCELs has a limit. Without it, blocks stay in quarantine long after an outage.",
        source="spec 2.9; L3; L12",
        patches=(Swap(cancel_due, _cancels_ever_later),),
        scope=Scope(cancel=4, deadline=0, stall=0),
        breaks="L12",
    ),
    Mutant(
        name="last-held-first",
        drops="Requests that an engine's limit holds back are admitted in their order. Without it, new requests "
        "overtake the first one for as long as they come.",
        source="spec 2.13; L11",
        patches=(Swap(_make_room, _last_held_first),),
        scope=Scope(requests=3, pool_blocks=2, concurrent=False, abort=0, clocks=False),
        breaks="L11",
    ),
    Mutant(
        name="last-staged-first",
        drops="Prompts get staging memory in the order in which they asked for it. Without it, a prompt is "
        "overtaken for as long as others come.",
        source="pdflow/methods/staging.py; L11",
        patches=(Swap(_admit_next, _last_staged_first),),
        scope=Scope(method="cpu-staged", requests=2, pool=1, concurrent=False, abort=0, clocks=False),
        breaks="L11",
    ),
    Mutant(
        name="quarantine-count-kept",
        drops="D takes blocks that leave quarantine out of its count. Without it, every suspect engine is soon given "
        "no new request.",
        source="spec 2.13; S11",
        patches=(Swap(_remove, _quarantine_count_kept),),
        scope=Scope(deadline=0, stall=0),
        breaks="S11",
    ),
    Mutant(
        name="share-kept",
        drops="D takes the blocks of a request that is over out of its engine's share. Without it, the engine is soon "
        "given no new request.",
        source="spec 2.13; S11",
        patches=(Swap(_remove, _share_kept),),
        scope=Scope(abort=0, deadline=0, stall=0),
        breaks="S11",
    ),
    Mutant(
        name="room-made-by-syncs-only",
        drops="D admits a held request when its engine falls below its limit. Without it, the request waits for the "
        "next SYNC.",
        source="spec 2.13; S11",
        patches=(Swap(_remove, _no_room_made),),
        scope=Scope(p_engines=2, requests=3, pool_blocks=8, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="S11",
    ),
    Mutant(
        name="flushes-kept",
        drops="P forgets a flush that has ended. Without it, its list of flushes grows without a bound, and later ends "
        "are taken for those of earlier registrations.",
        source="spec 2.5; L8",
        patches=(Swap(_flushed, _flushes_kept),),
        scope=Scope(done_is_remote=False, abort=0, deadline=0, stall=0),
        breaks="L8",
    ),
    Mutant(
        name="pieces-kept-when-withdrawn",
        drops="A rank forgets the pieces of a prompt that is withdrawn. Without it, its memory grows with "
        "every prompt.",
        source="spec 2.11; L8",
        patches=(Swap(Lanes.withdraw, _pieces_kept),),
        scope=Scope(method="p2p-nccl-put", abort=0, deadline=0, stall=0),
        breaks="L8",
    ),
    Mutant(
        name="drops-kept",
        drops="D's core forgets a request that its engine has dropped. Without it, the request's name stays taken.",
        source="pdflow/serving/decode.py; L8",
        patches=(Swap(_dropped, _drops_kept),),
        scope=Scope(deadline=0, stall=0),
        breaks="L8",
    ),
)

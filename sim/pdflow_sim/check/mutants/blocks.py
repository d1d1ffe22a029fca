"""Mutants of the release of D's blocks after their request: cancels, quarantine, fences, and how each writer ends."""

from __future__ import annotations

import msgspec

from pdflow.protocol.consumer.cell import (
    QUARANTINED,
    WAITING,
    ConsumerCell,
    ConsumerContext,
    PrefillRestarted,
    RequestFailed,
    Stepped,
    everything,
)
from pdflow.protocol.consumer.cells import ConsumerCells, PrefillPeer
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.rules import (
    RULES,
    fenced,
    freed,
    pair_failed,
    prefill_restarted,
    reclaim_at,
    resolve,
    settle,
)
from pdflow.protocol.effects import NOTHING, Effects, Outcome, Resolve, SendLocal
from pdflow.protocol.events import (
    DecodeAborted,
    FenceEnded,
    FenceOrdered,
    PairFailed,
    PairLanded,
    PeerExited,
    PeerFenced,
)
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.cell import CancelReceived, ProducerCell, ProducerContext
from pdflow.protocol.producer.cell import Stepped as ProducerStepped
from pdflow.protocol.producer.writes import cancelled, cancelled_in_flight, end_registration
from pdflow.protocol.values import NEVER, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap, TableRow
from pdflow_sim.check.scopes.scope import Scope

# The request's end taken for its blocks'.


def _request_failed_and_freed(cell: ConsumerCell, event: RequestFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = freed(cell, ctx)
    return after, (Resolve(cell.request_id, Outcome.FAILED, event.code), *effects)


def _aborted_and_freed(cell: ConsumerCell, event: DecodeAborted, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = freed(cell, ctx)
    return after, (Resolve(cell.request_id, Outcome.CANCELLED, event.code), *effects)


def _failed_and_freed(cell: ConsumerCell, event: PairFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    return pair_failed(cell.with_settled(everything(cell)), event, now, ctx)


def _resolved_twice(cell: ConsumerCell, event: RequestFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    once = cell.with_progress(cell.best, NEVER)
    if event.code is Code.DEADLINE:
        once = msgspec.structs.replace(cell, deadline_until=NEVER)
    return once, (Resolve(cell.request_id, Outcome.FAILED, event.code),)


def _first_answer_frees(
    cell: ConsumerCell, event: PairLanded | PairFailed, now: Instant, ctx: ConsumerContext
) -> Stepped:
    after, effects = settle(cell, event, now, ctx)
    return (after, effects) if after is cell or effects else freed(after, ctx)


def _unflushed_settles(
    cell: ConsumerCell, event: PairLanded | PairFailed, now: Instant, ctx: ConsumerContext
) -> Stepped:
    if isinstance(event, PairFailed):
        event = PairFailed(event.op, event.sender, event.code, True)
    return settle(cell, event, now, ctx)


def _freed_in_time(cell: ConsumerCell, outcome: Outcome, code: Code, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = resolve(cell, outcome, code, now, ctx)
    if after.phase is QUARANTINED:
        after = msgspec.structs.replace(after, reclaim_until=reclaim_at(now, ctx))
    return after, effects


# P's answers to a CANCEL.


def _answered_in_flight(
    cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext
) -> ProducerStepped:
    return cell, end_registration(cell.with_asker(event.asker), Code.CANCELLED, True, now, ctx)[1]


def _answered_and_written(
    cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext
) -> ProducerStepped:
    return cell, end_registration(cell.with_asker(event.asker), Code.CANCELLED, True, now, ctx)[1]


def _unanswered(cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext) -> ProducerStepped:
    return cell, NOTHING


def _one_asker(cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext) -> ProducerStepped:
    return msgspec.structs.replace(cell, cancel_waiters=(event.asker,)), NOTHING


# Fences.


def _ordered_is_done(self: ConsumerRank, event: FenceOrdered, now: Instant) -> Effects:
    return (
        *_fence_ordered(self, event, now),
        SendLocal(self.scheduler, PeerFenced(event.peer, self.rank, self.newest)),
    )


def _one_fence_for_all(cell: ConsumerCell, event: PeerFenced, now: Instant, ctx: ConsumerContext) -> Stepped:
    peers = [i for i, (p_rank, _) in enumerate(cell.pairs) if event.peer.endswith(f".r{p_rank}")]
    if not peers:
        return cell, NOTHING
    return fenced(cell.with_settled(everything(cell) & ~(1 << peers[0])), event, now, ctx)


def _waiting_frames_kept(self: ConsumerRank, event: PeerExited | FenceEnded, now: Instant) -> Effects:
    waiting = self.pending.pop(event.peer, ())
    effects = _peer_quiet(self, event, now)
    if waiting:
        self.pending[event.peer] = waiting
        effects += self._connect(event.peer)
    return effects


def _unfenced(cell: ConsumerCell, event: PrefillRestarted, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = prefill_restarted(cell, event, now, ctx)
    return after, tuple([e for e in effects if not (isinstance(e, SendLocal) and isinstance(e.event, FenceOrdered))])


_fence_ordered = ConsumerRank._fence_ordered
_peer_quiet = ConsumerRank._peer_quiet


def _room_for_all(self: ConsumerCells, peer: PrefillPeer, num_blocks: int, now: Instant) -> bool:
    return True


BLOCKS: tuple[Mutant, ...] = (
    Mutant(
        name="deadline-frees",
        drops="A deadline resolves the request and does not free its blocks. Without it, a WRITE lands in blocks "
        "that belong to another request.",
        source="M3; spec 2.4; C6; H6",
        patches=(TableRow(RULES, (WAITING, RequestFailed), _request_failed_and_freed),),
        breaks="S1",
    ),
    Mutant(
        name="abort-frees",
        drops="An abort resolves the request and does not free its blocks. Without it, a WRITE lands in blocks "
        "that belong to another request.",
        source="spec 2.4; R10",
        patches=(TableRow(RULES, (WAITING, DecodeAborted), _aborted_and_freed),),
        breaks="S1",
    ),
    Mutant(
        name="first-failure-frees",
        drops="The failure of one shard says nothing of the others. Without it, WRITEs of the other shards land "
        "in freed blocks.",
        source="spec 2.4; R16; R20",
        patches=(Swap(pair_failed, _failed_and_freed),),
        scope=Scope(p_tp=2, err=1, abort=0, deadline=0, stall=0),
        breaks="S1",
    ),
    Mutant(
        name="first-answer-frees",
        drops="Quarantine ends when every writer is known to have ended. Without it, the second writer writes "
        "into freed blocks.",
        source="spec 2.4",
        patches=(Swap(settle, _first_answer_frees),),
        scope=Scope(p_tp=2, deadline=0, stall=0),
        breaks="S1",
    ),
    Mutant(
        name="time-frees",
        drops="In strict, no timer frees a block, because P may pause for any length of time. Without it, a "
        "WRITE lands in freed blocks.",
        source="spec 2.4; H6; F1",
        patches=(Swap(resolve, _freed_in_time),),
        breaks="S1",
    ),
    Mutant(
        name="resolved-at-every-deadline",
        drops="D resolves a request once. Without it, a second timer reports a second outcome.",
        source="S6; R49",
        patches=(TableRow(RULES, (WAITING, RequestFailed), _resolved_twice),),
        scope=Scope(deadline=1, stall=1),
        breaks="S6",
    ),
    Mutant(
        name="unflushed-settles",
        drops="Only an answer with `flushed` ends a writer.",
        source="spec 2.5",
        patches=(Swap(settle, _unflushed_settles),),
        scope=Scope(err=1, drop=1, sync=1),
        survives="pdflow's P never answers before it has flushed or fenced. Another implementation of P might.",
    ),
    Mutant(
        name="cancel-answered-under-a-write",
        drops="P answers a CANCEL that arrives during a WRITE when the WRITE has ended. Without it, D frees "
        "blocks that the WRITE still reaches.",
        source="spec 2.9; R10; R18",
        patches=(Swap(cancelled_in_flight, _answered_in_flight),),
        breaks="S1",
    ),
    Mutant(
        name="cancel-answered-and-written",
        drops="NOT_STARTED means that no WRITE will start. Without it, P answers NOT_STARTED and then posts the WRITE.",
        source="spec 2.9; F2",
        patches=(Swap(cancelled, _answered_and_written),),
        breaks="S1",
    ),
    Mutant(
        name="cancel-waiter-forgotten",
        drops="P remembers a rank that has sent a CANCEL during a WRITE.",
        source="spec 2.9; R18",
        patches=(Swap(cancelled_in_flight, _unanswered),),
        scope=Scope(err=1, drop=1, cancel=1),
        survives="A rank that gets no answer still receives DONE or FAIL, and repeats its CANCEL if that is lost.",
    ),
    Mutant(
        name="one-slot-for-cancel-waiters",
        drops="P remembers every rank that has sent a CANCEL during a WRITE.",
        source="spec 2.9; R18",
        patches=(Swap(cancelled_in_flight, _one_asker),),
        scope=Scope(d_tp=2, err=1, clocks=False),
        survives="As for cancel-waiter-forgotten: P sends DONE or FAIL to every rank that it wrote to.",
    ),
    Mutant(
        name="fence-counts-when-ordered",
        drops="D's fence counts when it has ended. Without it, D frees blocks in which bytes from P's former "
        "incarnation still land.",
        source="spec 2.6; F4",
        patches=(Swap(_fence_ordered, _ordered_is_done),),
        scope=Scope(p_restart=1, sync=1),
        breaks="S1",
    ),
    Mutant(
        name="one-fence-for-all",
        drops="A fence stops one P rank. Without it, a fence against one rank frees blocks that another rank "
        "still writes.",
        source="spec 2.6",
        patches=(Swap(fenced, _one_fence_for_all),),
        scope=Scope(p_tp=2, p_restart=1, abort=0, deadline=0, stall=0),
        breaks="S1",
    ),
    Mutant(
        name="no-fence-against-orphans",
        drops="D fences the former incarnation of a P that has restarted. Without it, D's blocks stay in "
        "quarantine forever.",
        source="spec 2.6; L3; R15; R44",
        patches=(Swap(prefill_restarted, _unfenced),),
        scope=Scope(p_restart=1, sync=1),
        breaks="L",
    ),
    Mutant(
        name="queued-reg-outlives-its-fence",
        drops="A fence removes a REG that waits for a connection, because the fence settles the blocks that the "
        "REG names.",
        source="spec 2.6; S1",
        patches=(Swap(_peer_quiet, _waiting_frames_kept),),
        scope=Scope(requests=2, p_restart=1, abort=0, deadline=0, stall=0),
        survives="It needs a P that is silent for a time and alive. tests/protocol/test_fixed.py covers it.",
    ),
    Mutant(
        name="no-limit-for-a-peer",
        drops="At admission, D limits how much of its pool one P may hold. Without it, a P that does not answer "
        "takes the blocks that requests of another P need.",
        source="spec 2.13; L6; L7; R38",
        patches=(Swap(ConsumerCells._has_room, _room_for_all),),
        scope=Scope(p_engines=2, requests=3, pool_blocks=8, concurrent=False, clocks=False, abort=0),
        breaks="L6",
    ),
)

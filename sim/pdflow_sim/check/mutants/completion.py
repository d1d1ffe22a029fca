"""Mutants of the completion of transfers: at P by handles and flushes, at D shard by shard."""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow.protocol.consumer.cell import ConsumerCell, ConsumerContext, everything
from pdflow.protocol.consumer.cell import Stepped as ConsumerStepped
from pdflow.protocol.consumer.rules import landed, reported
from pdflow.protocol.effects import NOTHING, Commit, Effects, Flush
from pdflow.protocol.events import FlushEnded, PairLanded, PairReported, WriteEnded
from pdflow.protocol.ids import Reg, rank_of
from pdflow.protocol.messages import Cancel, Code, Progress, Register
from pdflow.protocol.producer.cell import SETTLING, PeerQuiet, ProducerCell, ProducerContext, Stepped
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.writes import (
    end_registration,
    peer_quiet,
    post,
    registered,
    write_ended,
)
from pdflow.protocol.values import Address, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.fairness import Repeats

# P: handles.


def _first_handle_decides(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return write_ended(cell.with_write_ended(1 << event.op.d_rank, cell.failed), event, now, ctx)


def _last_handle_decides(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return write_ended(cell.with_write_ended(cell.in_flight_mask, False), event, now, ctx)


def _error_is_success(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return write_ended(cell, WriteEnded(event.op, True), now, ctx)


def _error_is_the_end(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    in_flight_mask = cell.in_flight_mask & ~(1 << event.op.d_rank)
    if event.ok or in_flight_mask or cell.failed:
        return write_ended(cell, event, now, ctx)
    return end_registration(cell, Code.IO, True, now, ctx)


def _done_is_taken_for_remote(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return write_ended(cell, event, now, msgspec.structs.replace(ctx, done_is_remote=True))


def _one_rank_is_enough(cell: ProducerCell, event: PeerQuiet, now: Instant, ctx: ProducerContext) -> Stepped:
    return peer_quiet(cell.with_write_ended(1 << event.d_rank, cell.failed), event, now, ctx)


def _failed_flush_is_good(cell: ProducerCell, event: PeerQuiet, now: Instant, ctx: ProducerContext) -> Stepped:
    return peer_quiet(cell, PeerQuiet(event.d_rank, True, event.fenced), now, ctx)


def _fence_is_a_flush(cell: ProducerCell, event: PeerQuiet, now: Instant, ctx: ProducerContext) -> Stepped:
    return peer_quiet(cell, PeerQuiet(event.d_rank, event.ok, False), now, ctx)


def _any_flush_settles(self: ProducerRank, event: FlushEnded, now: Instant) -> Effects:
    store = self.store
    effects: Effects = NOTHING
    store.flushes.pop(event.peer, None)
    for key in tuple(store.cells):
        cell = store.cells[key]
        if isinstance(key, Reg) and cell.phase is SETTLING and cell.in_flight_mask >> rank_of(event.peer) & 1:
            effects += store.apply(key, cell, PeerQuiet(rank_of(event.peer), event.ok, False), now)
    return effects


def _flush_begun_again(self: ProducerFrames, sender: Address, message: Cancel, now: Instant) -> Effects:
    """Note at each CANCEL that the flush under way is not enough: a second entry of the same registration."""
    store = self.store
    cell, waiting = store.cells.get(message.reg), store.flushes.get(sender, ())
    if cell is not None and cell.phase is SETTLING and waiting == (message.reg,):
        store.flushes[sender] = (*waiting, message.reg)
    return _cancelled(self, sender, message, now)


def _flush_must_be_begun_again(self: ProducerRank, event: FlushEnded, now: Instant) -> Effects:
    waiting = self.store.flushes.get(event.peer, ())
    if len(waiting) > 1:
        self.store.flushes[event.peer] = waiting[1:]
        return (Flush(event.peer),)
    return _flushed(self, event, now)


_cancelled = ProducerFrames._cancelled
_flushed = ProducerRank._flushed


def _written_again(cell: ProducerCell, event: Register, now: Instant, ctx: ProducerContext) -> Stepped:
    if cell.phase.name == "IN_FLIGHT":
        return post(cell, now, ctx)
    return registered(cell, event, now, ctx)


def _first_rank_is_enough(cell: ProducerCell, event: Register, now: Instant, ctx: ProducerContext) -> Stepped:
    if cell.source is None or cell.registrations:
        return registered(cell, event, now, ctx)
    return registered(cell, event, now, msgspec.structs.replace(ctx, geometry=_OnlyOne(ctx.geometry, event.d_rank)))


class _OnlyOne:
    """A geometry in which P writes to one D rank only."""

    def __init__(self, geometry: Any, d_rank: int) -> None:
        self.nbytes = geometry.nbytes
        self.d_rank = d_rank

    def targets(self, p_rank: int, p: Any, d: Any) -> tuple[int, ...]:
        return (self.d_rank,)


# D: shards.


def _counted(cell: ConsumerCell, event: PairLanded, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    after = cell.with_landed(cell.landed + 1)
    if after.landed == everything(cell):
        return cell.becoming_gone(), (Commit(cell.request_id),)
    return after, NOTHING


def _one_shard_is_all(cell: ConsumerCell, event: PairLanded, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return cell.becoming_gone(), (Commit(cell.request_id),)


def _ready_is_sent(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    if event.progress is Progress.IN_FLIGHT:
        event = PairReported(event.op, event.sender, Progress.SENT)
    return reported(cell, event, now, ctx)


def _sent_does_not_count(
    cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext
) -> ConsumerStepped:
    return (cell, NOTHING) if event.progress is Progress.SENT else reported(cell, event, now, ctx)


def _done_unread(cell: ConsumerCell, event: PairLanded, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return landed(cell, PairLanded(event.op, event.sender), now, ctx)


NO_CLOCKS = Scope(abort=0, deadline=0, stall=0)

COMPLETION: tuple[Mutant, ...] = (
    Mutant(
        name="completions-counted",
        drops="D records whose shard has landed. Without it, a DONE and a SENT of one rank count as two shards.",
        source="M9; spec 2.4; C1; R14",
        patches=(Swap(landed, _counted),),
        scope=Scope(p_tp=2, dup=1, abort=0, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="first-handle-decides",
        drops="P ends a registration when every handle has ended. Without it, P frees blocks that a sibling's "
        "WRITE still reads.",
        source="M10; R16",
        patches=(Swap(write_ended, _first_handle_decides),),
        scope=Scope(d_tp=2, abort=0, deadline=0, stall=0),
        breaks="S2",
    ),
    Mutant(
        name="last-handle-decides",
        drops="P remembers that one of several handles failed. Without it, the last handle's success counts for "
        "all, and P frees blocks that the failed WRITE may still read.",
        source="M11; R16; S7",
        patches=(Swap(write_ended, _last_handle_decides),),
        scope=Scope(d_tp=2, err=1, abort=0, deadline=0, stall=0),
        breaks="S2",
    ),
    Mutant(
        name="error-counts-as-sent",
        drops="A WRITE that ended with an error was not sent. Without it, P reports SENT and frees blocks that "
        "the WRITE may still read.",
        source="spec 2.5; R17; R21",
        patches=(Swap(write_ended, _error_is_success),),
        scope=Scope(err=1),
        breaks="S2",
    ),
    Mutant(
        name="error-without-fence",
        drops="After an error, P closes its endpoint before it answers `flushed`. Without it, P frees blocks "
        "that a NIC may still read.",
        source="spec 2.5; F10; R17; R19",
        patches=(Swap(write_ended, _error_is_the_end),),
        scope=Scope(err=1),
        breaks="S2",
    ),
    Mutant(
        name="local-done-without-flush",
        drops="Where a handle's end is only local, P flushes before it reports SENT. Without it, P reports SENT "
        "for bytes that are still in a socket.",
        source="spec 2.5",
        patches=(Swap(write_ended, _done_is_taken_for_remote),),
        scope=Scope(done_is_remote=False),
        breaks="S7",
    ),
    Mutant(
        name="one-flush-is-enough",
        drops="P flushes every rank that it wrote to. Without it, P reports SENT for a rank that it has not flushed.",
        source="spec 2.5",
        patches=(Swap(peer_quiet, _one_rank_is_enough),),
        scope=Scope(done_is_remote=False, d_tp=2, deadline=0, stall=0),
        breaks="S7",
    ),
    Mutant(
        name="failed-flush-is-good",
        drops="P fences a rank after a flush that failed. Without it, P reports SENT for bytes that may not have "
        "landed.",
        source="spec 2.5",
        patches=(Swap(peer_quiet, _failed_flush_is_good),),
        scope=Scope(done_is_remote=False, err=1),
        breaks="S7",
    ),
    Mutant(
        name="fence-counts-as-flush",
        drops="A fence proves that nothing more lands, not that everything has landed. Without it, P reports "
        "SENT for bytes that were lost.",
        source="spec 2.6",
        patches=(Swap(peer_quiet, _fence_is_a_flush),),
        scope=Scope(done_is_remote=False, requests=2, err=1, concurrent=False, deadline=0, stall=0),
        breaks="S7",
    ),
    Mutant(
        name="any-flush-settles",
        drops="A flush covers the WRITEs that were posted before it. Without it, an earlier flush settles a "
        "later WRITE.",
        source="spec 2.5",
        patches=(Swap(ProducerRank._flushed, _any_flush_settles),),
        scope=Scope(done_is_remote=False, requests=2, concurrent=False, deadline=0, stall=0),
        survives="In these scopes a flush also waits for later WRITEs. tests/protocol/test_fixed.py covers it.",
    ),
    Mutant(
        name="cancel-restarts-the-flush",
        drops="A repeated CANCEL leaves the flush that is under way alone. Without it, P starts another flush, and "
        "waits for the end of the newest: where a flush takes longer than a period of CANCELs, P never answers.",
        source="spec 2.5; spec 2.9; L3",
        patches=(
            Swap(ProducerFrames._cancelled, _flush_begun_again),
            Swap(ProducerRank._flushed, _flush_must_be_begun_again),
        ),
        repeats=Repeats.LINKS_QUIET,
        scope=Scope(done_is_remote=False, drop=1, deadline=0, stall=0),
        breaks="L",
    ),
    Mutant(
        name="same-registration-writes-again",
        drops="P only acknowledges a REG that it already has. Without it, P writes the bytes twice, the second "
        "time after the commit.",
        source="spec 2.7; R14",
        patches=(Swap(registered, _written_again),),
        scope=Scope(dup=1),
        breaks="S3",
    ),
    Mutant(
        name="join-of-one-rank",
        drops="P writes when every target rank has registered. Without it, P reports SENT to ranks that register "
        "later.",
        source="spec 2.1; R13; R26",
        patches=(Swap(registered, _first_rank_is_enough),),
        scope=Scope(d_tp=2, deadline=0, stall=0),
        breaks="S7",
    ),
    Mutant(
        name="join-ends-by-the-clock",
        drops="In strict, P waits for every target rank without a time limit. Without it, P writes to the ranks "
        "that have registered and reports SENT to all.",
        source="spec 2.1",
        guards=("waits_for_all_ranks",),
        scope=Scope(d_tp=2, sync=1, abort=0, deadline=0, stall=0),
        breaks="S7",
    ),
    Mutant(
        name="one-shard-is-all",
        drops="D commits when every shard has landed. Without it, D decodes with half of the heads.",
        source="spec 2.1; S3",
        patches=(Swap(landed, _one_shard_is_all),),
        scope=Scope(p_tp=2, abort=0, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="in-flight-counts-as-sent",
        drops="Only SENT means that a shard has landed. Without it, D commits during a WRITE.",
        source="spec 2.8; S3",
        patches=(Swap(reported, _ready_is_sent),),
        scope=Scope(sync=1),
        breaks="S3",
    ),
    Mutant(
        name="sent-does-not-count",
        drops="SENT replaces a DONE that was lost. Without it, D waits for the DONE until its deadline.",
        source="spec 2.5; L5; R19; R27",
        patches=(Swap(reported, _sent_does_not_count),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="done-not-checked",
        drops="D compares the generation, bytes and weights of a DONE with its own.",
        source="spec 2.12; spec 2.5",
        patches=(Swap(landed, _done_unread),),
        scope=Scope(drop=1, dup=1),
        survives="A second check: a DONE belongs to one registration, which names one attempt and one generation.",
    ),
)

"""Mutants of transfers in pieces: prompts sent while they are computed, WRITEs that stop, memory that is withdrawn."""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow.methods.lanes import Lanes, Operation
from pdflow.methods.shipment import Piece, Shipment
from pdflow.protocol.effects import NOTHING, Effects, ReleaseBlocks, SendLocal
from pdflow.protocol.events import (
    PrefillAborted,
    PrefillEnded,
    ShardReleased,
    SourceCompleted,
    SourceReady,
    SourceWithdrawn,
    WriteEnded,
)
from pdflow.protocol.messages import Code, Progress
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    LEASED,
    READY,
    ProducerCell,
    ProducerContext,
    Stepped,
    progress_of,
)
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.producer.writes import (
    end_registration,
    landed,
    sent,
    source_lost,
    stop,
    write_ended,
)
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap, TableRow
from pdflow_sim.check.scopes.scope import Scope

# What a WRITE that was stopped has done.


def _always_sent(cell: ProducerCell, now: Instant, ctx: ProducerContext) -> Stepped:
    return sent(cell, ctx)


def _last_handle_decides(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return write_ended(msgspec.structs.replace(cell, truncated=False), event, now, ctx)


def _stopped_is_settled(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    if cell.stopped is not Code.NONE and cell.in_flight_mask == 1 << event.op.d_rank:
        return end_registration(cell, cell.stopped, True, now, ctx)
    return write_ended(cell, event, now, ctx)


def _last_piece_at_once(self: Shipment) -> Piece | None:
    """Return the next piece as `next` does, except that the last piece does not wait for the others."""
    if self._failed or self._stopped or not self._queue:
        return None
    piece = self._queue.popleft()
    self._unposted -= piece.stop - piece.start
    self._in_flight += 1
    return piece


# What a stop cuts.


def _stops_nothing(self: Shipment) -> None: ...


def _takes_no_lane(self: Lanes[Any], operation: Operation[Any], lanes: int) -> None: ...


def _stops_what_is_posted(self: Shipment) -> None:
    self._stopped = True
    self._in_flight = 0


# A prompt that is given up while it is computed.


def _released_at_once(self: ProducerScheduler, event: PrefillAborted, now: Instant) -> Effects:
    product = self.products.get(event.xid)
    if product is None or product.complete or product.allocation is None:
        return _aborted(self, event, now)
    del self.products[event.xid]
    reports = tuple(SendLocal(rank, PrefillEnded(event.xid, event.code)) for rank in self.ranks)
    return (*reports, ReleaseBlocks(event.xid, product.allocation, event.code))


_aborted = ProducerScheduler._aborted


def _lost_and_kept(cell: ProducerCell, event: PrefillEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration as `source_lost` does, but keep the lost source, which may serve another registration."""
    if cell.source is None or cell.source.complete or cell.reg is None:
        return source_lost(cell, event, now, ctx)
    if cell.phase is IN_FLIGHT:
        return stop(cell, event.code, ctx)
    return end_registration(cell, event.code, True, now, ctx)


# How long P keeps it.


def _leased_at_once(self: ProducerRank, event: SourceReady, now: Instant) -> Effects:
    effects = _source_ready(self, event, now)
    store = self.store
    until = now + store.context.timers.lease_ns
    for key in store.keys.get(event.xid, ()):
        if store.cells[key].lease_until == NEVER:
            store.update(key, store.cells[key].with_lease(until))
            store.deadlines.push(until, Timer(TimerKind.LEASE, event.xid))
    return effects


_source_ready = ProducerRank._source_ready


def _whatever_its_source(cell: ProducerCell) -> Progress:
    if cell.source is None or cell.source.complete:
        return progress_of(cell)
    return progress_of(msgspec.structs.replace(cell, source=None))


def _withdrawn_whatever(self: ProducerRank, event: SourceWithdrawn, now: Instant) -> Effects:
    store = self.store
    effects: Effects = NOTHING
    for key in store.keys.get(event.xid, ()):
        cell = store.cells[key]
        if cell.source is not None:
            effects += store.put(key, cell, cell.becoming_gone(Code.EXPIRED), now)
    return effects


def _forgotten_when_released(self: ProducerScheduler, event: ShardReleased, now: Instant) -> Effects:
    effects = _shard_released(self, event, now)
    product = self.products.get(event.xid)
    if product is not None and product.allocation is not None and not product.holders:
        del self.products[event.xid]
    return effects


_shard_released = ProducerScheduler._shard_released

EARLY = Scope(method="cpu-staged")
GIVEN_UP = Scope(method="cpu-staged", prefill_abort=1)

PIECES: tuple[Mutant, ...] = (
    Mutant(
        name="stopped-write-reports-sent",
        drops="A WRITE that was stopped between two pieces has not been sent. Without it, P reports SENT for "
        "half a prompt.",
        source="spec 2.9; S7",
        patches=(Swap(landed, _always_sent),),
        scope=EARLY,
        breaks="S7",
    ),
    Mutant(
        name="last-write-hides-a-stop",
        drops="A registration is not sent if one of its WRITEs was stopped. Without it, P reports SENT when a "
        "later WRITE ends well.",
        source="spec 2.9; S7; R16",
        patches=(TableRow(RULES, (IN_FLIGHT, WriteEnded), _last_handle_decides),),
        scope=Scope(method="nixl-push", progressive=True, d_tp=2, clocks=False),
        breaks="S7",
    ),
    Mutant(
        name="stop-settles-an-error",
        drops="P fences a WRITE that failed, stopped or not. Without it, P frees blocks that the WRITE may still read.",
        source="spec 2.5; F10; R17",
        patches=(TableRow(RULES, (IN_FLIGHT, WriteEnded), _stopped_is_settled),),
        scope=Scope(method="cpu-staged", err=1),
        breaks="S2",
    ),
    Mutant(
        name="done-before-the-last-piece",
        drops="P posts the last piece when all others have landed. Without it, its notification arrives before "
        "the other pieces.",
        source="pdflow/methods/shipment.py; S7",
        patches=(Swap(Shipment.next, _last_piece_at_once),),
        scope=Scope(method="cpu-staged", abort=0),
        breaks="S3",
    ),
    Mutant(
        name="stop-cuts-nothing",
        drops="A stop removes the pieces that are not posted. Without it, P waits for pieces of an aborted "
        "prefill, which never come.",
        source="pdflow/methods/lanes.py; spec 2.9; L1",
        patches=(Swap(Shipment.halt, _stops_nothing),),
        scope=GIVEN_UP,
        breaks="L",
    ),
    Mutant(
        name="stop-cuts-posted-pieces",
        drops="A stop removes no piece that is posted. Without it, D frees blocks in which a piece may still land.",
        source="pdflow/methods/lanes.py; spec 2.9; S1",
        patches=(Swap(Shipment.halt, _stops_what_is_posted),),
        scope=EARLY,
        breaks="S1",
    ),
    Mutant(
        name="posted-without-a-lane",
        drops="A piece counts as posted when it has a lane. Without it, a stop removes none of the pieces that "
        "wait for a lane.",
        source="pdflow/methods/lanes.py; S9",
        patches=(Swap(Lanes._count, _takes_no_lane),),
        scope=Scope(method="p2p-nccl-put", requests=2, abort=0, clocks=False),
        breaks="S9",
    ),
    Mutant(
        name="aborted-prefill-released-at-once",
        drops="P's ranks release a prompt whose prefill is aborted while they send it. Without it, the scheduler "
        "frees blocks that a WRITE still reads.",
        source="spec 2.2; S2",
        patches=(Swap(_aborted, _released_at_once),),
        scope=Scope(method="cpu-staged", prefill_abort=1, abort=0, deadline=0, stall=0),
        breaks="S2",
    ),
    Mutant(
        name="aborted-prefill-not-stopped",
        drops="An aborted prefill stops the WRITE of its prompt. Without it, the WRITE waits for pieces that "
        "never come.",
        source="L1; L2",
        patches=(TableRow(RULES, (IN_FLIGHT, PrefillEnded)),),
        scope=GIVEN_UP,
        breaks="L",
    ),
    Mutant(
        name="aborted-prefill-before-its-write",
        drops="An aborted prefill drops a WRITE that waits for its connection. Without it, the WRITE never ends.",
        source="L1; L2; R02",
        patches=(TableRow(RULES, (READY, PrefillEnded)),),
        scope=GIVEN_UP,
        breaks="L",
    ),
    Mutant(
        name="aborted-prefill-unclaimed",
        drops="P releases the prompt of an aborted prefill if no D has registered for it. Without it, no lease "
        "ever ends it.",
        source="L2",
        patches=(TableRow(RULES, (LEASED, PrefillEnded)),),
        scope=GIVEN_UP,
        breaks="L",
    ),
    Mutant(
        name="aborted-prefill-served-again",
        drops="P serves no other registration from the prompt of an aborted prefill. Without it, P keeps the "
        "prompt forever.",
        source="L2",
        patches=(Swap(source_lost, _lost_and_kept),),
        scope=Scope(method="cpu-staged", prefill_abort=1, drop=1),
        breaks="L",
    ),
    Mutant(
        name="leased-before-it-is-complete",
        drops="No lease runs while a prompt is computed. Without it, the lease of a long prompt ends before any "
        "D could register.",
        source="spec 2.2; L1",
        patches=(Swap(_source_ready, _leased_at_once),),
        scope=EARLY,
        breaks="L1",
    ),
    Mutant(
        name="computing-counts-as-in-flight",
        drops="P reports QUEUED while a prompt is computed, however much of it has been sent. Without it, D "
        "fails a long prompt as STALLED.",
        source="spec 2.8; L1",
        patches=(Swap(progress_of, _whatever_its_source),),
        scope=EARLY,
        breaks="L1",
    ),
    Mutant(
        name="complete-and-not-leased",
        drops="The lease begins when the prompt is complete. Without it, P keeps an unclaimed prompt forever.",
        source="spec 2.2; L2",
        patches=(TableRow(RULES, (LEASED, SourceCompleted)),),
        scope=Scope(method="cpu-staged", drop=1),
        breaks="L",
    ),
    Mutant(
        name="withdrawn-under-a-write",
        drops="P releases withdrawn memory when its WRITEs have ended. Without it, the NIC reads another "
        "prompt's memory.",
        source="spec 2.2; C3; R01",
        patches=(Swap(ProducerRank._withdrawn, _withdrawn_whatever),),
        scope=Scope(method="p2p-nccl-put", withdraw=1),
        breaks="S2",
    ),
    Mutant(
        name="forgotten-before-it-is-computed",
        drops="P remembers a prompt until it is computed, even if its lease has ended. Without it, P raises an "
        "exception.",
        source="spec 1.1",
        patches=(Swap(_shard_released, _forgotten_when_released),),
        scope=EARLY,
        breaks="crash",
    ),
)

"""P's rules for matching, pinning and WRITEs, and for every way in which a registration ends.

When a registration ends before its data were sent, the prompt returns to LEASED and a retry may register for it: the
lease alone decides how long.

Rules are pure: `step(cell, event, now, ctx)`. A missing rule is a named no-op. Sources: spec 2.1 to 2.12, spec 7.1 (C3,
C4); for vllm-stock, `push_worker.py` of vLLM 0.32.0. Race numbers are those of spec 8.
"""

from __future__ import annotations

import msgspec

from pdflow.protocol.effects import NOTHING, Effect, Effects, Fence, Flush, PostWrite, Send, StopWrite
from pdflow.protocol.events import PrefillEnded, Source, SourceCompleted, SourceReady, WriteEnded, WriteStopped
from pdflow.protocol.ids import Op, rank_address
from pdflow.protocol.messages import (
    CancelAck,
    Code,
    Completion,
    Disposition,
    Done,
    Fail,
    Progress,
    Register,
    RegisterAck,
    SyncItem,
)
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    JOINING,
    OPEN,
    READY,
    SETTLING,
    CancelReceived,
    Connected,
    JoinEnded,
    PeerQuiet,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
    RegistrationRetired,
    ShardTaken,
    Stepped,
    progress_of,
)
from pdflow.protocol.values import NEVER, Address, Instant


def peer(cell: ProducerCell, d_rank: int) -> Address:
    assert cell.reg is not None
    return rank_address(cell.reg.engine, d_rank)


def acknowledge(cell: ProducerCell, d_rank: int, ctx: ProducerContext) -> Effects:
    if not ctx.dialect.control_frames or cell.reg is None:
        return NOTHING
    ack = RegisterAck(cell.reg, ctx.rank, progress_of(cell), cell.targets)
    return (Send(rank_address(cell.reg.engine, d_rank), ack),)


def end_registration(
    cell: ProducerCell, code: Code, flushed: bool, now: Instant, ctx: ProducerContext, notify: bool = True
) -> Stepped:
    """End a registration without its data: tell its ranks, answer waiting CANCELs, and give the product back.

    Every failure ends here, so that no path can forget a waiting CANCEL (R18).
    """
    assert cell.reg is not None
    verdict = SyncItem(cell.reg, Progress.UNKNOWN, code, flushed)
    effects: Effects = NOTHING
    if ctx.dialect.control_frames and notify:
        written = bool(cell.in_flight_mask) or cell.phase in (IN_FLIGHT, SETTLING)
        how = Disposition.DRAINED if written else Disposition.NOT_STARTED
        answers: list[Effect] = [Send(to, CancelAck(cell.reg, ctx.rank, how, flushed)) for to in cell.cancel_waiters]
        if code is not Code.CANCELLED or not cell.cancel_waiters:
            # A D that cancels needs no FAIL. One whose prefill leg has been cancelled does.
            answers += [
                Send(to, Fail(cell.reg, ctx.rank, code, flushed))
                for registration in cell.registrations
                if (to := peer(cell, registration.d_rank)) not in cell.cancel_waiters
            ]
        effects = tuple(answers)
    if cell.source is None:
        return cell.becoming_gone(code, verdict), effects
    if cell.expired or (cell.lease_until <= now and ctx.dialect.lease_rechecked):
        return cell.becoming_gone(Code.EXPIRED, verdict), effects
    unclaimed = cell.becoming_unregistered(verdict)
    if cell.unwanted:
        unclaimed = unclaimed.with_lease(min(cell.lease_until, now + ctx.timers.release_lease_ns))
    return unclaimed, effects


def requested_range(registration: Register, source: Source, ctx: ProducerContext) -> tuple[int, int] | Code:
    """Return the (token_start, num_tokens) that a registration asks for, or the code why it cannot be served.

    vLLM's PUSH_REG names only D's blocks, which stand for the prompt's tail: the position is computed from the token
    count, so that the pairing itself is always by position (R52).
    """
    tables = registration.target.tables
    blocks = min(map(len, tables))
    size = registration.shards.block_size
    ours = ctx.shards.block_size
    if size != ours and not (ctx.dialect.unequal_blocks and (size % ours == 0 or ours % size == 0)):
        return Code.LAYOUT
    if not ctx.dialect.checks_content:
        have = -(-source.num_tokens // size)
        if not 0 < blocks <= have:
            return Code.LAYOUT
        start = (have - blocks) * size
        return start, source.num_tokens - start
    if registration.weights != source.weights:
        return Code.WEIGHTS
    start, num_tokens = registration.token_start, registration.num_tokens
    if start + num_tokens != source.num_tokens or registration.digest != source.digest:
        return Code.CONTENT
    if num_tokens <= 0 or len(tables) != len(source.allocation.tables):
        return Code.LAYOUT
    if not ctx.into_staging and (start % size or blocks * size < num_tokens):
        return Code.LAYOUT
    return start, num_tokens


def proceed(cell: ProducerCell, now: Instant, ctx: ProducerContext) -> Stepped:
    """Check a source and its registration against each other, then write as soon as possible."""
    source = cell.source
    assert source is not None
    for registration in cell.registrations:
        asked = requested_range(registration, source, ctx)
        if isinstance(asked, Code):
            return end_registration(cell, asked, True, now, ctx)
    if len(cell.registrations) < len(cell.targets) and now < cell.join_until:
        return cell, NOTHING
    return write_or_wait(cell, now, ctx)


def write_or_wait(cell: ProducerCell, now: Instant, ctx: ProducerContext) -> Stepped:
    """Write a matched prompt whose D ranks have registered: under a valid lease, as soon as the peers are connected."""
    if cell.lease_until <= now and ctx.dialect.lease_rechecked:
        return end_registration(cell, Code.EXPIRED, True, now, ctx)
    return post(cell, now, ctx) if ctx.connected else (cell.becoming_ready(), NOTHING)


def post(cell: ProducerCell, now: Instant, ctx: ProducerContext) -> Stepped:
    """Post the WRITEs: the lease is valid, the peers are connected. From here on only their end can free the source
    (S2)."""
    source, reg = cell.source, cell.reg
    assert source is not None
    assert reg is not None
    assert cell.lease_until > now or not ctx.dialect.lease_rechecked, "a WRITE may only be posted under a valid lease"
    writes: list[Effect] = []
    in_flight_mask = 0
    for registration in cell.registrations:
        asked = requested_range(registration, source, ctx)
        assert not isinstance(asked, Code)
        nbytes = ctx.geometry.nbytes(ctx.rank, registration.d_rank, ctx.shards, registration.shards, asked[1])
        notification: Done | Completion
        if ctx.dialect.control_frames:
            notification = Done(reg, ctx.rank, registration.target.generation, nbytes, source.weights)
        else:
            notification = Completion(reg.request_id, ctx.shards.tp)
            if registration.num_tokens != asked[1]:
                registration = msgspec.structs.replace(registration, token_start=asked[0], num_tokens=asked[1])
        op = Op(reg, ctx.rank, registration.d_rank)
        writes.append(
            PostWrite(op, peer(cell, registration.d_rank), source.allocation, registration, nbytes, notification)
        )
        in_flight_mask |= 1 << registration.d_rank
    return cell.becoming_in_flight(in_flight_mask), tuple(writes)


# Rules. `source_matches_open` and `registered` are the match, in both orders.


def registered(cell: ProducerCell, event: Register, now: Instant, ctx: ProducerContext) -> Stepped:
    """Accept a registration: the first, one of another D rank, or a repetition. Match it if the prompt is computed."""
    for known in cell.registrations:
        if known.d_rank == event.d_rank:
            return cell, acknowledge(cell, event.d_rank, ctx)
    if cell.phase is IN_FLIGHT or cell.phase is SETTLING:
        # The join is over: those ranks are written that had registered, and no other (C4).
        return cell, NOTHING
    targets = ctx.geometry.targets(ctx.rank, ctx.shards, event.shards)
    if event.d_rank not in targets:
        return cell, NOTHING
    phase = OPEN if cell.source is None else JOINING
    join = now if cell.phase is READY else cell.join_until
    if phase is JOINING and join == NEVER and not ctx.dialect.waits_for_all_ranks:
        join = now + ctx.timers.join_ns
    until = now + ctx.timers.registration_ttl_ns if ctx.dialect.registrations_end else NEVER
    matched = cell.becoming_registered(phase, event, targets, until, join)
    if not ctx.dialect.writes_registered_only:
        matched = matched.registered_by_all()
    if phase is OPEN:
        return matched, acknowledge(matched, event.d_rank, ctx)
    after, effects = proceed(matched, now, ctx)
    return after, effects + acknowledge(after, event.d_rank, ctx)


def source_matches_open(cell: ProducerCell, event: SourceReady, now: Instant, ctx: ProducerContext) -> Stepped:
    """Match a computed prompt with the registration that waits for it, and start its lease."""
    join = NEVER if ctx.dialect.waits_for_all_ranks else now + ctx.timers.join_ns
    until = now + ctx.timers.lease_ns if event.source.complete else NEVER
    return proceed(cell.becoming_sourced(event.source, event.request_id, until, join), now, ctx)


def completed(cell: ProducerCell, _: SourceCompleted, now: Instant, ctx: ProducerContext) -> Stepped:
    """Start the lease of a prompt whose computation has ended."""
    return cell.with_whole_source(now + ctx.timers.lease_ns), NOTHING


def prefill_ended(cell: ProducerCell, event: PrefillEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration whose prompt will not be computed; D ranks get FAIL."""
    return end_registration(cell, event.code, True, now, ctx)


def connected(cell: ProducerCell, _: Connected, now: Instant, ctx: ProducerContext) -> Stepped:
    """Post a deferred WRITE, after another check of its lease: it could otherwise read blocks in reuse (R02)."""
    return write_or_wait(cell, now, ctx)


def refused(cell: ProducerCell, event: RegistrationRefused, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration that P cannot serve: its TTL has ended, or D is unreachable."""
    return end_registration(cell, event.code, True, now, ctx)


def cancelled(cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration that D cancels before a WRITE is posted, and answer NOT_STARTED."""
    return end_registration(cell.with_asker(event.asker), Code.CANCELLED, True, now, ctx)


def cancelled_in_flight(cell: ProducerCell, event: CancelReceived, now: Instant, ctx: ProducerContext) -> Stepped:
    """Store a CANCEL that arrives during WRITEs, by sending rank (R18): a NIC cannot stop a WRITE. P posts no further
    piece, and answers when the WRITEs have ended."""
    if event.asker in cell.cancel_waiters:
        return cell, NOTHING
    return stop(cell.with_asker(event.asker), Code.CANCELLED, ctx)


def stop(cell: ProducerCell, code: Code, ctx: ProducerContext) -> Stepped:
    """Stop the WRITEs: post no further piece; the pieces under way end by themselves."""
    if not ctx.in_pieces or cell.phase is not IN_FLIGHT or cell.stopped is not Code.NONE:
        return cell, NOTHING
    assert cell.reg is not None
    ranks = [
        registration.d_rank for registration in cell.registrations if cell.in_flight_mask >> registration.d_rank & 1
    ]
    return cell.stopping(code), tuple(StopWrite(Op(cell.reg, ctx.rank, d_rank)) for d_rank in ranks)


def source_lost(cell: ProducerCell, event: PrefillEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """Stop the WRITEs of a prompt whose prefill was aborted: no further piece is posted, no further registration
    served."""
    if cell.source is None or cell.source.complete:
        return cell, NOTHING
    if cell.reg is None:
        return cell.becoming_gone(event.code), NOTHING
    lost = cell.outliving_its_lease()
    if cell.phase is IN_FLIGHT or cell.phase is SETTLING:
        return stop(lost, event.code, ctx)
    return end_registration(lost, event.code, True, now, ctx)


def retired(cell: ProducerCell, _: RegistrationRetired, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration whose D has exited or started again, without a message."""
    return end_registration(cell, Code.PEER_RESTARTED, True, now, ctx, notify=False)


def join_ended(cell: ProducerCell, _: JoinEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """Write only to the D ranks that have registered when the join time ends (C4)."""
    return write_or_wait(cell, now, ctx)


def write_stopped(cell: ProducerCell, event: WriteStopped, now: Instant, ctx: ProducerContext) -> Stepped:
    """Record that a WRITE has stopped between two pieces: D has only a part, and no byte is in flight."""
    return write_ended(cell.being_truncated(), WriteEnded(event.op, True), now, ctx)


def write_ended(cell: ProducerCell, event: WriteEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """Record that a handle is final. The registration ends when all handles are final: another WRITE may still run
    (R16)."""
    bit = 1 << event.op.d_rank
    if not cell.in_flight_mask & bit:
        return cell, NOTHING
    in_flight_mask = cell.in_flight_mask ^ bit
    failed = cell.failed or not event.ok
    if in_flight_mask:
        return cell.with_write_ended(in_flight_mask, failed), NOTHING
    if not failed and ctx.done_is_remote:
        return landed(cell, now, ctx)
    if failed and not ctx.dialect.fences_errors:
        return end_registration(cell, Code.IO, False, now, ctx)
    # An error on a handle proves nothing (R17, R19): fence every rank that we wrote. A local DONE needs a flush.
    unsettled = 0
    for registration in cell.registrations:
        unsettled |= 1 << registration.d_rank
    settle: type[Fence] | type[Flush] = Fence if failed else Flush
    return (
        cell.becoming_settling(unsettled, failed),
        tuple(settle(peer(cell, registration.d_rank)) for registration in cell.registrations),
    )


def fenced_in_flight(cell: ProducerCell, event: PeerQuiet, now: Instant, ctx: ProducerContext) -> Stepped:
    """Record a fence while other WRITEs run. A WRITE to the fenced D rank that ended locally only may be lost."""
    wrote = any(registration.d_rank == event.d_rank for registration in cell.registrations)
    if ctx.done_is_remote or not wrote or cell.in_flight_mask & 1 << event.d_rank:
        return cell, NOTHING
    return cell.with_write_ended(cell.in_flight_mask, True), NOTHING


def peer_quiet(cell: ProducerCell, event: PeerQuiet, now: Instant, ctx: ProducerContext) -> Stepped:
    """Record a flush or a fence. The registration ends when no byte can land at any of its D ranks. A failed flush is
    followed by a fence."""
    unsettled = cell.in_flight_mask & ~(1 << event.d_rank)
    if not event.ok:
        # The flush failed: only a fence settles this rank now.
        return cell.becoming_settling(cell.in_flight_mask, True), (Fence(peer(cell, event.d_rank)),)
    if unsettled:
        return cell.becoming_settling(unsettled, cell.failed or event.fenced), NOTHING
    if not cell.failed and not event.fenced:
        return landed(cell, now, ctx)
    return end_registration(cell, Code.IO, True, now, ctx)


def landed(cell: ProducerCell, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a registration all of whose posted pieces have landed: everything, unless the WRITE was stopped before."""
    return end_registration(cell, cell.stopped, True, now, ctx) if cell.truncated else sent(cell, ctx)


def sent(cell: ProducerCell, ctx: ProducerContext) -> Stepped:
    """End a registration as sent: every byte has landed and every notification is behind its bytes."""
    assert cell.reg is not None
    answers: Effects = NOTHING
    if cell.cancel_waiters:
        answers = tuple(Send(to, CancelAck(cell.reg, ctx.rank, Disposition.SENT, True)) for to in cell.cancel_waiters)
    return cell.becoming_gone(Code.NONE, SyncItem(cell.reg, Progress.SENT, Code.NONE, True)), answers


def shard_taken(cell: ProducerCell, event: ShardTaken, now: Instant, ctx: ProducerContext) -> Stepped:
    """Record that a D rank has read this shard (pull). The prompt is released when all D ranks have read it."""
    completed_readers = (
        cell.completed_readers | 1 << event.d_rank if ctx.dialect.counts_senders else cell.completed_readers << 1 | 1
    )
    if completed_readers.bit_count() >= event.readers:
        return cell.becoming_gone(Code.NONE), NOTHING
    return (
        (cell, NOTHING)
        if completed_readers == cell.completed_readers
        else (cell.with_reader(completed_readers), NOTHING)
    )

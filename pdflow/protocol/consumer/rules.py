"""D's rules and their table: (phase, event) -> rule. A missing row is a named no-op.

Rules are pure: `step(cell, event, now, ctx)`. They decide when a request is loaded, when it is resolved instead, and by
what each of its writers counts as ended; the cell, and the addressing of its orders, are in `consumer.cell`. Sources:
spec 2, spec 6.2 and spec 7.1 (C6, C7); for vllm-stock, vLLM 0.32.0's NIXL connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, cast

import msgspec

from pdflow.protocol.consumer.cell import (
    GONE,
    HELD,
    QUARANTINED,
    QUEUED,
    WAITING,
    Admission,
    CancelDue,
    CellEvent,
    ConsumerCell,
    ConsumerContext,
    PrefillRestarted,
    ReclaimDue,
    RequestFailed,
    RoomMade,
    Rule,
    Stepped,
    bit_of,
    everything,
    open_bits_of_link,
    order_fences,
    order_reads,
    release_idle_ranks,
    release_prompt,
    send_from_ranks,
)
from pdflow.protocol.effects import (
    NOTHING,
    Commit,
    Effects,
    Enqueue,
    FreeBlocks,
    Outcome,
    Quarantine,
    Resolve,
    SendLocal,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    FrameOrdered,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerFenced,
    PrefillLegEnded,
    ReconnectRefused,
)
from pdflow.protocol.ids import KvParams, Op, rank_address
from pdflow.protocol.messages import Cancel, Code, Progress, Register
from pdflow.protocol.phases import ConsumerPhase
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.values import NEVER, Instant


def room_made(cell: ConsumerCell, _: RoomMade, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Put a held request into the engine's queue: its prefill engine is below the block limit again."""
    return cell.becoming_queued(), (Enqueue(cell.request_id),)


def admitted(cell: ConsumerCell, event: Admission, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Register the allocated blocks at every P rank that will write to them, or read from every P rank (pull)."""
    given = event.admitted
    params = cell.params
    p, d = params.prefill.shards, ctx.engine.shards
    registration = Register(
        event.reg,
        params.xid,
        0,
        d,
        given.allocation,
        given.token_start,
        given.num_tokens,
        given.digest,
        given.weights,
        ctx.floor,
        params.request_id,
    )
    try:
        pairs = ctx.geometry.pairs(p, d)
    except ValueError:
        pairs = ()
    unequal = p.block_size != d.block_size and not ctx.pulls and not ctx.dialect.unequal_blocks
    waiting = cell.becoming_waiting(registration, pairs)
    wrong = Code.LAYOUT if not pairs or unequal else pulled_content(params, given, ctx)
    if wrong is not Code.NONE:
        resolved = Resolve(cell.request_id, Outcome.FAILED, wrong)
        return waiting.becoming_gone(), (resolved, FreeBlocks(given.allocation), *release_prompt(cell, ctx, False))
    if not ctx.pulls:
        if len(pairs) == 1:
            peer = rank_address(params.prefill.engine, pairs[0][0])
            return waiting, (SendLocal(ctx.ranks[0], FrameOrdered((peer,), registration)),)
        return waiting, send_from_ranks(waiting, everything(waiting), registration, ctx)
    return waiting, order_reads(waiting, registration, ctx)


def pulled_content(params: KvParams, given: DecodeAdmitted, ctx: ConsumerContext) -> Code:
    """Check a prompt that is to be read, as P checks a REG before it writes (`requested_range`); NONE if it matches."""
    if not (ctx.pulls and ctx.dialect.checks_content):
        return Code.NONE
    if params.weights != given.weights:
        return Code.WEIGHTS
    same = params.digest == given.digest and params.num_tokens == given.token_start + given.num_tokens
    return Code.NONE if same else Code.CONTENT


def hit(cell: ConsumerCell, _: DecodeHit, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Commit a request whose whole prompt is in D's prefix cache, and release P's prompt."""
    return cell.becoming_gone(), (Commit(cell.request_id), *release_prompt(cell, ctx, False))


def aborted_unadmitted(cell: ConsumerCell, event: DecodeAborted, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request that is aborted before it has blocks, and release P's prompt."""
    resolved = Resolve(cell.request_id, _outcome(event.code), event.code)
    return cell.becoming_gone(), (resolved, *release_prompt(cell, ctx, False))


def failed_unadmitted(cell: ConsumerCell, event: RequestFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request whose deadline ends, or whose P is dead, before it has blocks."""
    return cell.becoming_gone(), (
        Resolve(cell.request_id, Outcome.FAILED, event.code),
        *release_prompt(cell, ctx, False),
    )


def landed(cell: ConsumerCell, event: PairLanded, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Record that a shard has arrived. The last shard commits the request. A wrong size, generation or weight version
    fails it."""
    bit = bit_of(cell, event.op, event.sender)
    if not bit or cell.landed & bit:
        return cell, NOTHING
    registration, done = cell.registration, event.done
    assert registration is not None
    if done is not None:
        p, d = cell.params.prefill.shards, ctx.engine.shards
        expected = ctx.geometry.nbytes(event.op.p_rank, event.op.d_rank, p, d, registration.num_tokens)
        if done.generation != registration.target.generation or done.nbytes != expected:
            return resolve(cell.with_settled(bit), Outcome.FAILED, Code.CONTENT, now, ctx)
        if done.weights != registration.weights:
            return resolve(cell.with_settled(bit), Outcome.FAILED, Code.WEIGHTS, now, ctx)
    if cell.landed | bit == everything(cell):
        return cell.becoming_gone(), (Commit(cell.request_id), *release_idle_ranks(cell, ctx))
    if not ctx.dialect.fails_at_once and cell.settled | bit == everything(cell):
        return resolve(cell.with_landed(bit), Outcome.FAILED, Code.IO, now, ctx)
    return cell.with_landed(bit), NOTHING


def reported(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Record P's progress, and restart the stall timer while P is READY or IN_FLIGHT. SENT counts as the DONE."""
    if event.progress is Progress.SENT:
        # SENT and flushed, but its DONE was lost: the bytes are here all the same.
        return landed(cell, PairLanded(event.op, event.sender), now, ctx)
    if event.progress <= cell.best or not bit_of(cell, event.op, event.sender):
        return cell, NOTHING
    stalls = event.progress >= Progress.READY
    return cell.with_progress(event.progress, now + ctx.timers.stall_ns if stalls else NEVER), NOTHING


def pair_failed(cell: ConsumerCell, event: PairFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request whose shard will not arrive: the request ends now, its blocks when their writers have ended."""
    bit = bit_of(cell, event.op, event.sender)
    if not bit:
        return cell, NOTHING
    if not ctx.dialect.fails_at_once:
        after = cell.with_settled(lost_with(cell, event, bit, ctx))
        if after.settled != everything(cell):
            return after, NOTHING
    else:
        after = cell.with_settled(bit) if event.settled else cell
    return resolve(after, Outcome.FAILED, event.code, now, ctx)


def lost_with(cell: ConsumerCell, event: PairFailed, bit: int, ctx: ConsumerContext) -> int:
    """Return the pairs that are lost with one. vllm-stock: a D rank that cannot register with one of its writers is
    lost as a whole; READs end one by one."""
    bits = bit
    for i, (_, d_rank) in enumerate(cell.pairs):
        if d_rank == event.op.d_rank and not ctx.pulls:
            bits |= 1 << i
    return bits


def missing(cell: ConsumerCell, event: PairMissing, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Send a lost REG again: P has answered a later SYNC, and does not know the registration."""
    assert cell.registration is not None
    bit = _bit_at(cell, event.op)
    if ctx.pulls or not bit or cell.settled & bit:
        return cell, NOTHING
    registration = msgspec.structs.replace(cell.registration, floor=ctx.floor)
    return cell, send_from_ranks(cell, bit, registration, ctx)


def aborted(cell: ConsumerCell, event: DecodeAborted, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request that the client or the engine aborts; its blocks go to quarantine."""
    return resolve(cell, _outcome(event.code), event.code, now, ctx)


def request_failed(cell: ConsumerCell, event: RequestFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request at its deadline, after a stall, or when its P is dead; its blocks go to quarantine."""
    return resolve(cell, Outcome.FAILED, event.code, now, ctx)


def prefill_restarted(cell: ConsumerCell, _: PrefillRestarted, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Fence the writers of a retired incarnation: they may still write, and answers of the new incarnation settle no
    pair (S8, F9)."""
    orphan = cell.with_orphaned()
    peers = frozenset(rank_address(cell.params.prefill.engine, p_rank) for p_rank, _ in cell.pairs)
    if cell.phase is QUARANTINED:
        return orphan, order_fences(orphan, peers, ctx)
    after, effects = resolve(orphan, Outcome.FAILED, Code.PEER_RESTARTED, now, ctx)
    return after, effects if ctx.pulls else effects + order_fences(after, peers, ctx)


def resolve(cell: ConsumerCell, outcome: Outcome, code: Code, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request after admission, for every failure: it ends now, its blocks when their writers have ended."""
    resolution = Resolve(cell.request_id, outcome, code)
    open_bits = everything(cell) & ~cell.settled
    if not open_bits:
        return cell.becoming_gone(), (resolution, FreeBlocks(cell.allocation), *release_prompt(cell, ctx, True))
    timers = ctx.timers
    if ctx.pulls:
        quarantined = cell.becoming_quarantined(cell.settled, NEVER, 0, NEVER)
        return quarantined, (resolution, Quarantine(cell.allocation))
    if ctx.dialect.control_frames and not cell.orphaned:
        quarantined = cell.becoming_quarantined(
            cell.settled, now + timers.cancel_first_ns, timers.cancel_first_ns, NEVER
        )
        cancels = send_from_ranks(cell, open_bits, Cancel(cell.reg, ctx.floor), ctx)
        return quarantined, (resolution, Quarantine(cell.allocation), *cancels, *release_prompt(cell, ctx, True))
    # An orphan is still strict: no time frees it (H6).
    timed = cell.prefill_over and not ctx.dialect.control_frames and ctx.dialect.quarantine_ends
    reclaim = reclaim_at(now, ctx) if timed else NEVER
    return cell.becoming_quarantined(cell.settled, NEVER, 0, reclaim), (resolution, Quarantine(cell.allocation))


def reclaim_at(now: Instant, ctx: ConsumerContext) -> Instant:
    """Return when a correctly running vLLM P can no longer begin a write: its lease, what may queue ahead of the write,
    and the transport's own retries. It rests on clocks, so it is probable and not certain (spec 6.2)."""
    timers = ctx.timers
    return now + timers.lease_ns + timers.handshake_queue_ns + timers.transport_ns


def prefill_leg_ended(cell: ConsumerCell, event: PrefillLegEnded, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Record the end of the prefill leg: P's lease runs from now on; after a failed leg P never writes."""
    if cell.phase is not QUARANTINED:
        return cell.with_prefill_over(cell.reclaim_until), NOTHING
    if ctx.dialect.control_frames or not ctx.dialect.quarantine_ends:
        return cell, NOTHING
    if not event.ok:
        return freed(cell, ctx)
    return cell.with_prefill_over(reclaim_at(now, ctx)), NOTHING


def settle(cell: ConsumerCell, event: PairLanded | PairFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Settle one pair of a request in quarantine: its writer has ended. The last pair frees the blocks."""
    bit = bit_of(cell, event.op, event.sender)
    if not bit or cell.settled & bit or (type(event) is PairFailed and not event.settled):
        return cell, NOTHING
    if cell.orphaned and not ctx.pulls:
        return cell, NOTHING
    after = cell.with_settled(bit)
    return freed(after, ctx) if after.settled == everything(cell) else (after, NOTHING)


def settle_reported(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Settle the pair if P reports SENT. Otherwise repeat the CANCEL, if this is P's answer to a SYNC."""
    if event.progress is Progress.SENT:
        return settle(cell, PairLanded(event.op, event.sender), now, ctx)
    return cancel_again(cell, bit_of(cell, event.op, event.sender), ctx) if event.synced else (cell, NOTHING)


def missing_cancelled(cell: ConsumerCell, event: PairMissing, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Repeat the CANCEL of a registration that P does not know."""
    return cancel_again(cell, _bit_at(cell, event.op), ctx)


def cancel_again(cell: ConsumerCell, bit: int, ctx: ConsumerContext) -> Stepped:
    """Repeat a CANCEL when P answers a SYNC without an end of the registration: the CANCEL may be lost. Its timer
    alone, at fixed intervals, could be starved by an outage of the same period; the connection works now."""
    if ctx.pulls or not bit or cell.settled & bit or cell.orphaned:
        return cell, NOTHING
    return cell, send_from_ranks(cell, bit, Cancel(cell.reg, ctx.floor), ctx)


def fenced(cell: ConsumerCell, event: PeerFenced, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Settle the pairs of a fenced P rank and D rank: no byte of this P rank can land at this D rank. It leaves
    registrations alone that the D rank received after the fence."""
    bits = open_bits_of_link(cell, event)
    if not bits:
        return cell, NOTHING
    after = cell.with_settled(bits)
    if cell.phase is WAITING:
        return resolve(after, Outcome.FAILED, Code.PEER_DEAD, now, ctx)
    return freed(after, ctx) if after.settled == everything(cell) else (after, NOTHING)


def reconnect_refused(cell: ConsumerCell, event: ReconnectRefused, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Resolve a request whose P rank refuses D's reconnect: no process listens at its address. Its blocks stay in
    quarantine.

    The refusal is evidence for the request alone. It does not show that a WRITE which a NIC has begun has ended, and it
    may come from a firewall, or from a listener that closed while P runs. So it settles no pair and orders no fence.
    Quarantine ends as without this rule: by P's answer to the CANCEL, which is repeated until P is reached; by the
    fence against P's next incarnation; or by the fence after `dead_ns` of silence.

    The code is PEER_DEAD. UNREACHABLE is the code of a request whose REG was never sent; its blocks are free at once.
    A REG that waits for the first connection to P ends that way, refused or not. A queued request holds no blocks and
    keeps waiting: it ends as UNREACHABLE when it is admitted, unless P has returned by then.

    D reconnects with its next SYNC, `reconnect_ns` after the loss. This rule makes no attempt of its own, so the
    back-off of failed handshakes bounds them all. vllm-compat lacks this rule (`refusals_resolve`)."""
    if not open_bits_of_link(cell, event):
        return cell, NOTHING
    return resolve(cell, Outcome.FAILED, Code.PEER_DEAD, now, ctx)


def freed(cell: ConsumerCell, ctx: ConsumerContext) -> Stepped:
    effects: Effects = (FreeBlocks(cell.allocation),)
    return cell.becoming_gone(), effects + (release_prompt(cell, ctx, True) if ctx.pulls else NOTHING)


def cancel_due(cell: ConsumerCell, _: CancelDue, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Repeat the CANCEL to the P ranks that have not answered, after 0.2 s, 0.4 s ... 2 s."""
    wait = min(cell.cancel_wait * 2, ctx.timers.cancel_last_ns)
    again = send_from_ranks(cell, everything(cell) & ~cell.settled, Cancel(cell.reg, ctx.floor), ctx)
    return cell.with_cancel(now + wait, wait), again


def reclaim_due(cell: ConsumerCell, _: ReclaimDue, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Free the blocks: a correctly running vLLM P can no longer begin a WRITE (vllm-compat)."""
    return freed(cell, ctx)


def _bit_at(cell: ConsumerCell, op: Op) -> int:
    """Return the bit of a pair, or 0 if the op is not of this registration."""
    return bit_of(cell, op, rank_address(cell.params.prefill.engine, op.p_rank))


def _outcome(code: Code) -> Outcome:
    return Outcome.CANCELLED if code is Code.CANCELLED else Outcome.FAILED


E = TypeVar("E", bound=CellEvent)
Key: TypeAlias = tuple[ConsumerPhase, type]


def _row(
    phase: ConsumerPhase, kind: type[E], rule: Callable[[ConsumerCell, E, Instant, ConsumerContext], Stepped]
) -> tuple[Key, Rule]:
    """A row of the table. That the rule takes this kind of event is checked by its types."""
    return (phase, kind), cast(Rule, rule)


RULES: Final[dict[Key, Rule]] = dict(
    (
        _row(HELD, RoomMade, room_made),
        _row(HELD, PrefillLegEnded, prefill_leg_ended),
        _row(HELD, DecodeAborted, aborted_unadmitted),
        _row(HELD, RequestFailed, failed_unadmitted),
        _row(QUEUED, Admission, admitted),
        _row(QUEUED, DecodeHit, hit),
        _row(QUEUED, DecodeAborted, aborted_unadmitted),
        _row(QUEUED, RequestFailed, failed_unadmitted),
        _row(QUEUED, PrefillLegEnded, prefill_leg_ended),
        _row(WAITING, PrefillLegEnded, prefill_leg_ended),
        _row(WAITING, PairLanded, landed),
        _row(WAITING, PairReported, reported),
        _row(WAITING, PairFailed, pair_failed),
        _row(WAITING, PairMissing, missing),
        _row(WAITING, DecodeAborted, aborted),
        _row(WAITING, RequestFailed, request_failed),
        _row(WAITING, PrefillRestarted, prefill_restarted),
        _row(WAITING, PeerFenced, fenced),
        _row(WAITING, ReconnectRefused, reconnect_refused),
        _row(QUARANTINED, PairLanded, settle),
        _row(QUARANTINED, PairReported, settle_reported),
        _row(QUARANTINED, PairFailed, settle),
        _row(QUARANTINED, PairMissing, missing_cancelled),
        _row(QUARANTINED, PrefillRestarted, prefill_restarted),
        _row(QUARANTINED, PeerFenced, fenced),
        _row(QUARANTINED, CancelDue, cancel_due),
        _row(QUARANTINED, ReclaimDue, reclaim_due),
        _row(QUARANTINED, PrefillLegEnded, prefill_leg_ended),
    )
)


def step(cell: ConsumerCell, event: CellEvent, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Return the next state of a cell and the effects. Pure; an event without a rule returns the very same cell."""
    rule = RULES.get((cell.phase, type(event)))
    return (cell, NOTHING) if rule is None else rule(cell, event, now, ctx)


def deadline_of(cell: ConsumerCell, kind: TimerKind) -> Instant | None:
    """When this cell wants that timer; None if it does not."""
    if kind is TimerKind.DEADLINE:
        at = cell.deadline_until
    elif kind is TimerKind.STALL:
        at = cell.stall_until
    elif kind is TimerKind.CANCEL:
        at = cell.cancel_at
    else:
        at = cell.reclaim_until
    return None if at >= NEVER or cell.phase is GONE else at

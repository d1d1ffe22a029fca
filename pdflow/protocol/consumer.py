"""D's side of one request, at the scheduler: registered, landing shard by shard, loaded; or resolved and quarantined.

The request is resolved on time, whatever P does; its blocks are another matter. They leave quarantine only when every
possible writer is known to have ended: by its DONE, by an answer that says `flushed`, by a fence, by proof of death,
or, against a vLLM P that cannot be asked, after the time in which a correctly running one may still begin. Time alone
frees nothing in strict (PROTOCOL H6). Sources: PROTOCOL 3.3, 3.5, 7.2 (C6, C7), 7.4, 7.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import msgspec

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import (
    NOTHING,
    Commit,
    Effect,
    Effects,
    Enqueue,
    FreeBlocks,
    Outcome,
    Quarantine,
    Resolve,
    Tell,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    FenceOrdered,
    FrameOrdered,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerFenced,
    PrefillLegEnded,
    ReadOrdered,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.messages import Cancel, Code, Completion, Message, Progress, Register, Release, Taken
from pdflow.protocol.phases import ConsumerPhase
from pdflow.protocol.timers import TimerKind, Timers
from pdflow.protocol.values import Address, Allocation, Instant, RequestId, Value

HELD, QUEUED, WAITING, QUARANTINED, GONE = ConsumerPhase

NEVER: Instant = 1 << 62

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""The (p_rank, d_rank) that move bytes; bit i of `landed` and `settled` is pair i."""


class ConsumerContext(Value, frozen=True, gc=False):
    engine: EngineInfo
    ranks: tuple[Address, ...]
    dialect: Dialect
    timers: Timers
    geometry: Geometry
    pulls: bool
    """nixl-pull: D reads. Otherwise P writes."""
    floor: int = 0


class ConsumerCell(Value, frozen=True, gc=False):
    phase: ConsumerPhase
    request_id: RequestId
    params: KvParams
    num_blocks: int
    deadline_until: Instant
    grant: Register | None = None
    pairs: Pairs = ()
    landed: int = 0
    settled: int = 0
    """Pairs whose writer (or own READ) is known to have ended; a superset of `landed`."""
    best: Progress = Progress.UNKNOWN
    stall_until: Instant = NEVER
    cancel_at: Instant = NEVER
    cancel_wait: int = 0
    reclaim_until: Instant = NEVER
    orphaned: bool = False
    """P's incarnation is retired. Its workers may live on, so only a fence or proof of death settles a pair now."""
    prefill_over: bool = False
    """The router has reported the end of the prefill leg."""

    @property
    def allocation(self) -> Allocation:
        assert self.grant is not None
        return self.grant.target

    @property
    def reg(self) -> Reg:
        assert self.grant is not None
        return self.grant.reg

    def becoming_queued(self) -> Self:
        return msgspec.structs.replace(self, phase=QUEUED)

    def becoming_waiting(self, grant: Register, pairs: Pairs) -> Self:
        return msgspec.structs.replace(self, phase=WAITING, grant=grant, pairs=pairs)

    def becoming_quarantined(self, settled: int, cancel_at: Instant, cancel_wait: int, reclaim: Instant) -> Self:
        return msgspec.structs.replace(
            self,
            phase=QUARANTINED,
            settled=settled,
            stall_until=NEVER,
            deadline_until=NEVER,
            cancel_at=cancel_at,
            cancel_wait=cancel_wait,
            reclaim_until=reclaim,
        )

    def becoming_gone(self) -> Self:
        return msgspec.structs.replace(self, phase=GONE)

    def with_landed(self, bits: int) -> Self:
        return msgspec.structs.replace(self, landed=self.landed | bits, settled=self.settled | bits)

    def with_settled(self, bits: int) -> Self:
        return msgspec.structs.replace(self, settled=self.settled | bits)

    def with_progress(self, best: Progress, stall_until: Instant) -> Self:
        return msgspec.structs.replace(self, best=best, stall_until=stall_until)

    def with_cancel(self, at: Instant, wait: int) -> Self:
        return msgspec.structs.replace(self, cancel_at=at, cancel_wait=wait)

    def becoming_orphaned(self) -> Self:
        return msgspec.structs.replace(self, orphaned=True, cancel_at=NEVER)

    def with_prefill_over(self, reclaim: Instant) -> Self:
        return msgspec.structs.replace(self, prefill_over=True, reclaim_until=reclaim)


# What the endpoint tells a cell, beyond the events that reach it unchanged.


class Admission(Value, frozen=True, gc=False):
    reg: Reg
    admitted: DecodeAdmitted


class RoomMade(Value, frozen=True, gc=False):
    """The prefill engine is below its block limit again."""


class RequestDoomed(Value, frozen=True, gc=False):
    """A deadline, a stall, a dead or restarted peer: the request cannot be waited for any longer."""

    code: Code


class PeerReborn(Value, frozen=True, gc=False):
    """Another life of the prefill engine has answered."""


class CancelDue(Value, frozen=True, gc=False):
    pass


class ReclaimDue(Value, frozen=True, gc=False):
    """vllm-compat: a correctly running vLLM P can no longer begin a write."""


CellEvent: TypeAlias = (
    Admission
    | RoomMade
    | RequestDoomed
    | PeerReborn
    | CancelDue
    | ReclaimDue
    | DecodeHit
    | DecodeAborted
    | PrefillLegEnded
    | PairReported
    | PairLanded
    | PairFailed
    | PairMissing
    | PeerFenced
)
Stepped: TypeAlias = tuple[ConsumerCell, Effects]
Rule: TypeAlias = Callable[[ConsumerCell, Any, Instant, ConsumerContext], Stepped]


def bit_of(cell: ConsumerCell, op: Op, sender: Address) -> int:
    """The bit of a pair, or 0 if this op is not this registration's or its sender not this engine's (S9, C1)."""
    grant = cell.grant
    if grant is None or op.reg != grant.reg or engine_of(sender) != cell.params.prefill.engine:
        return 0
    if rank_of(sender) != op.p_rank:
        return 0
    pairs = cell.pairs
    if len(pairs) == 1:
        return 1 if pairs[0] == (op.p_rank, op.d_rank) else 0
    pair = (op.p_rank, op.d_rank)
    return 1 << pairs.index(pair) if pair in pairs else 0


def everything(cell: ConsumerCell) -> int:
    return (1 << len(cell.pairs)) - 1


def order(cell: ConsumerCell, bits: int, message: Message, ctx: ConsumerContext) -> Effects:
    """Have every D rank of these pairs send `message` to its P ranks."""
    by_rank: dict[int, list[Address]] = {}
    engine = cell.params.prefill.engine
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        if bits >> i & 1:
            by_rank.setdefault(d_rank, []).append(rank_address(engine, p_rank))
    orders: list[Effect] = []
    for d_rank, peers in by_rank.items():
        mine = msgspec.structs.replace(message, d_rank=d_rank) if type(message) is Register else message
        orders.append(Tell(ctx.ranks[d_rank], FrameOrdered(tuple(peers), mine)))
    return tuple(orders)


def let_go(cell: ConsumerCell, ctx: ConsumerContext, registered: bool) -> Effects:
    """Tell every P rank that this dispatch will not come (RELEASE; to a vLLM P, a pull-style completion: R11, C7)."""
    p, d = cell.params.prefill.shards, ctx.engine.shards
    effects: list[Effect] = []
    try:
        sources = [(rank, ctx.geometry.sources(rank, p, d)) for rank in range(d.ranks)]
    except ValueError:
        return NOTHING
    for rank, p_ranks in sources:
        for p_rank in p_ranks:
            message: Message
            if ctx.dialect.control_frames:
                message = Release(cell.params.xid)
            elif registered and not ctx.pulls:
                continue
            else:
                message = Completion(cell.params.request_id, len(ctx.geometry.targets(p_rank, p, d)))
            peer = rank_address(cell.params.prefill.engine, p_rank)
            effects.append(Tell(ctx.ranks[rank], FrameOrdered((peer,), message)))
    busy = {p_rank for _, p_ranks in sources for p_rank in p_ranks}
    idle = tuple(rank_address(cell.params.prefill.engine, r) for r in range(p.ranks) if r not in busy)
    if idle and ctx.dialect.control_frames:
        effects.append(Tell(ctx.ranks[0], FrameOrdered(idle, Release(cell.params.xid))))
    elif idle and (ctx.pulls or not registered):
        effects.append(Tell(ctx.ranks[0], FrameOrdered(idle, Completion(cell.params.request_id, 1))))
    return tuple(effects)


def let_go_of_idle(cell: ConsumerCell, ctx: ConsumerContext) -> Effects:
    """P ranks that hold the prompt but move none of it (replicas of a head) are told that nobody will come."""
    shards = cell.params.prefill.shards
    if shards.tp * shards.pp == 1:
        return NOTHING
    busy = {p_rank for p_rank, _ in cell.pairs}
    message: Message = Completion(cell.params.request_id, 1)
    if ctx.dialect.control_frames:
        message = Taken(cell.params.xid, 0, 1)
    idle = tuple(rank_address(cell.params.prefill.engine, r) for r in range(shards.ranks) if r not in busy)
    return (Tell(ctx.ranks[0], FrameOrdered(idle, message)),) if idle else NOTHING


# Rules.


def room_made(cell: ConsumerCell, _: RoomMade, now: Instant, ctx: ConsumerContext) -> Stepped:
    return cell.becoming_queued(), (Enqueue(cell.request_id),)


def admitted(cell: ConsumerCell, event: Admission, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Blocks are allocated: register with every P rank that writes us, or read from every one (pull)."""
    given = event.admitted
    params = cell.params
    p, d = params.prefill.shards, ctx.engine.shards
    grant = Register(
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
    waiting = cell.becoming_waiting(grant, pairs)
    wrong = Code.LAYOUT if not pairs or unequal else pulled_content(params, given, ctx)
    if wrong is not Code.NONE:
        resolved = Resolve(cell.request_id, Outcome.FAILED, wrong)
        return waiting.becoming_gone(), (resolved, FreeBlocks(given.allocation), *let_go(cell, ctx, False))
    if not ctx.pulls:
        if len(pairs) == 1:
            peer = rank_address(params.prefill.engine, pairs[0][0])
            return waiting, (Tell(ctx.ranks[0], FrameOrdered((peer,), grant)),)
        return waiting, order(waiting, everything(waiting), grant, ctx)
    return waiting, order_reads(waiting, grant, ctx)


def pulled_content(params: KvParams, given: DecodeAdmitted, ctx: ConsumerContext) -> Code:
    """What is wrong with a prompt that is to be read: as P judges a REG before it writes (`granted_range`)."""
    if not (ctx.pulls and ctx.dialect.checks_content):
        return Code.NONE
    if params.weights != given.weights:
        return Code.WEIGHTS
    same = params.digest == given.digest and params.num_tokens == given.token_start + given.num_tokens
    return Code.NONE if same else Code.CONTENT


def order_reads(cell: ConsumerCell, grant: Register, ctx: ConsumerContext) -> Effects:
    p, d = cell.params.prefill.shards, ctx.engine.shards
    engine = cell.params.prefill.engine
    effects: list[Effect] = []
    for rank in range(d.ranks):
        sources = ctx.geometry.sources(rank, p, d)
        readers = tuple(len(ctx.geometry.targets(s, p, d)) for s in sources)
        addresses = tuple(rank_address(engine, s) for s in sources)
        mine = msgspec.structs.replace(grant, d_rank=rank) if rank else grant
        effects.append(Tell(ctx.ranks[rank], ReadOrdered(addresses, readers, cell.params, mine)))
    return tuple(effects)


def hit(cell: ConsumerCell, _: DecodeHit, now: Instant, ctx: ConsumerContext) -> Stepped:
    return cell.becoming_gone(), (Commit(cell.request_id), *let_go(cell, ctx, False))


def aborted_unadmitted(cell: ConsumerCell, event: DecodeAborted, now: Instant, ctx: ConsumerContext) -> Stepped:
    resolved = Resolve(cell.request_id, _outcome(event.code), event.code)
    return cell.becoming_gone(), (resolved, *let_go(cell, ctx, False))


def doomed_unadmitted(cell: ConsumerCell, event: RequestDoomed, now: Instant, ctx: ConsumerContext) -> Stepped:
    return cell.becoming_gone(), (Resolve(cell.request_id, Outcome.FAILED, event.code), *let_go(cell, ctx, False))


def landed(cell: ConsumerCell, event: PairLanded, now: Instant, ctx: ConsumerContext) -> Stepped:
    bit = bit_of(cell, event.op, event.sender)
    if not bit or cell.landed & bit:
        return cell, NOTHING
    grant, done = cell.grant, event.done
    assert grant is not None
    if done is not None:
        p, d = cell.params.prefill.shards, ctx.engine.shards
        expected = ctx.geometry.nbytes(event.op.p_rank, event.op.d_rank, p, d, grant.num_tokens)
        if done.generation != grant.target.generation or done.nbytes != expected:
            return resolve(cell.with_settled(bit), Outcome.FAILED, Code.CONTENT, now, ctx)
        if done.weights != grant.weights:
            return resolve(cell.with_settled(bit), Outcome.FAILED, Code.WEIGHTS, now, ctx)
    if cell.landed | bit == everything(cell):
        return cell.becoming_gone(), (Commit(cell.request_id), *let_go_of_idle(cell, ctx))
    return cell.with_landed(bit), NOTHING


def reported(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> Stepped:
    """P is further than ever before: that is progress; READY and IN FLIGHT must not stop there for long."""
    if event.progress is Progress.SENT:
        # SENT and flushed, but its DONE was lost: the bytes are here all the same.
        return landed(cell, PairLanded(event.op, event.sender), now, ctx)
    if event.progress <= cell.best or not bit_of(cell, event.op, event.sender):
        return cell, NOTHING
    stalls = event.progress >= Progress.READY
    return cell.with_progress(event.progress, now + ctx.timers.stall_ns if stalls else NEVER), NOTHING


def pair_failed(cell: ConsumerCell, event: PairFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    bit = bit_of(cell, event.op, event.sender)
    if not bit:
        return cell, NOTHING
    after = cell.with_settled(bit) if event.settled else cell
    return resolve(after, Outcome.FAILED, event.code, now, ctx)


def missing(cell: ConsumerCell, event: PairMissing, now: Instant, ctx: ConsumerContext) -> Stepped:
    """P answered a SYNC sent after our REG and knows nothing of it: the REG was lost; the same again."""
    assert cell.grant is not None
    if ctx.pulls:
        return cell, NOTHING
    bit = 0
    for i, pair in enumerate(cell.pairs):
        if pair == (event.op.p_rank, event.op.d_rank) and event.op.reg == cell.grant.reg:
            bit = 1 << i
    if not bit or cell.settled & bit:
        return cell, NOTHING
    grant = msgspec.structs.replace(cell.grant, floor=ctx.floor)
    return cell, order(cell, bit, grant, ctx)


def aborted(cell: ConsumerCell, event: DecodeAborted, now: Instant, ctx: ConsumerContext) -> Stepped:
    return resolve(cell, _outcome(event.code), event.code, now, ctx)


def doomed(cell: ConsumerCell, event: RequestDoomed, now: Instant, ctx: ConsumerContext) -> Stepped:
    return resolve(cell, Outcome.FAILED, event.code, now, ctx)


def peer_reborn(cell: ConsumerCell, _: PeerReborn, now: Instant, ctx: ConsumerContext) -> Stepped:
    """The new life knows nothing of what the old one's workers still write: its answers settle nothing (S8, F9)."""
    orphan = cell.becoming_orphaned()
    peers = frozenset(rank_address(cell.params.prefill.engine, p_rank) for p_rank, _ in cell.pairs)
    if cell.phase is QUARANTINED:
        return orphan, order_fences(orphan, peers, ctx)
    after, effects = resolve(orphan, Outcome.FAILED, Code.PEER_RESTARTED, now, ctx)
    return after, effects if ctx.pulls else effects + order_fences(after, peers, ctx)


def resolve(cell: ConsumerCell, outcome: Outcome, code: Code, now: Instant, ctx: ConsumerContext) -> Stepped:
    """The one exit of every failure after admission: the request ends now, its blocks when their writers have."""
    told = Resolve(cell.request_id, outcome, code)
    open_bits = everything(cell) & ~cell.settled
    if not open_bits:
        return cell.becoming_gone(), (told, FreeBlocks(cell.allocation), *let_go(cell, ctx, True))
    timers = ctx.timers
    if ctx.pulls:
        quarantined = cell.becoming_quarantined(cell.settled, NEVER, 0, NEVER)
        return quarantined, (told, Quarantine(cell.allocation))
    if ctx.dialect.control_frames and not cell.orphaned:
        quarantined = cell.becoming_quarantined(
            cell.settled, now + timers.cancel_first_ns, timers.cancel_first_ns, NEVER
        )
        cancels = order(cell, open_bits, Cancel(cell.reg, ctx.floor), ctx)
        return quarantined, (told, Quarantine(cell.allocation), *cancels, *let_go(cell, ctx, True))
    # An orphan is still strict: no time frees it (H6).
    timed = cell.prefill_over and not ctx.dialect.control_frames
    reclaim = reclaim_at(now, ctx) if timed else NEVER
    return cell.becoming_quarantined(cell.settled, NEVER, 0, reclaim), (told, Quarantine(cell.allocation))


def reclaim_at(now: Instant, ctx: ConsumerContext) -> Instant:
    """When a correctly running vLLM P can no longer begin a write: its lease, what may queue ahead of the write, and
    the transport's own retries. Probabilistic, like every clock (PROTOCOL 7.2, residual risk)."""
    timers = ctx.timers
    return now + timers.lease_ns + timers.handshake_queue_ns + timers.transport_ns


def prefill_leg_ended(cell: ConsumerCell, event: PrefillLegEnded, now: Instant, ctx: ConsumerContext) -> Stepped:
    """From here P's lease runs; if the leg failed, P never writes at all."""
    if cell.phase is not QUARANTINED:
        return cell.with_prefill_over(cell.reclaim_until), NOTHING
    if ctx.dialect.control_frames:
        return cell, NOTHING
    if not event.ok:
        return freed(cell, ctx)
    return cell.with_prefill_over(reclaim_at(now, ctx)), NOTHING


def settle(cell: ConsumerCell, event: PairLanded | PairFailed, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Quarantine: one writer less."""
    bit = bit_of(cell, event.op, event.sender)
    if not bit or cell.settled & bit or (type(event) is PairFailed and not event.settled):
        return cell, NOTHING
    if cell.orphaned and not ctx.pulls:
        return cell, NOTHING
    after = cell.with_settled(bit)
    return freed(after, ctx) if after.settled == everything(cell) else (after, NOTHING)


def settle_reported(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> Stepped:
    if event.progress is not Progress.SENT:
        return cell, NOTHING
    return settle(cell, PairLanded(event.op, event.sender), now, ctx)


def fenced(cell: ConsumerCell, event: PeerFenced, now: Instant, ctx: ConsumerContext) -> Stepped:
    """Nothing from this P rank can land at this D rank any more: neither the data we wait for nor any other."""
    bits = 0
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        if d_rank == event.d_rank and rank_address(cell.params.prefill.engine, p_rank) == event.peer:
            bits |= 1 << i
    bits &= ~cell.settled
    if not bits:
        return cell, NOTHING
    after = cell.with_settled(bits)
    if cell.phase is WAITING:
        return resolve(after, Outcome.FAILED, Code.PEER_DEAD, now, ctx)
    return freed(after, ctx) if after.settled == everything(cell) else (after, NOTHING)


def freed(cell: ConsumerCell, ctx: ConsumerContext) -> Stepped:
    effects: Effects = (FreeBlocks(cell.allocation),)
    return cell.becoming_gone(), effects + (let_go(cell, ctx, True) if ctx.pulls else NOTHING)


def cancel_due(cell: ConsumerCell, _: CancelDue, now: Instant, ctx: ConsumerContext) -> Stepped:
    """An unanswered CANCEL is sent again, to those who have not answered, at 0.2, 0.4 ... 2 s."""
    wait = min(cell.cancel_wait * 2, ctx.timers.cancel_last_ns)
    again = order(cell, everything(cell) & ~cell.settled, Cancel(cell.reg, ctx.floor), ctx)
    return cell.with_cancel(now + wait, wait), again


def reclaim_due(cell: ConsumerCell, _: ReclaimDue, now: Instant, ctx: ConsumerContext) -> Stepped:
    return freed(cell, ctx)


def order_fences(cell: ConsumerCell, silent: frozenset[Address], ctx: ConsumerContext) -> Effects:
    """Quarantine against dead peers: D closes its own side to those of them that may still write."""
    orders: list[Effect] = []
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        peer = rank_address(cell.params.prefill.engine, p_rank)
        if peer in silent and not cell.settled >> i & 1:
            orders.append(Tell(ctx.ranks[d_rank], FenceOrdered(peer)))
    return tuple(orders)


def _outcome(code: Code) -> Outcome:
    return Outcome.CANCELLED if code is Code.CANCELLED else Outcome.FAILED


RULES: dict[tuple[ConsumerPhase, type], Rule] = {
    (HELD, RoomMade): room_made,
    (HELD, PrefillLegEnded): prefill_leg_ended,
    (HELD, DecodeAborted): aborted_unadmitted,
    (HELD, RequestDoomed): doomed_unadmitted,
    (QUEUED, Admission): admitted,
    (QUEUED, DecodeHit): hit,
    (QUEUED, DecodeAborted): aborted_unadmitted,
    (QUEUED, RequestDoomed): doomed_unadmitted,
    (QUEUED, PrefillLegEnded): prefill_leg_ended,
    (WAITING, PrefillLegEnded): prefill_leg_ended,
    (WAITING, PairLanded): landed,
    (WAITING, PairReported): reported,
    (WAITING, PairFailed): pair_failed,
    (WAITING, PairMissing): missing,
    (WAITING, DecodeAborted): aborted,
    (WAITING, RequestDoomed): doomed,
    (WAITING, PeerReborn): peer_reborn,
    (WAITING, PeerFenced): fenced,
    (QUARANTINED, PairLanded): settle,
    (QUARANTINED, PairReported): settle_reported,
    (QUARANTINED, PairFailed): settle,
    (QUARANTINED, PeerReborn): peer_reborn,
    (QUARANTINED, PeerFenced): fenced,
    (QUARANTINED, CancelDue): cancel_due,
    (QUARANTINED, ReclaimDue): reclaim_due,
    (QUARANTINED, PrefillLegEnded): prefill_leg_ended,
}


def step(cell: ConsumerCell, event: CellEvent, now: Instant, ctx: ConsumerContext) -> Stepped:
    """The pure transition of one cell. An event without a rule returns the very same cell."""
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

"""D's side of one request, at the scheduler: registered, landing shard by shard, loaded; or resolved and quarantined.

The request is resolved on time, whatever P does; its blocks are another matter. They leave quarantine only when every
possible writer is known to have ended: by its DONE, by an answer that says `flushed`, by a fence, by proof of death,
or, against a vLLM P that cannot be asked, after the time in which a correctly running one may still begin. Time alone
frees nothing in strict (H6). Which event does that in which phase stands in `consumer.rules`; here are the
cell, its events, and what its ranks are ordered to do. Sources: spec 2.4, spec 6.2, C6, C7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeAlias

import msgspec

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, SendLocal
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
    ReconnectRefused,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.messages import Code, Completion, Message, Progress, Register, Release, Taken
from pdflow.protocol.phases import ConsumerPhase
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import NEVER, Address, Allocation, Instant, RequestId, Value

HELD, QUEUED, WAITING, QUARANTINED, GONE = ConsumerPhase

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
    registration: Register | None = None
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
    """P's incarnation is retired. Its workers may still run, so only a fence or proof of death settles a pair now."""
    prefill_over: bool = False
    """The router has reported the end of the prefill leg."""

    @property
    def allocation(self) -> Allocation:
        assert self.registration is not None
        return self.registration.target

    @property
    def reg(self) -> Reg:
        assert self.registration is not None
        return self.registration.reg

    def becoming_queued(self) -> Self:
        return msgspec.structs.replace(self, phase=QUEUED)

    def becoming_waiting(self, registration: Register, pairs: Pairs) -> Self:
        return msgspec.structs.replace(self, phase=WAITING, registration=registration, pairs=pairs)

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

    def with_orphaned(self) -> Self:
        return msgspec.structs.replace(self, orphaned=True, cancel_at=NEVER)

    def with_prefill_over(self, reclaim: Instant) -> Self:
        return msgspec.structs.replace(self, prefill_over=True, reclaim_until=reclaim)


# What the endpoint tells a cell, beyond the events that reach it unchanged.


class Admission(Value, frozen=True, gc=False):
    reg: Reg
    admitted: DecodeAdmitted


class RoomMade(Value, frozen=True, gc=False):
    """The prefill engine is below its block limit again."""


class RequestFailed(Value, frozen=True, gc=False):
    """The request cannot be waited for any longer: a deadline, a stall, a dead or restarted peer."""

    code: Code


class PrefillRestarted(Value, frozen=True, gc=False):
    """Another incarnation of the prefill engine has answered."""


class CancelDue(Value, frozen=True, gc=False):
    pass


class ReclaimDue(Value, frozen=True, gc=False):
    """vllm-compat: a correctly running vLLM P can no longer begin a write."""


CellEvent: TypeAlias = (
    Admission
    | RoomMade
    | RequestFailed
    | PrefillRestarted
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
    | ReconnectRefused
)
Stepped: TypeAlias = tuple[ConsumerCell, Effects]
Rule: TypeAlias = Callable[[ConsumerCell, CellEvent, Instant, ConsumerContext], Stepped]
"""A rule as the table stores it: it is called only with events of its row."""


def bit_of(cell: ConsumerCell, op: Op, sender: Address) -> int:
    """The bit of a pair, or 0 if this op is not this registration's or its sender not this engine's (S9, C1)."""
    registration = cell.registration
    if registration is None or op.reg != registration.reg or engine_of(sender) != cell.params.prefill.engine:
        return 0
    if rank_of(sender) != op.p_rank:
        return 0
    pairs = cell.pairs
    if len(pairs) == 1:
        return 1 if pairs[0] == (op.p_rank, op.d_rank) else 0
    pair = (op.p_rank, op.d_rank)
    return 1 << pairs.index(pair) if pair in pairs else 0


def open_bits_of_link(cell: ConsumerCell, event: PeerFenced | ReconnectRefused) -> int:
    """Return the pairs between one P rank and one D rank whose writer is not known to have ended, for a registration
    that the D rank had received by then."""
    if cell.registration is not None and cell.registration.reg.seq > event.newest:
        return 0
    bits = 0
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        if d_rank == event.d_rank and rank_address(cell.params.prefill.engine, p_rank) == event.peer:
            bits |= 1 << i
    return bits & ~cell.settled


def everything(cell: ConsumerCell) -> int:
    return (1 << len(cell.pairs)) - 1


def send_from_ranks(cell: ConsumerCell, bits: int, message: Message, ctx: ConsumerContext) -> Effects:
    """Have every D rank of these pairs send `message` to its P ranks."""
    by_rank: dict[int, list[Address]] = {}
    engine = cell.params.prefill.engine
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        if bits >> i & 1:
            by_rank.setdefault(d_rank, []).append(rank_address(engine, p_rank))
    effects: list[Effect] = []
    for d_rank, peers in by_rank.items():
        mine = msgspec.structs.replace(message, d_rank=d_rank) if type(message) is Register else message
        effects.append(SendLocal(ctx.ranks[d_rank], FrameOrdered(tuple(peers), mine)))
    return tuple(effects)


def order_reads(cell: ConsumerCell, registration: Register, ctx: ConsumerContext) -> Effects:
    p, d = cell.params.prefill.shards, ctx.engine.shards
    engine = cell.params.prefill.engine
    effects: list[Effect] = []
    for rank in range(d.ranks):
        sources = ctx.geometry.sources(rank, p, d)
        readers = tuple([len(ctx.geometry.targets(s, p, d)) for s in sources])
        addresses = tuple([rank_address(engine, s) for s in sources])
        mine = msgspec.structs.replace(registration, d_rank=rank) if rank else registration
        effects.append(SendLocal(ctx.ranks[rank], ReadOrdered(addresses, readers, cell.params, mine)))
    return tuple(effects)


def order_fences(cell: ConsumerCell, silent: frozenset[Address], ctx: ConsumerContext) -> Effects:
    """Order D's ranks to fence those of the silent P ranks that may still write to this quarantined request."""
    effects: list[Effect] = []
    for i, (p_rank, d_rank) in enumerate(cell.pairs):
        peer = rank_address(cell.params.prefill.engine, p_rank)
        if peer in silent and not cell.settled >> i & 1:
            effects.append(SendLocal(ctx.ranks[d_rank], FenceOrdered(peer)))
    return tuple(effects)


def release_prompt(cell: ConsumerCell, ctx: ConsumerContext, registered: bool) -> Effects:
    """Tell every P rank that D will not take this prompt (RELEASE; to a vLLM P, a pull-style completion: R11, C7)."""
    if not ctx.dialect.releases_unregistered and (registered or not ctx.pulls):
        return NOTHING
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
            effects.append(SendLocal(ctx.ranks[rank], FrameOrdered((peer,), message)))
    idle = idle_ranks(cell, {p_rank for _, p_ranks in sources for p_rank in p_ranks})
    if idle and ctx.dialect.control_frames:
        effects.append(SendLocal(ctx.ranks[0], FrameOrdered(idle, Release(cell.params.xid))))
    elif idle and (ctx.pulls or not registered):
        effects.append(SendLocal(ctx.ranks[0], FrameOrdered(idle, Completion(cell.params.request_id, 1))))
    return tuple(effects)


def release_idle_ranks(cell: ConsumerCell, ctx: ConsumerContext) -> Effects:
    """Release the P ranks that hold the prompt but move none of it (replicas of a head)."""
    if cell.params.prefill.shards.ranks == 1:
        return NOTHING
    message: Message = Completion(cell.params.request_id, 1)
    if ctx.dialect.control_frames:
        message = Taken(cell.params.xid, 0, 1)
    idle = idle_ranks(cell, {p_rank for p_rank, _ in cell.pairs})
    return (SendLocal(ctx.ranks[0], FrameOrdered(idle, message)),) if idle else NOTHING


def idle_ranks(cell: ConsumerCell, busy: set[int]) -> tuple[Address, ...]:
    """Return P's ranks that move nothing, that is, those not in `busy`."""
    prefill = cell.params.prefill
    return tuple(rank_address(prefill.engine, rank) for rank in range(prefill.shards.ranks) if rank not in busy)

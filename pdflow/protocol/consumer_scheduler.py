"""The endpoint of D's scheduler: owns the requests' cells, mints sequence numbers, watches over its prefill engines.

It decides when a request enters the engine's queue (a prefill engine at its block limit gets no new registrations),
when a peer is suspect or dead, and what is said in SYNC. What a request does in each phase stands in `consumer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from pdflow.protocol.consumer import (
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
    PeerReborn,
    ReclaimDue,
    RequestDoomed,
    RoomMade,
    deadline_of,
    order_fences,
    step,
)
from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, Enqueue, Note, Tell
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import (
    ConsumerSchedulerEvent,
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    FrameOrdered,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerFenced,
    PeerHeard,
    PeerRestarted,
    PrefillLegEnded,
    TimeReached,
    TimerFired,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Reg, engine_of, rank_address
from pdflow.protocol.messages import Code, Heartbeat, Message, Sync
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import Address, EngineId, Instant, RequestId

CELL_TIMERS = (TimerKind.DEADLINE, TimerKind.STALL, TimerKind.CANCEL, TimerKind.RECLAIM)


class PrefillPeer:
    """What D knows of one prefill engine: the requests it owes us, the blocks they bind, and when it last spoke."""

    __slots__ = ("blocks", "heard", "held", "info", "requests", "sync_at", "synced")

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.requests: dict[RequestId, None] = {}
        self.held: deque[RequestId] = deque()
        self.blocks = 0
        self.heard: dict[Address, Instant] = {}
        """When each P rank last showed life; since then nothing was expected of one that is missing here."""
        self.sync_at: Instant | None = None
        self.synced = 0

    def fork(self) -> PrefillPeer:
        other = PrefillPeer(self.info)
        other.requests = self.requests.copy()
        other.held = self.held.copy()
        other.blocks = self.blocks
        other.heard = self.heard.copy()
        other.sync_at, other.synced = self.sync_at, self.synced
        return other


class ConsumerScheduler:
    """One decode engine's scheduler half of the protocol.

    Args:
        pool_blocks: size of the engine's KV pool in blocks.
        peer_fraction: the part of it that one of several prefill engines may bind (PROTOCOL 7.4: 25 %).
        suspect_fraction: with more of it than that in quarantine, a suspect peer gets nothing new (10 %).
    """

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = (
        "cells",
        "closed",
        "context",
        "deadlines",
        "floor",
        "incarnation",
        "next_seq",
        "peer_limit",
        "peers",
        "pool_blocks",
        "quarantined_blocks",
        "retired",
        "seqs",
        "suspect_limit",
    )

    def __init__(
        self,
        engine: EngineInfo,
        incarnation: int,
        dialect: Dialect,
        timers: Timers,
        geometry: Geometry,
        pulls: bool,
        pool_blocks: int,
        peer_fraction: float = 0.25,
        suspect_fraction: float = 0.10,
    ) -> None:
        ranks = tuple(rank_address(engine.engine, rank) for rank in range(engine.shards.ranks))
        self.context = ConsumerContext(engine, ranks, dialect, timers, geometry, pulls)
        self.incarnation = incarnation
        self.cells: dict[RequestId, ConsumerCell] = {}
        self.peers: dict[EngineId, PrefillPeer] = {}
        self.pool_blocks = pool_blocks
        self.peer_limit = int(pool_blocks * peer_fraction)
        self.suspect_limit = int(pool_blocks * suspect_fraction)
        self.quarantined_blocks = 0
        self.next_seq = 1
        self.floor = 1
        self.seqs: deque[int] = deque()
        """Minted and at or above the floor, ascending."""
        self.closed: set[int] = set()
        """Those of `seqs` that D will not ask for any more."""
        self.retired: set[tuple[EngineId, int]] = set()
        self.deadlines = Deadlines()

    # The four doors of every endpoint.

    def handle(self, event: ConsumerSchedulerEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        heap = self.deadlines.heap
        return heap[0][0] if heap else None

    def armed(self) -> tuple[Timer, ...]:
        timers = [
            Timer(kind, request_id)
            for request_id, cell in self.cells.items()
            for kind in CELL_TIMERS
            if deadline_of(cell, kind) is not None
        ]
        return (*timers, *(Timer(TimerKind.SYNC, e) for e, p in self.peers.items() if p.sync_at is not None))

    def fork(self) -> ConsumerScheduler:
        other = object.__new__(ConsumerScheduler)
        for name in (
            "context",
            "incarnation",
            "pool_blocks",
            "peer_limit",
            "suspect_limit",
            "quarantined_blocks",
            "next_seq",
            "floor",
        ):
            setattr(other, name, getattr(self, name))
        other.cells = self.cells.copy()
        other.peers = {engine: peer.fork() for engine, peer in self.peers.items()}
        other.seqs = self.seqs.copy()
        other.closed = self.closed.copy()
        other.retired = self.retired.copy()
        other.deadlines = Deadlines()
        return other

    def fingerprint(self) -> Hashable:
        return (
            tuple(sorted(self.cells.values(), key=_cell_order)),
            self.next_seq,
            self.floor,
            tuple(sorted(self.closed)),
            tuple(sorted(self.retired)),
            tuple((e, tuple(sorted(p.heard.items())), p.sync_at, tuple(p.held)) for e, p in sorted(self.peers.items())),
        )

    # One funnel for every change of a cell.

    def _apply(self, cell: ConsumerCell, event: CellEvent, now: Instant) -> Effects:
        after, effects = step(cell, event, now, self.context)
        if after is cell:
            return effects or (Note(f"consumer ignored {type(event).__name__} in {cell.phase.name}"),)
        return effects + self._put(cell, after, now)

    def _put(self, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
        request_id = after.request_id
        if after.phase is GONE:
            return self._gone(before, after, now)
        self.cells[request_id] = after
        if after.phase is QUARANTINED and before.phase is not QUARANTINED:
            self.quarantined_blocks += len(after.allocation.blocks)
        push = self.deadlines.push
        if after.stall_until < before.stall_until:
            push(after.stall_until, Timer(TimerKind.STALL, request_id))
        if after.cancel_at < before.cancel_at:
            push(after.cancel_at, Timer(TimerKind.CANCEL, request_id))
        if after.reclaim_until < before.reclaim_until:
            push(after.reclaim_until, Timer(TimerKind.RECLAIM, request_id))
        return NOTHING

    def _gone(self, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
        """Bury a request, let the floor pass its seq, and let in who waited for its peer's limit."""
        del self.cells[after.request_id]
        if before.phase is QUARANTINED:
            self.quarantined_blocks -= len(before.allocation.blocks)
        peer = self.peers[after.params.prefill.engine]
        del peer.requests[after.request_id]
        if before.phase is not HELD:
            peer.blocks -= after.num_blocks
        if after.grant is not None and after.grant.reg.seq:
            self._close(after.grant.reg.seq)
        return self._make_room(peer, now) if peer.held else NOTHING

    def _close(self, seq: int) -> None:
        closed, seqs = self.closed, self.seqs
        closed.add(seq)
        while seqs and seqs[0] in closed:
            closed.remove(seqs.popleft())
        self.floor = seqs[0] if seqs else self.next_seq

    def _make_room(self, peer: PrefillPeer, now: Instant) -> Effects:
        effects: list[Effect] = []
        while peer.held:
            cell = self.cells.get(peer.held[0])
            if cell is None or cell.phase is not HELD:
                peer.held.popleft()
                continue
            if not self._has_room(peer, cell.num_blocks, now):
                break
            peer.held.popleft()
            peer.blocks += cell.num_blocks
            effects += self._apply(cell, RoomMade(), now)
        return tuple(effects)

    def _has_room(self, peer: PrefillPeer, num_blocks: int, now: Instant) -> bool:
        """Entry to quarantine is involuntary, so its limits are limits on admission (L3, L6)."""
        if self.quarantined_blocks > self.suspect_limit and self._suspect(peer, now):
            return False
        limit = self.pool_blocks if len(self.peers) == 1 else self.peer_limit
        return not peer.blocks or peer.blocks + num_blocks <= limit

    def _suspect(self, peer: PrefillPeer, now: Instant) -> bool:
        after = self.context.timers.suspect_ns
        return any(now - heard >= after for heard in peer.heard.values())

    def _touch(self, peer: PrefillPeer, now: Instant) -> None:
        """Something is open towards this peer: from now on it must show life, and be told what we want."""
        if peer.sync_at is None:
            every = self._sync_interval()
            peer.sync_at = now + every
            # A rank that moves nothing (a replica of another's heads) is never asked, so its silence means nothing.
            for rank in self._writers(peer):
                peer.heard[rank_address(peer.info.engine, rank)] = now
            self.deadlines.push(peer.sync_at, Timer(TimerKind.SYNC, peer.info.engine))

    def _writers(self, peer: PrefillPeer) -> tuple[int, ...]:
        try:
            pairs = self.context.geometry.pairs(peer.info.shards, self.context.engine.shards)
        except ValueError:
            return ()
        return tuple(dict.fromkeys(p_rank for p_rank, _ in pairs))

    def _sync_interval(self) -> int:
        timers = self.context.timers
        return timers.sync_ns if self.context.dialect.control_frames else timers.heartbeat_ns

    # From the engine.

    def _queued(self, event: DecodeQueued, now: Instant) -> Effects:
        request_id, params = event.request_id, event.params
        if request_id in self.cells:
            raise LocalProtocolError(f"request {request_id!r} is queued already; every attempt needs an id of its own")
        info = params.prefill
        peer = self.peers.get(info.engine)
        if peer is None:
            peer = self.peers[info.engine] = PrefillPeer(info)
        timers = self.context.timers
        wanted = event.deadline_ns or timers.deadline_ns
        if not self.context.dialect.control_frames and not self.context.pulls:
            wanted = min(wanted, timers.watchdog_ns)
        until = now + wanted
        held = bool(peer.held) or not self._has_room(peer, event.num_blocks, now)
        self.cells[request_id] = ConsumerCell(HELD if held else QUEUED, request_id, params, event.num_blocks, until)
        peer.requests[request_id] = None
        self.deadlines.push(until, Timer(TimerKind.DEADLINE, request_id))
        if peer.sync_at is None:
            self._touch(peer, now)
        if held:
            peer.held.append(request_id)
            return NOTHING
        peer.blocks += event.num_blocks
        return (Enqueue(request_id),)

    def _admitted(self, event: DecodeAdmitted, now: Instant) -> Effects:
        cell = self.cells.get(event.request_id)
        if cell is None or cell.phase is not QUEUED:
            raise LocalProtocolError(f"request {event.request_id!r} was admitted, but it is not queued")
        engine = self.context.engine.engine
        if self.context.dialect.control_frames:
            reg = Reg(engine, self.incarnation, self.next_seq, event.request_id)
            self.seqs.append(self.next_seq)
            self.next_seq += 1
        else:
            reg = Reg(engine, 0, 0, event.request_id)
        if self.context.floor != self.floor:
            self.context = msgspec.structs.replace(self.context, floor=self.floor)
        return self._apply(cell, Admission(reg, event), now)

    def _for_cell(self, event: DecodeHit | DecodeAborted | PrefillLegEnded, now: Instant) -> Effects:
        cell = self.cells.get(event.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        return self._apply(cell, event, now)

    # From the ranks.

    def _for_pair(self, event: PairReported | PairLanded | PairFailed, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        peer = self.peers[cell.params.prefill.engine]
        if event.sender in peer.heard:
            peer.heard[event.sender] = now
        return self._apply(cell, event, now)

    def _missing(self, event: PairMissing, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg.request_id)
        return NOTHING if cell is None else self._apply(cell, event, now)

    def _heard(self, event: PeerHeard, now: Instant) -> Effects:
        peer = self.peers.get(engine_of(event.peer))
        if peer is not None and event.peer in peer.heard:
            peer.heard[event.peer] = now
        return NOTHING

    def _to_all_of(self, engine: EngineId, event: CellEvent, now: Instant) -> Effects:
        peer = self.peers.get(engine)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests) if peer is not None else ():
            cell = self.cells.get(request_id)
            if cell is not None and (cell.phase, type(event)) != (HELD, PeerFenced):
                effects += self._apply(cell, event, now)
        return tuple(effects)

    def _fenced(self, event: PeerFenced, now: Instant) -> Effects:
        return self._to_all_of(engine_of(event.peer), event, now)

    def _restarted(self, event: PeerRestarted, now: Instant) -> Effects:
        """Every rank reports it; the first report counts, so that what registers with the new life is left alone."""
        life = (event.engine, event.retired)
        peer = self.peers.get(event.engine)
        if life in self.retired or peer is None:
            return NOTHING
        self.retired.add(life)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests):
            cell = self.cells.get(request_id)
            if cell is not None:
                queued = cell.phase in (HELD, QUEUED)
                told = RequestDoomed(Code.PEER_RESTARTED) if queued else PeerReborn()
                effects += self._apply(cell, told, now)
        return tuple(effects)

    # Time.

    def _time_reached(self, event: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.deadlines.first_due(now, self._deadline)) is not None:
            effects += self._timer_fired(TimerFired(timer), now)
        return tuple(effects)

    def _deadline(self, timer: Timer) -> Instant | None:
        if timer.kind is TimerKind.SYNC:
            return self.peers[str(timer.key)].sync_at
        cell = self.cells.get(str(timer.key))
        return None if cell is None else deadline_of(cell, timer.kind)

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        kind, key = event.timer.kind, str(event.timer.key)
        if kind is TimerKind.SYNC:
            return self._sync_due(self.peers[key], now)
        cell = self.cells.get(key)
        if cell is None:
            return (Note("consumer: timer of a dead cell"),)
        told: CellEvent
        if kind is TimerKind.CANCEL:
            told = CancelDue()
        elif kind is TimerKind.RECLAIM:
            told = ReclaimDue()
        else:
            told = RequestDoomed(Code.DEADLINE if kind is TimerKind.DEADLINE else Code.STALLED)
        effects = self._apply(cell, told, now)
        after = self.cells.get(key)
        if kind is TimerKind.CANCEL and after is not None:
            self.deadlines.push(after.cancel_at, Timer(TimerKind.CANCEL, key))
        return effects

    def _sync_due(self, peer: PrefillPeer, now: Instant) -> Effects:
        """Once a second while something is open: say what we want, and judge who has been silent for too long."""
        if not peer.requests:
            peer.sync_at = None
            peer.heard.clear()
            return NOTHING
        effects = self._judge(peer, now) if self.context.dialect.control_frames else NOTHING
        peer.sync_at = now + self._sync_interval()
        self.deadlines.push(peer.sync_at, Timer(TimerKind.SYNC, peer.info.engine))
        if peer.held:
            # Who was kept out because this peer was suspect has nobody else's end to wait for.
            effects += self._make_room(peer, now)
        return effects + self._sync(peer)

    def _judge(self, peer: PrefillPeer, now: Instant) -> Effects:
        dead = self.context.timers.dead_ns
        silent = frozenset(rank for rank, heard in peer.heard.items() if now - heard >= dead)
        if not silent:
            return NOTHING
        effects = self._to_all_of(peer.info.engine, RequestDoomed(Code.PEER_DEAD), now)
        for request_id in peer.requests:
            cell = self.cells[request_id]
            if cell.phase is QUARANTINED:
                effects += order_fences(cell, silent, self.context)
        return effects

    def _sync(self, peer: PrefillPeer) -> Effects:
        cells = [self.cells[request_id] for request_id in peer.requests]
        message: Message
        if self.context.dialect.control_frames:
            peer.synced += 1
            # A pulling D has no registrations: what it reads it must keep P interested in.
            pulls = self.context.pulls
            interest = tuple(c.params.xid for c in cells if c.phase in (HELD, QUEUED) or (pulls and c.phase is WAITING))
            open_regs = () if pulls else tuple(c.reg for c in cells if c.phase in (WAITING, QUARANTINED))
            message = Sync(peer.synced, self.floor, interest, open_regs)
        else:
            # C6: a resolved request is not renewed, or P and D would pin each other for ever (L4).
            message = Heartbeat(tuple(c.params.request_id for c in cells if c.phase is not QUARANTINED))
            if not message.request_ids:
                return NOTHING
        context = self.context
        effects: list[Effect] = []
        for rank, address in enumerate(context.ranks):
            try:
                sources = context.geometry.sources(rank, peer.info.shards, context.engine.shards)
            except ValueError:
                continue
            to = tuple(rank_address(peer.info.engine, p_rank) for p_rank in sources)
            effects.append(Tell(address, FrameOrdered(to, message)))
        return tuple(effects)


def _cell_order(cell: ConsumerCell) -> RequestId:
    return cell.request_id


_ON: dict[type, Callable[[Any, Any, Instant], Effects]] = {
    DecodeQueued: ConsumerScheduler._queued,
    DecodeAdmitted: ConsumerScheduler._admitted,
    DecodeHit: ConsumerScheduler._for_cell,
    DecodeAborted: ConsumerScheduler._for_cell,
    PrefillLegEnded: ConsumerScheduler._for_cell,
    PairReported: ConsumerScheduler._for_pair,
    PairLanded: ConsumerScheduler._for_pair,
    PairFailed: ConsumerScheduler._for_pair,
    PairMissing: ConsumerScheduler._missing,
    PeerHeard: ConsumerScheduler._heard,
    PeerFenced: ConsumerScheduler._fenced,
    PeerRestarted: ConsumerScheduler._restarted,
    TimeReached: ConsumerScheduler._time_reached,
    TimerFired: ConsumerScheduler._timer_fired,
}

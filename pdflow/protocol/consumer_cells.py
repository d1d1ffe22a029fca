"""What D's scheduler keeps, and the one funnel through which every change of a cell goes.

What is decided here follows from the change alone, whoever caused it: which blocks are in quarantine, up to where the
floor of sequence numbers may rise, and who is let in where a prefill engine's limit kept requests out of the queue.
What a request does in each phase stands in `consumer_rules`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Self

from pdflow.protocol.consumer import GONE, HELD, QUARANTINED, CellEvent, ConsumerCell, ConsumerContext, RoomMade
from pdflow.protocol.consumer_rules import deadline_of, step
from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, Note
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, rank_address
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import NEVER, Address, EngineId, Instant, RequestId

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

    def fingerprint(self) -> Hashable:
        """Without what the cells of its requests say already, but for their order."""
        return (tuple(sorted(self.heard.items())), self.sync_at, self.synced, tuple(self.held), tuple(self.requests))


class ConsumerCells:
    """The store of D's scheduler.

    Args:
        pool_blocks: size of the engine's KV pool in blocks.
        peer_fraction: the part of it that one of several prefill engines may bind (PROTOCOL 7.4: 25 %).
        suspect_fraction: with more of it than that in quarantine, a suspect peer gets nothing new (10 %).
    """

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
        "settings",
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
        self.settings = (
            *(engine, incarnation, dialect, timers, geometry),
            *(pulls, pool_blocks, peer_fraction, suspect_fraction),
        )
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

    def armed(self) -> tuple[Timer, ...]:
        timers = [
            Timer(kind, request_id)
            for request_id, cell in self.cells.items()
            for kind in CELL_TIMERS
            if deadline_of(cell, kind) is not None
        ]
        return (*timers, *(Timer(TimerKind.SYNC, e) for e, p in self.peers.items() if p.sync_at is not None))

    def fork(self) -> Self:
        other = type(self)(*self.settings)
        other.quarantined_blocks = self.quarantined_blocks
        other.next_seq, other.floor, other.context = self.next_seq, self.floor, self.context
        other.cells = self.cells.copy()
        other.peers = {engine: peer.fork() for engine, peer in self.peers.items()}
        other.seqs = self.seqs.copy()
        other.closed = self.closed.copy()
        other.retired = self.retired.copy()
        return other

    def fingerprint(self) -> Hashable:
        return (
            tuple(sorted(self.cells.values(), key=_cell_order)),
            self.next_seq,
            self.floor,
            tuple(sorted(self.closed)),
            tuple(sorted(self.retired)),
            tuple((e, peer.fingerprint()) for e, peer in sorted(self.peers.items())),
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
        if before.cancel_at != after.cancel_at != NEVER:
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

    # Who is let into the queue.

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
        if not self.context.dialect.limits_peers:
            return True
        if self.quarantined_blocks > self.suspect_limit and self._suspect(peer, now):
            return False
        limit = self.pool_blocks if len(self.peers) == 1 else self.peer_limit
        return not peer.blocks or peer.blocks + num_blocks <= limit

    def _suspect(self, peer: PrefillPeer, now: Instant) -> bool:
        after = self.context.timers.suspect_ns
        return any(now - heard >= after for heard in peer.heard.values())


def _cell_order(cell: ConsumerCell) -> RequestId:
    return cell.request_id

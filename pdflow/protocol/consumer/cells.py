"""The store of D's scheduler: its cells, and the consequences of every change of a cell.

Every change of a cell goes through `ConsumerCells.put`; `add` makes a cell. From the change alone follow the blocks in
quarantine, how far the floor of sequence numbers rises, which deadlines are pushed, and which requests are let into the
queue where a prefill engine's limit kept them out. What a request does in each phase stands in `consumer.rules`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import msgspec

from pdflow.protocol.consumer.cell import (
    GONE,
    HELD,
    QUARANTINED,
    QUEUED,
    CellEvent,
    ConsumerCell,
    ConsumerContext,
    RoomMade,
)
from pdflow.protocol.consumer.rules import deadline_of, step
from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.effects import NOTHING, Effect, Effects, Note
from pdflow.protocol.events import DecodeQueued
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, EngineId, Instant, RequestId

FIRST_SEQ = 1
"""The first registration's sequence number, and the floor until it is closed."""
CELL_TIMERS = (TimerKind.DEADLINE, TimerKind.STALL, TimerKind.CANCEL, TimerKind.RECLAIM)


class PrefillPeer:
    """The state of one prefill engine at D: its open requests, the blocks they bind, and when its ranks last
    responded."""

    __slots__ = ("blocks", "held", "info", "last_seen", "requests", "sync_at", "synced")

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.requests: dict[RequestId, None] = {}
        self.held: deque[RequestId] = deque()
        self.blocks = 0
        self.last_seen: dict[Address, Instant] = {}
        """When each P rank last responded. A rank that is missing here is not expected to respond."""
        self.sync_at: Instant | None = None
        self.synced = 0

    def fork(self) -> PrefillPeer:
        other = PrefillPeer(self.info)
        other.requests = self.requests.copy()
        other.held = self.held.copy()
        other.blocks = self.blocks
        other.last_seen = self.last_seen.copy()
        other.sync_at, other.synced = self.sync_at, self.synced
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state, without what the cells of its requests contain already, except their order."""
        return (
            tuple(sorted(self.last_seen.items())),
            self.sync_at,
            self.synced,
            tuple(self.held),
            tuple(self.requests),
        )


class ConsumerCells:
    """The cells of D's scheduler, their deadlines, and the state of each prefill engine.

    Args:
        context: what the rules see besides the cell.
        pool_blocks: size of the engine's KV pool in blocks.
        peer_limit: blocks that one of several prefill engines may bind.
        suspect_limit: with more blocks than that in quarantine, a suspect peer gets nothing new.
    """

    __slots__ = (
        "cells",
        "closed",
        "context",
        "deadlines",
        "floor",
        "next_seq",
        "peer_limit",
        "peers",
        "pool_blocks",
        "quarantined_blocks",
        "seqs",
        "suspect_limit",
    )

    def __init__(self, context: ConsumerContext, pool_blocks: int, peer_limit: int, suspect_limit: int) -> None:
        self.context = context
        self.pool_blocks = pool_blocks
        self.peer_limit = peer_limit
        self.suspect_limit = suspect_limit
        self.cells: dict[RequestId, ConsumerCell] = {}
        self.peers: dict[EngineId, PrefillPeer] = {}
        self.quarantined_blocks = 0
        self.next_seq = FIRST_SEQ
        self.floor = FIRST_SEQ
        self.seqs: deque[int] = deque()
        """Sequence numbers given out, at or above the floor, ascending."""
        self.closed: set[int] = set()
        """The members of `seqs` that D will not ask for any more."""
        self.deadlines = Deadlines()

    def fork(self) -> ConsumerCells:
        other = ConsumerCells(self.context, self.pool_blocks, self.peer_limit, self.suspect_limit)
        other.cells = self.cells.copy()
        other.peers = {engine: peer.fork() for engine, peer in self.peers.items()}
        other.quarantined_blocks = self.quarantined_blocks
        other.next_seq, other.floor = self.next_seq, self.floor
        other.seqs = self.seqs.copy()
        other.closed = self.closed.copy()
        return other

    def fingerprint(self) -> tuple[Hashable, ...]:
        """The cells, next_seq, the floor, what is closed above it, and the peers."""
        return (
            tuple(sorted(self.cells.values(), key=_cell_order)),
            self.next_seq,
            self.floor,
            tuple(sorted(self.closed)),
            tuple((e, peer.fingerprint()) for e, peer in sorted(self.peers.items())),
        )

    # Deadlines: those of the cells, and when each peer is due for a SYNC.

    def armed(self) -> tuple[Timer, ...]:
        """Every timer that some cell or peer wants."""
        timers = [
            Timer(kind, request_id)
            for request_id, cell in self.cells.items()
            for kind in CELL_TIMERS
            if deadline_of(cell, kind) is not None
        ]
        return (*timers, *(Timer(TimerKind.SYNC, e) for e, p in self.peers.items() if p.sync_at is not None))

    def deadline(self, timer: Timer) -> Instant | None:
        """When an armed timer is due."""
        if timer.kind is TimerKind.SYNC:
            return self.peers[str(timer.key)].sync_at
        cell = self.cells.get(str(timer.key))
        return None if cell is None else deadline_of(cell, timer.kind)

    def sync_again(self, peer: PrefillPeer, at: Instant) -> None:
        """Schedule this peer's next SYNC at `at`."""
        peer.sync_at = at
        self.deadlines.push(at, Timer(TimerKind.SYNC, peer.info.engine))

    # Cells.

    def add(self, queued: DecodeQueued, peer: PrefillPeer, until: Instant, now: Instant) -> bool:
        """Make the cell of a new request. Returns whether it is let into the engine's queue, or else held."""
        request_id, num_blocks = queued.request_id, queued.num_blocks
        held = bool(peer.held) or not self._has_room(peer, num_blocks, now)
        self.cells[request_id] = ConsumerCell(HELD if held else QUEUED, request_id, queued.params, num_blocks, until)
        peer.requests[request_id] = None
        self.deadlines.push(until, Timer(TimerKind.DEADLINE, request_id))
        if held:
            peer.held.append(request_id)
        else:
            peer.blocks += num_blocks
        return not held

    def apply(self, cell: ConsumerCell, event: CellEvent, now: Instant) -> Effects:
        """Follow the rule for this event. Returns the rule's effects, and those of the cell's change."""
        after, effects = step(cell, event, now, self.context)
        if after is cell:
            return effects or (Note(f"consumer ignored {type(event).__name__} in {cell.phase.name}"),)
        return effects + self.put(cell, after, now)

    def put(self, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
        """Store a changed cell: every change of a cell goes through here. Returns what follows for other cells."""
        request_id = after.request_id
        if after.phase is GONE:
            return self._remove(before, after, now)
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

    def _remove(self, before: ConsumerCell, after: ConsumerCell, now: Instant) -> Effects:
        """Remove a request, let the floor pass its seq, and let in what its peer's limit kept out."""
        del self.cells[after.request_id]
        if before.phase is QUARANTINED:
            self.quarantined_blocks -= len(before.allocation.blocks)
        peer = self.peers[after.params.prefill.engine]
        del peer.requests[after.request_id]
        if before.phase is not HELD:
            peer.blocks -= after.num_blocks
        if after.registration is not None and after.registration.reg.seq:
            self._close(after.registration.reg.seq)
        return self.make_room(peer, now) if peer.held else NOTHING

    # Sequence numbers.

    def mint(self) -> int:
        """Return the sequence number of a new registration. From then on the rules name the floor as it is now."""
        if self.context.floor != self.floor:
            self.context = msgspec.structs.replace(self.context, floor=self.floor)
        seq = self.next_seq
        self.seqs.append(seq)
        self.next_seq = seq + 1
        return seq

    def _close(self, seq: int) -> None:
        closed, seqs = self.closed, self.seqs
        closed.add(seq)
        while seqs and seqs[0] in closed:
            closed.remove(seqs.popleft())
        self.floor = seqs[0] if seqs else self.next_seq

    # Which requests are let into the queue.

    def add_peer(self, info: EngineInfo) -> PrefillPeer:
        """Add a prefill engine that was unknown."""
        peer = self.peers[info.engine] = PrefillPeer(info)
        return peer

    def make_room(self, peer: PrefillPeer, now: Instant) -> Effects:
        """Enqueue requests that this peer's block limit holds back, in their order, as far as it allows."""
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
            effects += self.apply(cell, RoomMade(), now)
        return tuple(effects)

    def _has_room(self, peer: PrefillPeer, num_blocks: int, now: Instant) -> bool:
        """Whether the peer's limits admit so many more blocks. Entry to quarantine is involuntary, so its limits are
        limits on admission (L3, L6)."""
        if not self.context.dialect.limits_peers:
            return True
        if self.quarantined_blocks > self.suspect_limit and self._suspect(peer, now):
            return False
        limit = self.pool_blocks if len(self.peers) == 1 else self.peer_limit
        return not peer.blocks or peer.blocks + num_blocks <= limit

    def _suspect(self, peer: PrefillPeer, now: Instant) -> bool:
        after = self.context.timers.suspect_ns
        return any(now - last_seen >= after for last_seen in peer.last_seen.values())


def _cell_order(cell: ConsumerCell) -> RequestId:
    return cell.request_id

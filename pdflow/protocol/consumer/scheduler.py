"""The endpoint of D's scheduler: dispatches events to cells, detects dead prefill engines, and sends SYNCs.

It decides when a prefill engine is dead, and what a SYNC names. It owns a store of cells (`consumer.cells`), where what
follows from a cell's change stands, and which requests must wait for an engine at its block limit. What a request does
in each phase stands in `consumer.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias, TypeVar, cast

from msgspec import UNSET

from pdflow.protocol.consumer.cell import (
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
    order_fences,
)
from pdflow.protocol.consumer.cells import FIRST_SEQ, ConsumerCells, PrefillPeer
from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, Effect, Effects, Enqueue, Note, SendLocal
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import (
    ConnectionLost,
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
    PeerResponded,
    PeerRestarted,
    PrefillLegEnded,
    ReconnectRefused,
    TimeReached,
    TimerFired,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Reg, engine_of, rank_address
from pdflow.protocol.messages import Code, Heartbeat, Message, Sync
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import EngineId, Instant, RequestId


class ConsumerScheduler:
    """The endpoint of one decode engine's scheduler.

    Args:
        pulls: nixl-pull, D reads. Otherwise P writes.
        pool_blocks: size of the engine's KV pool in blocks.
        peer_fraction: the part of it that one of several prefill engines may bind (spec 2.13: 25 %).
        suspect_fraction: with more of it than that in quarantine, a suspect peer gets nothing new (10 %).
    """

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ("engine", "incarnation", "retired", "store")

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
        context = ConsumerContext(engine, ranks, dialect, timers, geometry, pulls, FIRST_SEQ)
        self.engine = engine
        self.incarnation = incarnation
        self.store = ConsumerCells(
            context, pool_blocks, int(pool_blocks * peer_fraction), int(pool_blocks * suspect_fraction)
        )
        self.retired: set[tuple[EngineId, int]] = set()
        """(prefill engine, incarnation) pairs that have been replaced by a later incarnation."""

    # What every endpoint has.

    def handle(self, event: ConsumerSchedulerEvent, now: Instant) -> Effects:
        """Handle one event and return its effects."""
        return ON[type(event)](self, event, now)

    def wake_at(self) -> Instant | None:
        return self.store.deadlines.wake_at()

    def armed(self) -> tuple[Timer, ...]:
        return self.store.armed()

    def deadline(self, timer: Timer) -> Instant | None:
        """When an armed timer is due."""
        return self.store.deadline(timer)

    @property
    def cells(self) -> Mapping[RequestId, ConsumerCell]:
        """Every request that is not over, or has blocks in quarantine. To be read only."""
        return self.store.cells

    def unfinished(self) -> Mapping[RequestId, ConsumerCell]:
        """Every transfer that is not over, blocks in quarantine included. To be read only."""
        return self.store.cells

    @property
    def deadlines(self) -> Deadlines:
        return self.store.deadlines

    def fork(self) -> ConsumerScheduler:
        store = self.store
        context = store.context
        other = ConsumerScheduler(
            self.engine,
            self.incarnation,
            context.dialect,
            context.timers,
            context.geometry,
            context.pulls,
            store.pool_blocks,
        )
        other.store = store.fork()
        other.retired = self.retired.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state, in a fixed order that the digests of recorded counterexamples depend on."""
        *cells, peers = self.store.fingerprint()
        return (*cells, tuple(sorted(self.retired)), peers)

    # From the engine.

    def _queued(self, event: DecodeQueued, now: Instant) -> Effects:
        request_id = event.request_id
        store = self.store
        context = store.context
        if request_id in store.cells:
            raise LocalProtocolError(f"request {request_id!r} is queued already; every attempt needs an id of its own")
        info = event.params.prefill
        peer = store.peers.get(info.engine) or store.add_peer(info)
        if peer.sync_at is not None and peer.sync_at < now and not peer.requests:
            # Overdue, since a driver may stand still while nothing is open. Judged behind this request, a silence in
            # which P was never asked would be its death.
            self._sync_due(peer, now)
        timers, dialect = context.timers, context.dialect
        timeout_ns = event.deadline_ns or timers.deadline_ns
        if dialect.watchdog_resolves and not dialect.control_frames and not context.pulls:
            timeout_ns = min(timeout_ns, timers.watchdog_ns)
        enters = store.add(event, peer, now + timeout_ns, now)
        if peer.sync_at is None:
            self._touch(peer, now)
        return (Enqueue(request_id),) if enters else NOTHING

    def _admitted(self, event: DecodeAdmitted, now: Instant) -> Effects:
        store = self.store
        cell = store.cells.get(event.request_id)
        if cell is None or cell.phase is not QUEUED:
            raise LocalProtocolError(f"request {event.request_id!r} was admitted, but it is not queued")
        engine = self.engine.engine
        if store.context.dialect.control_frames:
            reg = Reg(engine, self.incarnation, store.mint(), event.request_id)
        else:
            reg = Reg(engine, 0, 0, event.request_id)
        return store.apply(cell, Admission(reg, event), now)

    def _for_cell(self, event: DecodeHit | DecodeAborted | PrefillLegEnded, now: Instant) -> Effects:
        cell = self.store.cells.get(event.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        return self.store.apply(cell, event, now)

    # From the ranks.

    def _for_pair(self, event: PairReported | PairLanded | PairFailed, now: Instant) -> Effects:
        store = self.store
        cell = store.cells.get(event.op.reg.request_id)
        if cell is None:
            return (Note(f"consumer: {type(event).__name__} for nothing open"),)
        peer = store.peers[cell.params.prefill.engine]
        if event.sender in peer.last_seen and not (type(event) is PairFailed and event.unsent):
            peer.last_seen[event.sender] = now
        return store.apply(cell, event, now)

    def _missing(self, event: PairMissing, now: Instant) -> Effects:
        cell = self.store.cells.get(event.op.reg.request_id)
        return NOTHING if cell is None else self.store.apply(cell, event, now)

    def _peer_responded(self, event: PeerResponded, now: Instant) -> Effects:
        peer = self.store.peers.get(engine_of(event.peer))
        if peer is not None and event.peer in peer.last_seen:
            peer.last_seen[event.peer] = now
        return NOTHING

    def _connection_lost(self, event: ConnectionLost, now: Instant) -> Effects:
        """Bring the next SYNC forward: it reconnects, and P repeats in its answer what it has sent over the lost
        connection. A peer whose connections break at once is asked every `reconnect_ns`, no faster; one that cannot be
        reached, as its back-off allows."""
        store = self.store
        peer = store.peers.get(engine_of(event.peer))
        at = now + store.context.timers.reconnect_ns
        if peer is not None and peer.sync_at is not None and at < peer.sync_at:
            store.sync_again(peer, at)
        return NOTHING

    def _to_all_of(self, engine: EngineId, event: CellEvent, now: Instant) -> Effects:
        store = self.store
        peer = store.peers.get(engine)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests) if peer is not None else ():
            cell = store.cells.get(request_id)
            if cell is not None and (cell.phase, type(event)) != (HELD, PeerFenced):
                effects += store.apply(cell, event, now)
        return tuple(effects)

    def _fenced(self, event: PeerFenced, now: Instant) -> Effects:
        return self._to_all_of(engine_of(event.peer), event, now)

    def _reconnect_refused(self, event: ReconnectRefused, now: Instant) -> Effects:
        store = self.store
        peer = store.peers.get(engine_of(event.peer))
        effects: list[Effect] = []
        for request_id in tuple(peer.requests) if peer is not None else ():
            cell = store.cells[request_id]
            if cell.phase is WAITING:
                effects += store.apply(cell, event, now)
        return tuple(effects)

    def _restarted(self, event: PeerRestarted, now: Instant) -> Effects:
        """Fail what was registered with a retired incarnation. Every rank reports it; only the first report counts, so
        that requests registered with the new incarnation are not affected. Nor is a request whose prompt another
        incarnation has computed, by P's answer: the next SYNC repairs a REG that the retired one has not answered."""
        retired = (event.engine, event.retired)
        store = self.store
        peer = store.peers.get(event.engine)
        if retired in self.retired or peer is None:
            return NOTHING
        self.retired.add(retired)
        effects: list[Effect] = []
        for request_id in tuple(peer.requests):
            cell = store.cells.get(request_id)
            if cell is not None and self._computed_by_retired(cell):
                queued = cell.phase in (HELD, QUEUED)
                cell_event = RequestFailed(Code.PEER_RESTARTED) if queued else PrefillRestarted()
                effects += store.apply(cell, cell_event, now)
        return tuple(effects)

    def _computed_by_retired(self, cell: ConsumerCell) -> bool:
        """Whether a retired incarnation of P has computed the prompt of a cell, or nobody has said which."""
        computed_by = cell.params.incarnation
        return computed_by is UNSET or (cell.params.prefill.engine, computed_by) in self.retired

    # Time.

    def _time_reached(self, _: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.store.deadlines.first_due(now, self.store.deadline)) is not None:
            effects += self._due(timer, now)
        return tuple(effects)

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        return self._due(event.timer, now)

    def _due(self, timer: Timer, now: Instant) -> Effects:
        store, kind, key = self.store, timer.kind, str(timer.key)
        if kind is TimerKind.SYNC:
            return self._sync_due(store.peers[key], now)
        cell = store.cells.get(key)
        if cell is None:
            return (Note("consumer: timer of a dead cell"),)
        cell_event: CellEvent
        if kind is TimerKind.CANCEL:
            cell_event = CancelDue()
        elif kind is TimerKind.RECLAIM:
            cell_event = ReclaimDue()
        else:
            cell_event = RequestFailed(Code.DEADLINE if kind is TimerKind.DEADLINE else Code.STALLED)
        return store.apply(cell, cell_event, now)

    # Whether a peer shows life, and what it is told.

    def _touch(self, peer: PrefillPeer, now: Instant) -> None:
        """Start watching a peer with which something is open: its ranks must respond, and SYNCs are sent to it."""
        # A rank that moves nothing (a replica of another's heads) is never asked, so its silence means nothing.
        for rank in self._writers(peer):
            peer.last_seen[rank_address(peer.info.engine, rank)] = now
        self._arm_sync(peer, now)

    def _writers(self, peer: PrefillPeer) -> tuple[int, ...]:
        context = self.store.context
        try:
            pairs = context.geometry.pairs(peer.info.shards, self.engine.shards)
        except ValueError:
            return ()
        return tuple(dict.fromkeys(p_rank for p_rank, _ in pairs))

    def _arm_sync(self, peer: PrefillPeer, now: Instant) -> None:
        context = self.store.context
        timers = context.timers
        every = timers.sync_ns if context.dialect.control_frames else timers.heartbeat_ns
        self.store.sync_again(peer, now + every)

    def _sync_due(self, peer: PrefillPeer, now: Instant) -> Effects:
        """Send a SYNC, once a second while something is open, and fail the requests of a peer silent for too long."""
        if not peer.requests or self._all_given_up(peer):
            peer.sync_at = None
            peer.last_seen.clear()
            return NOTHING
        effects = self._fail_silent(peer, now) if self.store.context.dialect.control_frames else NOTHING
        self._arm_sync(peer, now)
        if peer.held:
            # Who was kept out because this peer was suspect has nobody else's end to wait for.
            effects += self.store.make_room(peer, now)
        return effects + self._sync(peer)

    def _all_given_up(self, peer: PrefillPeer) -> bool:
        """Whether all requests of a peer are past renewing: in vllm-stock, where only a completion frees their
        blocks."""
        if self.store.context.dialect.quarantine_ends:
            return False
        return all(self.store.cells[request_id].phase is QUARANTINED for request_id in peer.requests)

    def _fail_silent(self, peer: PrefillPeer, now: Instant) -> Effects:
        store = self.store
        dead = store.context.timers.dead_ns
        silent = frozenset(rank for rank, last_seen in peer.last_seen.items() if now - last_seen >= dead)
        if not silent:
            return NOTHING
        effects: list[Effect] = [*self._to_all_of(peer.info.engine, RequestFailed(Code.PEER_DEAD), now)]
        for request_id in peer.requests:
            cell = store.cells[request_id]
            if cell.phase is QUARANTINED:
                effects += order_fences(cell, silent, store.context)
        return tuple(effects)

    def _sync(self, peer: PrefillPeer) -> Effects:
        store = self.store
        context = store.context
        cells = [store.cells[request_id] for request_id in peer.requests]
        message: Message
        if context.dialect.control_frames:
            peer.synced += 1
            # A pulling D has no registrations: what it reads it must keep P interested in.
            pulls = context.pulls
            interest = tuple(c.params.xid for c in cells if c.phase in (HELD, QUEUED) or (pulls and c.phase is WAITING))
            open_regs = () if pulls else tuple(c.reg for c in cells if c.phase in (WAITING, QUARANTINED))
            message = Sync(peer.synced, store.floor, interest, open_regs)
        else:
            # C6: a resolved request is not renewed, or P and D would pin each other for ever (L4).
            message = Heartbeat(tuple([self._prefill_id(c) for c in cells if c.phase is not QUARANTINED]))
            if not message.request_ids:
                return NOTHING
        effects: list[Effect] = []
        for rank, address in enumerate(context.ranks):
            try:
                sources = context.geometry.sources(rank, peer.info.shards, self.engine.shards)
            except ValueError:
                continue
            to = tuple(rank_address(peer.info.engine, p_rank) for p_rank in sources)
            effects.append(SendLocal(address, FrameOrdered(to, message)))
        return tuple(effects)

    def _prefill_id(self, cell: ConsumerCell) -> RequestId:
        """Return the id by which a heartbeat names this request's prompt. P's answer, which names blocks, has P's own
        id; a vLLM proxy that did not wait for that answer gives one of its own (R05)."""
        params = cell.params
        return params.request_id if params.blocks or self.store.context.dialect.knows_prefill_id else params.xid


Handler: TypeAlias = Callable[[ConsumerScheduler, ConsumerSchedulerEvent, Instant], Effects]
"""A handler as the table stores it: it is called only with events of its row."""
E = TypeVar("E", bound=ConsumerSchedulerEvent)


def _on(kind: type[E], handler: Callable[[ConsumerScheduler, E, Instant], Effects]) -> tuple[type, Handler]:
    """A row of the table. That the handler takes this kind of event is checked by its types."""
    return kind, cast(Handler, handler)


ON: Final[dict[type, Handler]] = dict(
    (
        _on(DecodeQueued, ConsumerScheduler._queued),
        _on(DecodeAdmitted, ConsumerScheduler._admitted),
        _on(DecodeHit, ConsumerScheduler._for_cell),
        _on(DecodeAborted, ConsumerScheduler._for_cell),
        _on(PrefillLegEnded, ConsumerScheduler._for_cell),
        _on(PairReported, ConsumerScheduler._for_pair),
        _on(PairLanded, ConsumerScheduler._for_pair),
        _on(PairFailed, ConsumerScheduler._for_pair),
        _on(PairMissing, ConsumerScheduler._missing),
        _on(PeerResponded, ConsumerScheduler._peer_responded),
        _on(ConnectionLost, ConsumerScheduler._connection_lost),
        _on(PeerFenced, ConsumerScheduler._fenced),
        _on(ReconnectRefused, ConsumerScheduler._reconnect_refused),
        _on(PeerRestarted, ConsumerScheduler._restarted),
        _on(TimeReached, ConsumerScheduler._time_reached),
        _on(TimerFired, ConsumerScheduler._timer_fired),
    )
)
"""The handler of each kind of event; tests/protocol/test_consumer_cells.py holds it against ConsumerSchedulerEvent."""

"""The store of one P rank: its cells, the state beside them, and the only way to change a cell.

The key of a cell is its registration or, while it has none, its xid. What is decided here follows from the change
alone, whatever caused it: the new key of the cell, the content of its tombstone, when its product is released,
and which peers must be connected before it writes. Which change an event causes stands in `producer.writes` and
`lease`; which cell it means, in `producer.frames` and `producer.rank`.

No other file puts a cell into `cells` or takes one out (tests/protocol/test_producer_cells.py): what an event changes
goes through `apply`; a new cell through `add`; a change that moves no key and no phase through `update`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeAlias

import msgspec

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.effects import NOTHING, BumpWord, Effects, Handshake, Note, SendLocal
from pdflow.protocol.events import ShardReleased
from pdflow.protocol.ids import Reg, rank_address
from pdflow.protocol.messages import Code, Register, SyncItem
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.cell import (
    GONE,
    IN_FLIGHT,
    JOINING,
    LEASED,
    OPEN,
    READY,
    SETTLING,
    CellEvent,
    LeaseEnded,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
)
from pdflow.protocol.producer.lease import released, renewed
from pdflow.protocol.producer.matching import Matching
from pdflow.protocol.producer.rules import step
from pdflow.protocol.producer.tombstones import Tombstones
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, EngineId, Instant, RequestId, Xid, in_order

Key: TypeAlias = Reg | Xid
"""The key of a cell: its registration or, while it has none, its xid."""

EARLY_LIMIT = 4096
"""The most RELEASEs and completions kept from before their prompt was finished; the oldest are forgotten first."""


class ProducerCells:
    """The cells of a P rank by key, their deadlines, and what the rank remembers of peers and of ended registrations.

    Args:
        engine: this engine's id, which is also the address of its scheduler.
        context: what rules may know: this rank, its dialect, timers and geometry. `connected` is False in it.
    """

    __slots__ = (
        "cells",
        "connected_context",
        "context",
        "dead_xids",
        "deadlines",
        "early",
        "early_readers",
        "ended",
        "flushes",
        "interests",
        "keys",
        "matching",
        "peers",
        "scheduler",
        "tombs",
        "waiting",
    )

    def __init__(self, engine: EngineId, context: ProducerContext) -> None:
        self.scheduler: Address = engine
        self.context = context
        self.connected_context = msgspec.structs.replace(context, connected=True)
        """`context` for a cell whose target ranks are all connected."""
        self.cells: dict[Key, ProducerCell] = {}
        self.keys: dict[Xid, tuple[Key, ...]] = {}
        """The keys of all cells of one prompt, oldest first."""
        self.matching = Matching(context.dialect.one_candidate_only)
        self.tombs: dict[EngineId, Tombstones] = {}
        self.dead_xids: OrderedDict[Xid, Code] = OrderedDict()
        self.early: OrderedDict[Xid, None] = OrderedDict()
        """RELEASEs of prompts that this rank has not seen finished."""
        self.early_readers: OrderedDict[RequestId | Xid, dict[int, int]] = OrderedDict()
        """Readers of such prompts: D rank -> how many D ranks read this rank. By xid, or in vllm-compat, whose
        completions have no xid, by P's request id."""
        self.ended: OrderedDict[Reg, None] = OrderedDict()
        """Registrations that have ended, so that a late copy never writes again (vllm-compat, which has no floor)."""
        self.interests: dict[Address, frozenset[Xid]] = {}
        self.peers = Peers(context.dialect)
        self.waiting: dict[Address, dict[Reg, None]] = {}
        self.flushes: dict[Address, tuple[Reg, ...]] = {}
        """By peer, the registration whose WRITEs each flush under way is for, oldest first."""
        self.deadlines = Deadlines()

    def fork(self) -> ProducerCells:
        other = ProducerCells(self.scheduler, self.context)
        other.cells = self.cells.copy()
        other.keys = self.keys.copy()
        other.matching = self.matching.fork()
        other.tombs = {engine: tombs.fork() for engine, tombs in self.tombs.items()}
        other.dead_xids = self.dead_xids.copy()
        other.early = self.early.copy()
        other.early_readers = OrderedDict((name, readers.copy()) for name, readers in self.early_readers.items())
        other.ended = self.ended.copy()
        other.interests = self.interests.copy()
        other.peers = self.peers.fork()
        other.flushes = self.flushes.copy()
        other.waiting = {peer: regs.copy() for peer, regs in self.waiting.items()}
        return other

    def fingerprint(self) -> Hashable:
        return (
            tuple(sorted(self.cells.values(), key=_cell_order)),
            in_order([(e, t.fingerprint()) for e, t in self.tombs.items()]),
            tuple(self.dead_xids.items()),
            in_order(self.early),
            in_order([(name, tuple(readers.items())) for name, readers in self.early_readers.items()]),
            in_order([msgspec.structs.astuple(reg) for reg in self.ended]),
            in_order([(a, in_order(x)) for a, x in self.interests.items()]),
            in_order(self.flushes.items()),
            in_order([(peer, tuple(regs)) for peer, regs in self.waiting.items()]),
            self.peers.fingerprint(),
            self.matching.fingerprint(),
        )

    # The funnel for every change of a cell.

    def apply(self, key: Key, cell: ProducerCell, event: CellEvent, now: Instant, connected: bool = False) -> Effects:
        """Step the cell under `key` and store what it becomes.

        `connected` matters to the events that may complete a match: whether all its target ranks are.
        """
        after, effects = step(cell, event, now, self.connected_context if connected else self.context)
        if after is cell:
            return effects or (Note(f"producer ignored {type(event).__name__} in {cell.phase.name}"),)
        return effects + self.put(key, cell, after, now)

    def put(self, key: Key, before: ProducerCell, after: ProducerCell, now: Instant) -> Effects:
        """Store a changed cell under its key, remove it if it has ended, connect the ranks that it must write."""
        verdict = after.verdict
        if verdict is not None and verdict is not before.verdict:
            self.add_tombstone(verdict)
        if after.phase is GONE:
            return self._gone(key, after)
        if after.phase is LEASED and type(key) is Reg and self._shared(after.xid, key):
            # Another registration shares this prompt: it alone says how long the prompt is kept.
            return self._gone(key, after.becoming_gone(Code.NONE))
        home: Key = after.xid if after.reg is None else after.reg
        if home is not key and home != key:
            del self.cells[key]
            self._rekey(after.xid, key, home)
            if type(key) is Reg:
                self.deadlines.push(after.lease_until, Timer(TimerKind.LEASE, after.xid))
        self.cells[home] = after
        if after.freed and not before.freed:
            return self._release_shard(after, Code.EXPIRED)
        if after.phase is READY and (before.phase is not READY or after.registrations is not before.registrations):
            return self.connect(after, now)
        if after.phase is SETTLING and before.phase is IN_FLIGHT and not after.failed:
            for registration in after.registrations:
                peer = rank_address(registration.reg.engine, registration.d_rank)
                self.flushes[peer] = (*self.flushes.get(peer, ()), registration.reg)
        if after.join_until != before.join_until and after.phase is JOINING and after.reg is not None:
            self.deadlines.push(after.join_until, Timer(TimerKind.JOIN, after.reg))
        return NOTHING

    def add(self, key: Key, cell: ProducerCell) -> None:
        """Store a new cell."""
        self.cells[key] = cell
        self.keys[cell.xid] = (*self.keys.get(cell.xid, ()), key)

    def update(self, key: Key, cell: ProducerCell) -> None:
        """Store a cell of which only instants and marks have changed: neither its key nor its phase."""
        self.cells[key] = cell

    def adopt(self, reg: Reg, xid: Xid) -> None:
        """Give a waiting registration without an xid the prompt that was found for it (vllm-compat)."""
        cell = self.cells[reg]
        self._rekey(cell.xid, reg, None)
        self.cells[reg] = cell.with_xid(xid)
        self.keys[xid] = (reg,)

    def _gone(self, key: Key, cell: ProducerCell) -> Effects:
        """Release the product of a cell that has ended, if no other cell shares it."""
        del self.cells[key]
        self._rekey(cell.xid, key, None)
        if not self.context.dialect.matches_by_xid:
            self._unmatch(cell)
        keys = self.keys.get(cell.xid)
        if cell.source is None or cell.freed or (keys and any(self.cells[k].source is not None for k in keys)):
            return NOTHING
        return self._release_shard(cell, cell.end)

    def _release_shard(self, cell: ProducerCell, code: Code) -> Effects:
        """Release this rank's shard of a product, its lease word bumped first. No other code does so."""
        source = cell.source
        assert source is not None
        if code is Code.EXPIRED:
            self.remember_dead(cell.xid, Code.EXPIRED)
        if not self.context.dialect.registrations_end:
            self._forget_namesakes(cell.request_id)
        released: Effects = (SendLocal(self.scheduler, ShardReleased(cell.xid, self.context.rank, code)),)
        return released if source.lease_word is None else (BumpWord(source.lease_word), *released)

    def _forget_namesakes(self, request_id: RequestId) -> None:
        """Forget the registrations that wait under P's own id of a released product, and no other, as vLLM does. As D
        mints an id of its own, there is hardly ever one (`push_worker.py` of vLLM 0.32.0)."""
        for reg in self.matching.registrations.get(request_id, ()):
            cell = self.cells.pop(reg)
            self._rekey(cell.xid, reg, None)
            self.matching.drop_registration(reg)

    def _shared(self, xid: Xid, key: Key) -> bool:
        keys = self.keys[xid]
        return len(keys) > 1 and any(k != key and self.cells[k].source is not None for k in keys)

    def _unmatch(self, cell: ProducerCell) -> None:
        if cell.reg is not None:
            self.matching.drop_registration(cell.reg)
        if cell.source is not None and cell.xid not in self.keys:
            self.matching.drop_product(cell.xid, cell.request_id)

    def _rekey(self, xid: Xid, old: Key, new: Key | None) -> None:
        keys = self.keys[xid]
        if len(keys) == 1:
            if new is None:
                del self.keys[xid]
            else:
                self.keys[xid] = (new,)
            return
        others = tuple(k for k in keys if k != old)
        self.keys[xid] = others if new is None else (*others, new)

    # Leases of a prompt, which all its cells share.

    def renew(self, xid: Xid, until: Instant) -> None:
        """Renew the lease of a prompt that D wants (`lease.renewed`)."""
        for key in self.keys.get(xid, ()):
            self.cells[key] = renewed(self.cells[key], until)

    def shorten(self, xid: Xid, until: Instant) -> None:
        """Shorten the lease of a prompt that D has released (`lease.released`)."""
        for key in self.keys.get(xid, ()):
            cell = self.cells[key]
            shorter = released(cell, until)
            if shorter is not cell:
                self.cells[key] = shorter
                self.deadlines.push(until, Timer(TimerKind.LEASE, xid))

    def end_lease(self, xid: Xid, now: Instant) -> Effects:
        """End the lease of a prompt: every transfer of it that has not begun ends."""
        effects: Effects = NOTHING
        for key in self.keys.get(xid, ()):
            cell = self.cells[key]
            if cell.source is not None and not cell.expired:
                effects += self.apply(key, cell, LeaseEnded(), now)
        return effects

    # What has ended, and what came before its prompt.

    def tombstones(self, engine: EngineId, incarnation: int) -> Tombstones:
        """Return the tombstones of this incarnation of a D engine; a new incarnation begins without any."""
        tombs = self.tombs.get(engine)
        if tombs is None or tombs.incarnation != incarnation:
            tombs = self.tombs[engine] = Tombstones(incarnation, self.context.window)
        return tombs

    def add_tombstone(self, item: SyncItem) -> None:
        """Remember how a registration has ended, so that a late copy of it makes no cell."""
        dialect = self.context.dialect
        if not dialect.floor:
            if not dialect.registrations_end:
                return
            if len(self.ended) >= EARLY_LIMIT:
                self.ended.popitem(last=False)
            self.ended[item.reg] = None
        else:
            tombs = self.tombs.get(item.reg.engine)
            if tombs is not None and tombs.incarnation == item.reg.incarnation:
                tombs.add_tombstone(item)

    def remember_dead(self, xid: Xid, code: Code) -> None:
        """Remember a prompt that is gone, so that a late registration is refused at once, not after `no_request_ns`."""
        if len(self.dead_xids) >= EARLY_LIMIT:
            self.dead_xids.popitem(last=False)
        self.dead_xids[xid] = code

    def remember_early(self, xid: Xid) -> None:
        """Remember a RELEASE that arrived before its prompt was finished; it counts when that is."""
        if xid in self.dead_xids:
            return
        if len(self.early) >= EARLY_LIMIT:
            self.early.popitem(last=False)
        self.early[xid] = None

    def remember_reader(self, name: RequestId | Xid, d_rank: int, readers: int) -> None:
        """Remember that a D rank has read a prompt that this rank has not seen finished, or whose lease is over."""
        if len(self.early_readers) >= EARLY_LIMIT:
            self.early_readers.popitem(last=False)
        self.early_readers.setdefault(name, {})[d_rank] = readers

    # Who must be connected before a cell writes.

    def connected(self, cell: ProducerCell, event: CellEvent) -> bool:
        """Whether every rank that this cell would write after `event` is connected."""
        connected = self.peers.connected
        if type(event) is Register:
            if rank_address(event.reg.engine, event.d_rank) not in connected:
                return False
            if not self.context.dialect.writes_registered_only:
                return self._all_connected(event)
        registrations = cell.registrations
        if len(registrations) == 1:
            return rank_address(registrations[0].reg.engine, registrations[0].d_rank) in connected
        return not registrations or all(
            rank_address(registration.reg.engine, registration.d_rank) in connected for registration in registrations
        )

    def _all_connected(self, message: Register) -> bool:
        """Whether every target rank is connected, where the first rank's registration counts for all."""
        context = self.context
        targets = context.geometry.targets(context.rank, context.shards, message.shards)
        return all(rank_address(message.reg.engine, rank) in self.peers.connected for rank in targets)

    def connect(self, cell: ProducerCell, now: Instant) -> Effects:
        """Connect the ranks that a READY cell still needs; refuse its registration if one may not be tried now."""
        reg = cell.reg
        assert reg is not None
        effects: Effects = NOTHING
        for registration in cell.registrations:
            peer = rank_address(reg.engine, registration.d_rank)
            if peer in self.peers.connected:
                continue
            if not self.peers.may_try(peer, now):
                return effects + self.apply(reg, cell, RegistrationRefused(Code.UNREACHABLE), now)
            self.waiting.setdefault(peer, {})[reg] = None
            if peer not in self.peers.connecting:
                self.peers.connecting.add(peer)
                effects += (Handshake(peer),)
        return effects

    # When a cell wants to be woken.

    def armed(self) -> tuple[Timer, ...]:
        """Every timer that could fire, whatever the time: the choices of the untimed checker."""
        timers = [Timer(TimerKind.LEASE, xid) for xid in self.keys if self._lease_until(xid) is not None]
        for key in self.cells:
            if isinstance(key, Reg):
                kinds = (TimerKind.REGISTRATION, TimerKind.EXPECT, TimerKind.JOIN)
                timers += [t for kind in kinds if self.deadline(t := Timer(kind, key)) is not None]
        return tuple(timers)

    def first_due(self, now: Instant) -> Timer | None:
        """The next timer whose deadline has passed, its entry in the heap removed."""
        return self.deadlines.first_due(now, self.deadline)

    def deadline(self, timer: Timer) -> Instant | None:
        """When an armed timer is due."""
        key = timer.key
        if timer.kind is TimerKind.LEASE:
            return self._lease_until(str(key)) if isinstance(key, str) else None
        cell = self.cells.get(key)
        if cell is None:
            return None
        if timer.kind is TimerKind.REGISTRATION:
            if cell.phase is OPEN:
                at = min(cell.registration_until, cell.expect_until)
            else:
                at = cell.registration_until if cell.phase is JOINING or cell.phase is READY else NEVER
            return at if at < NEVER else None
        if timer.kind is TimerKind.JOIN:
            due = cell.phase is JOINING and not self.context.dialect.waits_for_all_ranks
            return cell.join_until if due else None
        return cell.expect_until if cell.phase is OPEN and cell.expect_until != NEVER else None

    def _lease_until(self, xid: Xid) -> Instant | None:
        leases = [
            c.lease_until
            for key in self.keys.get(xid, ())
            if (c := self.cells[key]).source is not None and not c.expired and c.lease_until < NEVER
        ]
        return min(leases) if leases else None


def _cell_order(cell: ProducerCell) -> tuple[Xid, tuple[object, ...]]:
    return (cell.xid, () if cell.reg is None else msgspec.structs.astuple(cell.reg))

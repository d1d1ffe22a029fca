"""The endpoint of one P rank: owns its cells, finds the one that an event names, and steps it.

`handle(event, now)` is the only door for changes. It checks who speaks, finds the cell by key, applies the rule and
puts the new cell back or buries it. It decides nothing about a transfer: those rules are in `producer` and `lease`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import msgspec

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, BumpWord, Effect, Effects, Handshake, Note, Send, Tell
from pdflow.protocol.events import (
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PeerExited,
    PeerLost,
    PrefillEnded,
    PrefillWanted,
    ProducerRankEvent,
    Received,
    ShardReleased,
    SourceReady,
    TimeReached,
    TimerFired,
    WriteEnded,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.lease import released, renewed
from pdflow.protocol.matching import Matching
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Completion,
    Disposition,
    Fail,
    Heartbeat,
    Progress,
    Register,
    RegisterAck,
    Release,
    Sync,
    SyncItem,
    SyncReply,
    Taken,
)
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer import (
    FOREVER,
    GONE,
    IN_FLIGHT,
    JOINING,
    LEASED,
    OPEN,
    READY,
    SETTLING,
    CancelReceived,
    CellEvent,
    Connected,
    JoinEnded,
    LeaseEnded,
    PeerQuiet,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
    RegistrationRetired,
    ShardTaken,
    progress_of,
)
from pdflow.protocol.producer_rules import step
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.tombstones import Tombstones
from pdflow.protocol.values import Address, EngineId, Instant, RequestId, Xid

Key: TypeAlias = Reg | Xid
"""A cell stands under its registration, or, while it has none, under its xid."""

EARLY_LIMIT = 4096
"""RELEASEs and completions that came before their prompt was finished: bounded, oldest forgotten first."""


class ProducerRank:
    """One prefill rank's half of the protocol.

    Args:
        engine: this engine's id, incarnation and shards; `rank` is pp_rank * tp + tp_rank.
        geometry: who writes whom, and how many bytes.
        done_is_remote: whether the transport's DONE means that bytes have landed.
    """

    timed = True
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = (
        "cells",
        "contexts",
        "dead_xids",
        "deadlines",
        "early",
        "early_takers",
        "ended",
        "engine",
        "flushes",
        "incarnation",
        "interests",
        "keys",
        "matching",
        "me",
        "peers",
        "scheduler",
        "tombs",
        "waiting",
    )

    def __init__(
        self,
        engine: EngineInfo,
        rank: int,
        incarnation: int,
        dialect: Dialect,
        timers: Timers,
        geometry: Geometry,
        done_is_remote: bool = True,
    ) -> None:
        self.engine = engine.engine
        self.me = rank_address(engine.engine, rank)
        self.scheduler: Address = engine.engine
        self.incarnation = incarnation
        context = ProducerContext(rank, engine.shards, dialect, timers, geometry, done_is_remote)
        self.contexts = (context, msgspec.structs.replace(context, connected=True))
        self.cells: dict[Key, ProducerCell] = {}
        self.keys: dict[Xid, tuple[Key, ...]] = {}
        self.matching = Matching()
        self.tombs: dict[EngineId, Tombstones] = {}
        self.dead_xids: OrderedDict[Xid, Code] = OrderedDict()
        self.early: OrderedDict[Xid, None] = OrderedDict()
        """RELEASEs of prompts that this rank has not seen finished."""
        self.early_takers: OrderedDict[RequestId, dict[int, int]] = OrderedDict()
        """vllm-compat: completions of such prompts, D rank -> how many D ranks read this rank."""
        self.ended: OrderedDict[Reg, None] = OrderedDict()
        """vllm-compat, which has no floor: registrations that have ended, so that a late copy never writes again."""
        self.interests: dict[Address, frozenset[Xid]] = {}
        self.peers = Peers()
        self.waiting: dict[Address, dict[Reg, None]] = {}
        self.flushes: dict[Address, tuple[Reg, ...]] = {}
        """Whose WRITEs each flush under way is about, oldest first."""
        self.deadlines = Deadlines()

    # The four doors of every endpoint.

    def handle(self, event: ProducerRankEvent, now: Instant) -> Effects:
        effects: Effects = _ON[type(event)](self, event, now)
        return effects

    def wake_at(self) -> Instant | None:
        heap = self.deadlines.heap
        return heap[0][0] if heap else None

    def armed(self) -> tuple[Timer, ...]:
        """Every timer that could fire, whatever the time: what the untimed explorer chooses from."""
        timers = [Timer(TimerKind.LEASE, xid) for xid in self.keys if self._lease_until(xid) is not None]
        for key in self.cells:
            if isinstance(key, Reg):
                kinds = (TimerKind.GRANT, TimerKind.EXPECT, TimerKind.JOIN)
                timers += [t for kind in kinds if self._deadline(t := Timer(kind, key)) is not None]
        return tuple(timers)

    def fork(self) -> ProducerRank:
        other = object.__new__(ProducerRank)
        for name in ("engine", "me", "scheduler", "incarnation", "contexts"):
            setattr(other, name, getattr(self, name))
        other.cells = self.cells.copy()
        other.keys = self.keys.copy()
        other.matching = self.matching.fork()
        other.tombs = {engine: tombs.fork() for engine, tombs in self.tombs.items()}
        other.dead_xids = self.dead_xids.copy()
        other.early = self.early.copy()
        other.early_takers = OrderedDict((name, takers.copy()) for name, takers in self.early_takers.items())
        other.ended = self.ended.copy()
        other.interests = self.interests.copy()
        other.peers = self.peers.fork()
        other.flushes = self.flushes.copy()
        other.waiting = {peer: regs.copy() for peer, regs in self.waiting.items()}
        other.deadlines = Deadlines()
        return other

    def fingerprint(self) -> Hashable:
        return (
            tuple(sorted(self.cells.values(), key=_cell_order)),
            tuple(sorted((e, t.fingerprint()) for e, t in self.tombs.items())),
            tuple(self.dead_xids.items()),
            tuple(sorted(self.early)),
            tuple(sorted((name, tuple(takers.items())) for name, takers in self.early_takers.items())),
            tuple(sorted(map(msgspec.structs.astuple, self.ended))),
            tuple(sorted((a, tuple(sorted(x))) for a, x in self.interests.items())),
            tuple(sorted(self.flushes.items())),
            self.peers.fingerprint(),
        )

    # One funnel for every change of a cell.

    def _apply(self, key: Key, cell: ProducerCell, event: CellEvent, now: Instant, connected: bool = False) -> Effects:
        """`connected` matters to the events that may complete a match: whether all its target ranks are."""
        after, effects = step(cell, event, now, self.contexts[connected])
        if after is cell:
            return effects or (Note(f"producer ignored {type(event).__name__} in {cell.phase.name}"),)
        return effects + self._put(key, cell, after, now)

    def _put(self, key: Key, before: ProducerCell, after: ProducerCell, now: Instant) -> Effects:
        """Store a changed cell under its key, bury what has ended, connect what must be written."""
        verdict = after.verdict
        if verdict is not None and verdict is not before.verdict:
            self._bury(verdict)
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
        if after.phase is READY and (before.phase is not READY or after.grants is not before.grants):
            return self._connect(after, now)
        if after.phase is SETTLING and before.phase is IN_FLIGHT and not after.failed:
            for grant in after.grants:
                peer = rank_address(grant.reg.engine, grant.d_rank)
                self.flushes[peer] = (*self.flushes.get(peer, ()), grant.reg)
        if after.join_until != before.join_until and after.phase is JOINING and after.reg is not None:
            self.deadlines.push(after.join_until, Timer(TimerKind.JOIN, after.reg))
        return NOTHING

    def _gone(self, key: Key, cell: ProducerCell) -> Effects:
        """The only place where a rank lets go of a product: after its last cell, its word bumped first."""
        del self.cells[key]
        self._rekey(cell.xid, key, None)
        source = cell.source
        if not self.contexts[0].dialect.matches_by_xid:
            self._unmatch(cell)
        keys = self.keys.get(cell.xid)
        if source is None or (keys and any(self.cells[k].source is not None for k in keys)):
            return NOTHING
        if cell.end is Code.EXPIRED:
            self._remember_dead(cell.xid, Code.EXPIRED)
        released: Effects = (Tell(self.scheduler, ShardReleased(cell.xid, self.contexts[0].rank, cell.end)),)
        return released if source.word is None else (BumpWord(source.word), *released)

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
        rest = tuple(k for k in keys if k != old)
        if new is not None:
            self.keys[xid] = (*rest, new)
        elif rest:
            self.keys[xid] = rest
        else:
            del self.keys[xid]

    def _bury(self, item: SyncItem) -> None:
        if not self.contexts[0].dialect.floor:
            if len(self.ended) >= EARLY_LIMIT:
                self.ended.popitem(last=False)
            self.ended[item.reg] = None
        else:
            tombs = self.tombs.get(item.reg.engine)
            if tombs is not None and tombs.incarnation == item.reg.incarnation:
                tombs.bury(item)

    def _connected(self, cell: ProducerCell, event: CellEvent) -> bool:
        """Whether every rank that this cell would write, were the event its last missing piece, is connected."""
        connected = self.peers.connected
        if type(event) is Register and rank_address(event.reg.engine, event.d_rank) not in connected:
            return False
        grants = cell.grants
        if len(grants) == 1:
            return rank_address(grants[0].reg.engine, grants[0].d_rank) in connected
        return not grants or all(rank_address(grant.reg.engine, grant.d_rank) in connected for grant in grants)

    def _connect(self, cell: ProducerCell, now: Instant) -> Effects:
        reg = cell.reg
        assert reg is not None
        effects: Effects = NOTHING
        for grant in cell.grants:
            peer = rank_address(reg.engine, grant.d_rank)
            if peer in self.peers.connected:
                continue
            if not self.peers.may_try(peer, now):
                return effects + self._apply(reg, cell, RegistrationRefused(Code.UNREACHABLE), now)
            self.waiting.setdefault(peer, {})[reg] = None
            if peer not in self.peers.connecting:
                self.peers.connecting.add(peer)
                effects += (Handshake(peer),)
        return effects

    # From the scheduler of this engine.

    def _source_ready(self, event: SourceReady, now: Instant) -> Effects:
        xid = event.xid
        timers = self.contexts[0].timers
        unwanted = xid in self.early
        if unwanted:
            del self.early[xid]
        takers = self.early_takers.pop(event.request_id, None) if self.early_takers else None
        keys = self.keys.get(xid, ())
        if not keys and not self.contexts[0].dialect.matches_by_xid:
            keys = self._adopt(event)
        if not self.contexts[0].dialect.matches_by_xid:
            self.matching.add_product(xid, event.request_id)
        self.deadlines.push(now + timers.lease_ns, Timer(TimerKind.LEASE, xid))
        if keys:
            effects: Effects = NOTHING
            for key in keys:
                cell = self.cells[key]
                effects += self._apply(key, cell, event, now, self._connected(cell, event))
            return effects
        until = now + (timers.release_lease_ns if unwanted else timers.lease_ns)
        cell = ProducerCell(OPEN, xid).becoming_leased(event.source, event.request_id, until)
        self.cells[xid] = cell
        self.keys[xid] = (xid,)
        if unwanted:
            self.deadlines.push(until, Timer(TimerKind.LEASE, xid))
        return NOTHING if takers is None else self._take_early(xid, takers, now)

    def _take_early(self, xid: Xid, takers: dict[int, int], now: Instant) -> Effects:
        """Each reader that was quicker than this rank counts for itself: a sibling of it may still be reading."""
        effects: Effects = NOTHING
        for d_rank, readers in takers.items():
            cell = self.cells.get(xid)
            if cell is not None:
                effects += self._apply(xid, cell, ShardTaken(d_rank, readers), now)
        return effects

    def _adopt(self, event: SourceReady) -> tuple[Key, ...]:
        """vllm-compat: a registration without an xid finds its product by request id."""
        reg = self.matching.registration_of(event.request_id)
        if reg is None:
            return ()
        self.matching.drop_registration(reg)
        cell = self.cells[reg]
        self._rekey(cell.xid, reg, None)
        self.cells[reg] = msgspec.structs.replace(cell, xid=event.xid)
        self.keys[event.xid] = (reg,)
        return (reg,)

    def _prefill_ended(self, event: PrefillEnded, now: Instant) -> Effects:
        effects: Effects = NOTHING
        self.early.pop(event.xid, None)
        for key in self.keys.get(event.xid, ()):
            effects += self._apply(key, self.cells[key], event, now)
        self._remember_dead(event.xid, event.code)
        return effects

    def _remember_dead(self, xid: Xid, code: Code) -> None:
        """What a registration that comes too late is told at once, not after `no_request_ns`."""
        if len(self.dead_xids) >= EARLY_LIMIT:
            self.dead_xids.popitem(last=False)
        self.dead_xids[xid] = code

    # From the transport.

    def _received(self, event: Received, now: Instant) -> Effects:
        handler = _ON_FRAME.get(type(event.message))
        if handler is None:
            return (Note(f"producer got {type(event.message).__name__}"),)
        if not self.peers.current(event.sender, event.incarnation):
            return self._other_life(event.sender, now)
        effects: Effects = handler(self, event.sender, event.message, now)
        return effects

    def _other_life(self, peer: Address, now: Instant) -> Effects:
        """Another incarnation speaks: ask with a nonce, believe nothing until then (S8)."""
        note = Note("producer: frame of another incarnation")
        if peer in self.peers.connecting or not self.peers.may_try(peer, now):
            return (note,)
        self.peers.connecting.add(peer)
        return (Handshake(peer), note)

    def _registered(self, sender: Address, message: Register, now: Instant) -> Effects:
        reg = message.reg
        context = self.contexts[0]
        if engine_of(sender) != reg.engine or rank_of(sender) != message.d_rank:
            return (Note("producer: registration in another's name"),)
        if not message.xid and context.dialect.matches_by_xid:
            return (Note("producer: registration without an xid"),)
        if context.dialect.floor:
            if reg.incarnation != self.peers.incarnations[reg.engine]:
                return (Note("producer: registration of another incarnation"),)
            tombs = self._tombs(reg.engine, reg.incarnation)
            tombs.raise_floor(message.floor)
            if tombs.beyond(reg):
                return (Note("producer: registration too far above the floor"),)
            verdict = tombs.find(reg)
            if verdict is not None:
                return self._replay(sender, verdict)
        elif reg in self.ended:
            return (Note("producer: registration has ended"),)
        cell = self.cells.get(reg)
        if cell is not None:
            return self._apply(reg, cell, message, now, self._connected(cell, message))
        try:
            targets = context.geometry.targets(context.rank, context.shards, message.shards)
        except ValueError:
            targets = ()
        if message.d_rank not in targets:
            return self._refuse_unborn(sender, message, Code.LAYOUT)
        return self._place(sender, message, now)

    def _place(self, sender: Address, message: Register, now: Instant) -> Effects:
        """A registration that no cell has yet: give it its product, a share of one, or a cell that waits."""
        context = self.contexts[0]
        xid: Xid | None = message.xid
        if not xid:
            xid = self.matching.product_of(message) or f"?{message.reg.engine}/{message.reg.request_id}"
        keys = self.keys.get(xid, ())
        if xid in self.dead_xids and not keys:
            return self._refuse_unborn(sender, message, self.dead_xids[xid])
        until = min(context.timers.registration_ttl_ns, context.timers.no_request_ns)
        self.deadlines.push(now + until, Timer(TimerKind.GRANT, message.reg))
        cell = self.cells.get(xid)
        if cell is not None:
            return self._apply(xid, cell, message, now, self._connected(cell, message))
        shared = next((self.cells[k] for k in keys if self.cells[k].source is not None), None) if keys else None
        if shared is not None and shared.expired:
            # Its blocks go as soon as the WRITEs in flight have ended: nothing would ever answer this registration.
            return self._refuse_unborn(sender, message, Code.EXPIRED)
        expect = now + context.timers.no_request_ns if context.dialect.control_frames else FOREVER
        cell = ProducerCell(OPEN, xid, expect_until=expect)
        if shared is not None and shared.source is not None:
            cell = cell.becoming_leased(shared.source, shared.request_id, shared.lease_until)
        elif not message.xid:
            self.matching.add_registration(message.reg)
        self.cells[message.reg] = cell
        self.keys[xid] = (*keys, message.reg)
        return self._apply(message.reg, cell, message, now, self._connected(cell, message))

    def _refuse_unborn(self, sender: Address, message: Register, code: Code) -> Effects:
        if not self.contexts[0].dialect.control_frames:
            return (Note(f"producer: registration refused, {code.name}"),)
        self._bury(SyncItem(message.reg, Progress.UNKNOWN, code, True))
        return (Send(sender, Fail(message.reg, self.contexts[0].rank, code, True)),)

    def _replay(self, sender: Address, verdict: SyncItem) -> Effects:
        """A late REG meets the same answer again, and never makes a cell."""
        if verdict.code is Code.BELOW_FLOOR:
            return (Note("producer: registration below the floor"),)
        rank = self.contexts[0].rank
        if verdict.progress is Progress.SENT:
            return (Send(sender, RegisterAck(verdict.reg, rank, Progress.SENT, ())),)
        if verdict.code is Code.CANCELLED:
            return (Send(sender, CancelAck(verdict.reg, rank, Disposition.NOT_STARTED, verdict.flushed)),)
        return (Send(sender, Fail(verdict.reg, rank, verdict.code, verdict.flushed)),)

    def _cancelled(self, sender: Address, message: Cancel, now: Instant) -> Effects:
        reg = message.reg
        if engine_of(sender) != reg.engine or reg.incarnation != self.peers.incarnations[reg.engine]:
            return (Note("producer: cancel in another's name"),)
        tombs = self._tombs(reg.engine, reg.incarnation)
        tombs.raise_floor(message.floor)
        if tombs.beyond(reg):
            return (Note("producer: cancel too far above the floor"),)
        cell = self.cells.get(reg)
        if cell is not None:
            if rank_of(sender) not in cell.targets:
                return (Note("producer: cancel of a rank that is not written"),)
            return self._apply(reg, cell, CancelReceived(sender), now)
        verdict = tombs.find(reg)
        if verdict is None:
            # The CANCEL has overtaken its REG: the tombstone stops the write that has not been asked for yet.
            verdict = SyncItem(reg, Progress.UNKNOWN, Code.CANCELLED, True)
            tombs.bury(verdict)
        how = Disposition.SENT if verdict.progress is Progress.SENT else Disposition.NOT_STARTED
        return (Send(sender, CancelAck(reg, self.contexts[0].rank, how, True)),)

    def _released(self, sender: Address, message: Release, now: Instant) -> Effects:
        until = now + self.contexts[0].timers.release_lease_ns
        keys = self.keys.get(message.xid, ())
        if not any(self.cells[k].source is not None for k in keys):
            self._remember_early(message.xid)
        return self._shorten(message.xid, until)

    def _shorten(self, xid: Xid, until: Instant) -> Effects:
        for key in self.keys.get(xid, ()):
            cell = self.cells[key]
            shorter = released(cell, until)
            if shorter is not cell:
                self.cells[key] = shorter
                self.deadlines.push(until, Timer(TimerKind.LEASE, xid))
        return NOTHING

    def _remember_early(self, name: Xid) -> None:
        if name in self.dead_xids:
            return
        if len(self.early) >= EARLY_LIMIT:
            self.early.popitem(last=False)
        self.early[name] = None

    def _taken(self, sender: Address, message: Taken, now: Instant) -> Effects:
        cell = self.cells.get(message.xid)
        if cell is None:
            return (Note("producer: TAKEN for nothing leased"),)
        return self._apply(message.xid, cell, ShardTaken(rank_of(sender), message.readers), now)

    def _completed(self, sender: Address, message: Completion, now: Instant) -> Effects:
        """vLLM's pull completion; from a push D that will never register it means: let go (C7)."""
        xid = self.matching.products.get(message.request_id)
        if xid is None:
            if len(self.early_takers) >= EARLY_LIMIT:
                self.early_takers.popitem(last=False)
            self.early_takers.setdefault(message.request_id, {})[rank_of(sender)] = max(message.count, 1)
            return (Note("producer: completion before its prompt, or after its lease"),)
        cell = self.cells.get(xid)
        if cell is None:
            return (Note("producer: completion for a registered prompt"),)
        return self._apply(xid, cell, ShardTaken(rank_of(sender), max(message.count, 1)), now)

    def _heartbeat(self, sender: Address, message: Heartbeat, now: Instant) -> Effects:
        until = now + self.contexts[0].timers.lease_extension_ns
        for request_id in message.request_ids:
            xid = self.matching.products.get(request_id)
            if xid is not None:
                self._renew(xid, until)
        # C4: a registration lives as long as its D speaks.
        for reg, cell in self.cells.items():
            if isinstance(reg, Reg) and reg.engine == engine_of(sender) and cell.phase in (OPEN, JOINING):
                self.cells[reg] = cell.with_grant(now + self.contexts[0].timers.registration_ttl_ns)
        return NOTHING

    def _renew(self, xid: Xid, until: Instant) -> None:
        for key in self.keys.get(xid, ()):
            self.cells[key] = renewed(self.cells[key], until)

    def _synced(self, sender: Address, message: Sync, now: Instant) -> Effects:
        """D's list: renew what it wants, answer how far what it holds open is, shorten what it has stopped wanting."""
        timers = self.contexts[0].timers
        engine = engine_of(sender)
        tombs = self._tombs(engine, self.peers.incarnations[engine])
        tombs.raise_floor(message.floor)
        for xid in message.interest:
            self._renew(xid, now + timers.lease_ns)
        wanted = frozenset(message.interest)
        for xid in sorted(self.interests.get(sender, frozenset()) - wanted):
            self._shorten(xid, now + timers.release_lease_ns)
        if wanted:
            self.interests[sender] = wanted
        else:
            self.interests.pop(sender, None)
        items = []
        for reg in message.open:
            cell = self.cells.get(reg)
            if cell is not None:
                self.cells[reg] = cell.with_grant(now + timers.registration_ttl_ns)
                items.append(SyncItem(reg, progress_of(cell), Code.NONE, False))
            elif (verdict := tombs.find(reg)) is not None:
                items.append(verdict)
        return (Send(sender, SyncReply(message.seq, tuple(items))),)

    def _handshake_ended(self, event: HandshakeEnded, now: Instant) -> Effects:
        peer = event.peer
        if not event.ok:
            self.peers.refused(peer, now, self.contexts[0].timers)
            return self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
        before = self.peers.answered(peer, event.incarnation)
        effects: Effects = NOTHING
        if before is not None:
            effects = self._retire(engine_of(peer), before, now)
        if engine_of(peer) in self.peers.duplicates:
            refused = self._to_waiting(peer, RegistrationRefused(Code.UNREACHABLE), now)
            return (Note("producer: DUPLICATE_ENGINE_ID"), *effects, *refused)
        return effects + self._to_waiting(peer, Connected(), now)

    def _to_waiting(self, peer: Address, event: Connected | RegistrationRefused, now: Instant) -> Effects:
        effects: list[Effect] = []
        for reg in self.waiting.pop(peer, ()):
            cell = self.cells.get(reg)
            if cell is None or cell.phase is not READY:
                continue
            if type(event) is Connected and not self._connected(cell, event):
                # Another of its ranks was lost meanwhile, or is still being connected.
                effects += self._connect(cell, now)
                continue
            effects += self._apply(reg, cell, event, now, True)
        return tuple(effects)

    def _retire(self, engine: EngineId, incarnation: int, now: Instant) -> Effects:
        effects: list[Effect] = []
        tombs = self.tombs.get(engine)
        if tombs is not None and tombs.incarnation == incarnation:
            del self.tombs[engine]
        for key in tuple(self.cells):
            if isinstance(key, Reg) and key.engine == engine and key.incarnation in (incarnation, 0):
                cell = self.cells[key]
                effects += self._apply(key, cell, RegistrationRetired(), now)
        return tuple(effects)

    def _peer_exited(self, event: PeerExited, now: Instant) -> Effects:
        self.peers.lost(event.peer)
        engine = engine_of(event.peer)
        return self._retire(engine, self.peers.incarnations.get(engine, 0), now)

    def _peer_lost(self, event: PeerLost, now: Instant) -> Effects:
        self.peers.lost(event.peer)
        return NOTHING

    def _write_ended(self, event: WriteEnded, now: Instant) -> Effects:
        cell = self.cells.get(event.op.reg)
        if cell is None:
            return (Note("producer: WRITE ended for nothing"),)
        return self._apply(event.op.reg, cell, event, now)

    def _quiet(self, event: FlushEnded | FenceEnded, now: Instant) -> Effects:
        if type(event) is FlushEnded:
            return self._flushed(event, now)
        self.peers.lost(event.peer)
        told = PeerQuiet(rank_of(event.peer), True, True)
        engine = engine_of(event.peer)
        effects: list[Effect] = []
        for key in tuple(self.cells):
            if isinstance(key, Reg) and key.engine == engine:
                cell = self.cells[key]
                if cell.phase is SETTLING and cell.flying & 1 << told.d_rank:
                    effects += self._apply(key, cell, told, now)
        return tuple(effects)

    def _flushed(self, event: FlushEnded, now: Instant) -> Effects:
        """Flushes of one link end in their order. Each speaks of what was posted before it: of its own cell alone."""
        waiting = self.flushes.get(event.peer, ())
        if len(waiting) > 1:
            self.flushes[event.peer] = waiting[1:]
        else:
            self.flushes.pop(event.peer, None)
        cell = self.cells.get(waiting[0]) if waiting else None
        d_rank = rank_of(event.peer)
        if cell is None or cell.phase is not SETTLING or not cell.flying >> d_rank & 1:
            return (Note("producer: flush ended for nothing"),)
        return self._apply(waiting[0], cell, PeerQuiet(d_rank, event.ok, False), now)

    # Time.

    def _time_reached(self, event: TimeReached, now: Instant) -> Effects:
        effects: list[Effect] = []
        while (timer := self.deadlines.first_due(now, self._deadline)) is not None:
            effects += self._timer_fired(TimerFired(timer), now)
        return tuple(effects)

    def _deadline(self, timer: Timer) -> Instant | None:
        key = timer.key
        if timer.kind is TimerKind.LEASE:
            return self._lease_until(str(key)) if isinstance(key, str) else None
        cell = self.cells.get(key)
        if cell is None:
            return None
        if timer.kind is TimerKind.GRANT:
            if cell.phase is OPEN:
                return min(cell.grant_until, cell.expect_until)
            return cell.grant_until if cell.phase is JOINING or cell.phase is READY else None
        if timer.kind is TimerKind.JOIN:
            due = cell.phase is JOINING and not self.contexts[0].dialect.waits_for_all_ranks
            return cell.join_until if due else None
        return cell.expect_until if cell.phase is OPEN and cell.expect_until != FOREVER else None

    def _lease_until(self, xid: Xid) -> Instant | None:
        leases = [
            c.lease_until
            for key in self.keys.get(xid, ())
            if (c := self.cells[key]).source is not None and not c.expired
        ]
        return min(leases) if leases else None

    def _timer_fired(self, event: TimerFired, now: Instant) -> Effects:
        kind, key = event.timer.kind, event.timer.key
        if kind is TimerKind.LEASE:
            effects: Effects = NOTHING
            for k in self.keys.get(str(key), ()):
                cell = self.cells[k]
                if cell.source is not None and not cell.expired:
                    effects += self._apply(k, cell, LeaseEnded(), now)
            return effects
        cell_or_none = self.cells.get(key) if isinstance(key, Reg) else None
        if cell_or_none is None or not isinstance(key, Reg):
            return (Note("producer: timer of a dead cell"),)
        if kind is TimerKind.GRANT and (cell_or_none.phase is not OPEN or cell_or_none.expect_until > now):
            return self._apply(key, cell_or_none, RegistrationRefused(Code.EXPIRED), now)
        if kind is TimerKind.JOIN:
            return self._apply(key, cell_or_none, JoinEnded(), now, self._connected(cell_or_none, JoinEnded()))
        # One timer stands for both: an open registration's prompt is asked for first, its grant judged after that.
        self.cells[key] = cell_or_none.expecting(FOREVER)
        self.deadlines.push(cell_or_none.grant_until, Timer(TimerKind.GRANT, key))
        return (Tell(self.scheduler, PrefillWanted(cell_or_none.xid, self.contexts[0].rank)),)

    def _tombs(self, engine: EngineId, incarnation: int) -> Tombstones:
        tombs = self.tombs.get(engine)
        if tombs is None or tombs.incarnation != incarnation:
            tombs = self.tombs[engine] = Tombstones(incarnation)
        return tombs


def _cell_order(cell: ProducerCell) -> tuple[Xid, tuple[object, ...]]:
    return (cell.xid, () if cell.reg is None else msgspec.structs.astuple(cell.reg))


_ON: dict[type, Callable[[Any, Any, Instant], Effects]] = {
    SourceReady: ProducerRank._source_ready,
    PrefillEnded: ProducerRank._prefill_ended,
    Received: ProducerRank._received,
    HandshakeEnded: ProducerRank._handshake_ended,
    PeerLost: ProducerRank._peer_lost,
    PeerExited: ProducerRank._peer_exited,
    WriteEnded: ProducerRank._write_ended,
    FlushEnded: ProducerRank._quiet,
    FenceEnded: ProducerRank._quiet,
    TimeReached: ProducerRank._time_reached,
    TimerFired: ProducerRank._timer_fired,
}
_ON_FRAME: dict[type, Callable[[Any, Address, Any, Instant], Effects]] = {
    Register: ProducerRank._registered,
    Cancel: ProducerRank._cancelled,
    Release: ProducerRank._released,
    Taken: ProducerRank._taken,
    Completion: ProducerRank._completed,
    Heartbeat: ProducerRank._heartbeat,
    Sync: ProducerRank._synced,
}

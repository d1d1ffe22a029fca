"""The handling of D's frames at one P rank: finds the cell that a frame names, and checks that its sender may name it.

A frame counts only from the incarnation that the last handshake showed (S8), and only in its sender's own name (S9). A
registration gets its product, a share of one, or a cell that waits; one that has ended gets its tombstone's answer.
What a registration then does to its cell stands in `producer.writes`; how the store keeps it, in `producer.cells`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, cast

import msgspec

from pdflow.protocol.effects import NOTHING, Effects, Handshake, Note, Send
from pdflow.protocol.events import Received
from pdflow.protocol.ids import Reg, engine_of, rank_of
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
from pdflow.protocol.producer.cell import JOINING, OPEN, CancelReceived, ProducerCell, ShardTaken, progress_of
from pdflow.protocol.producer.cells import ProducerCells
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, Instant, RequestId, Xid

ProducerFrame: TypeAlias = Register | Cancel | Release | Taken | Completion | Heartbeat | Sync
"""The frames that a P rank accepts from its peers. Any other frame is noted, and changes nothing."""


class ProducerFrames:
    """Applies D's frames to the store of one P rank."""

    __slots__ = ("store",)

    def __init__(self, store: ProducerCells) -> None:
        self.store = store

    def received(self, event: Received, now: Instant) -> Effects:
        """Handle one frame of a peer. Never raises, whatever the frame contains."""
        sender, message = event.sender, event.message
        handler = ON_FRAME.get(type(message))
        if handler is None:
            return (Note(f"producer got {type(message).__name__}"),)
        if not self.store.peers.current(sender, event.incarnation):
            return self._other_incarnation(sender, now)
        return handler(self, sender, cast(ProducerFrame, message), now)

    def _other_incarnation(self, peer: Address, now: Instant) -> Effects:
        """Start a handshake with a peer whose frame is of another incarnation; nothing of it counts until then (S8)."""
        peers = self.store.peers
        note = Note("producer: frame of another incarnation")
        if peer in peers.connecting or not peers.may_try(peer, now):
            return (note,)
        peers.connecting.add(peer)
        return (Handshake(peer), note)

    # Registrations and cancels.

    def _registered(self, sender: Address, message: Register, now: Instant) -> Effects:
        store, reg = self.store, message.reg
        context = store.context
        if engine_of(sender) != reg.engine or rank_of(sender) != message.d_rank:
            return (Note("producer: registration in another's name"),)
        if not message.xid and context.dialect.matches_by_xid:
            return (Note("producer: registration without an xid"),)
        if context.dialect.floor:
            if reg.incarnation != store.peers.incarnations[reg.engine]:
                return (Note("producer: registration of another incarnation"),)
            tombs = store.tombstones(reg.engine, reg.incarnation)
            tombs.raise_floor(message.floor)
            if tombs.beyond(reg):
                return (Note("producer: registration too far above the floor"),)
            verdict = tombs.find(reg)
            if verdict is not None:
                return self._replay(sender, verdict)
        elif reg in store.ended:
            return (Note("producer: registration has ended"),)
        if not context.dialect.registrations_end:
            message = self._renumbered(message)
            reg = message.reg
        cell = store.cells.get(reg)
        if cell is not None:
            return store.apply(reg, cell, message, now, store.connected(cell, message))
        try:
            targets = context.geometry.targets(context.rank, context.shards, message.shards)
        except ValueError:
            targets = ()
        if message.d_rank not in targets:
            return self._refuse_unregistered(sender, message, Code.LAYOUT)
        return self._open_registration(sender, message, now)

    def _renumbered(self, message: Register) -> Register:
        """Give a registration whose id is being served a `seq` of its own, as vLLM keeps waiting registrations, one for
        each id of D's, apart from those it serves: one that comes again, or from a second rank, then waits beside the
        one that is being written (R13), and nothing ends it."""
        store, reg = self.store, message.reg
        same_name = store.matching.registrations.get(reg.request_id, ())
        waiting = [known for known in same_name if known.engine == reg.engine]
        if waiting:
            reg = waiting[0]
        while not waiting and reg in store.cells:
            reg = msgspec.structs.replace(reg, seq=reg.seq + 1)
        return message if reg is message.reg else msgspec.structs.replace(message, reg=reg)

    def _open_registration(self, sender: Address, message: Register, now: Instant) -> Effects:
        """Give a new registration its product, a share of one, or a cell that waits."""
        store = self.store
        context = store.context
        xid: Xid = message.xid if context.dialect.one_candidate_only else ""
        named = bool(xid)
        if not named:
            xid = store.matching.product_of(message) or f"?{message.reg.engine}/{message.reg.request_id}"
        keys = store.keys.get(xid, ())
        if xid in store.dead_xids and not keys:
            return self._refuse_unregistered(sender, message, store.dead_xids[xid])
        if context.dialect.registrations_end:
            until = min(context.timers.registration_ttl_ns, context.timers.no_request_ns)
            store.deadlines.push(now + until, Timer(TimerKind.REGISTRATION, message.reg))
        cell = store.cells.get(xid)
        if cell is not None:
            if not context.dialect.prompts_match_again:
                store.matching.spend(xid, cell.request_id)
            return store.apply(xid, cell, message, now, store.connected(cell, message))
        shared = next((store.cells[k] for k in keys if store.cells[k].source is not None), None) if keys else None
        if shared is not None and shared.expired:
            # Its blocks go as soon as the WRITEs in flight have ended: nothing would ever answer this registration.
            return self._refuse_unregistered(sender, message, Code.EXPIRED)
        expect = now + context.timers.no_request_ns if context.dialect.control_frames else NEVER
        cell = ProducerCell(OPEN, xid, expect_until=expect)
        if shared is not None and shared.source is not None:
            cell = cell.becoming_leased(shared.source, shared.request_id, shared.lease_until)
        elif not named:
            store.matching.add_registration(message.reg)
        store.add(message.reg, cell)
        return store.apply(message.reg, cell, message, now, store.connected(cell, message))

    def _refuse_unregistered(self, sender: Address, message: Register, code: Code) -> Effects:
        context = self.store.context
        if not context.dialect.control_frames:
            return (Note(f"producer: registration refused, {code.name}"),)
        self.store.add_tombstone(SyncItem(message.reg, Progress.UNKNOWN, code, True))
        return (Send(sender, Fail(message.reg, context.rank, code, True)),)

    def _replay(self, sender: Address, verdict: SyncItem) -> Effects:
        """Answer a late REG from its tombstone; it never makes a cell."""
        if verdict.code is Code.BELOW_FLOOR:
            return (Note("producer: registration below the floor"),)
        rank = self.store.context.rank
        if verdict.progress is Progress.SENT:
            return (Send(sender, RegisterAck(verdict.reg, rank, Progress.SENT, ())),)
        if verdict.code is Code.CANCELLED:
            return (Send(sender, CancelAck(verdict.reg, rank, Disposition.NOT_STARTED, verdict.flushed)),)
        return (Send(sender, Fail(verdict.reg, rank, verdict.code, verdict.flushed)),)

    def _cancelled(self, sender: Address, message: Cancel, now: Instant) -> Effects:
        store, reg = self.store, message.reg
        if engine_of(sender) != reg.engine or reg.incarnation != store.peers.incarnations[reg.engine]:
            return (Note("producer: cancel in another's name"),)
        tombs = store.tombstones(reg.engine, reg.incarnation)
        tombs.raise_floor(message.floor)
        if tombs.beyond(reg):
            return (Note("producer: cancel too far above the floor"),)
        cell = store.cells.get(reg)
        if cell is not None:
            if rank_of(sender) not in cell.targets:
                return (Note("producer: cancel of a rank that is not written"),)
            return store.apply(reg, cell, CancelReceived(sender), now)
        verdict = tombs.find(reg)
        if verdict is None:
            # The CANCEL has overtaken its REG: the tombstone stops the write that has not been asked for yet.
            verdict = SyncItem(reg, Progress.UNKNOWN, Code.CANCELLED, True)
            tombs.add_tombstone(verdict)
        how = Disposition.SENT if verdict.progress is Progress.SENT else Disposition.NOT_STARTED
        return (Send(sender, CancelAck(reg, store.context.rank, how, True)),)

    # Products that are not written: shortened, taken, renewed.

    def _released(self, sender: Address, message: Release, now: Instant) -> Effects:
        store, xid = self.store, message.xid
        if not any(store.cells[key].source is not None for key in store.keys.get(xid, ())):
            store.remember_early(xid)
        store.shorten(xid, now + store.context.timers.release_lease_ns)
        return NOTHING

    def _taken(self, sender: Address, message: Taken, now: Instant) -> Effects:
        """Handle TAKEN (strict pull). It may arrive before this rank's engine has reported the prompt as finished."""
        store = self.store
        cell = store.cells.get(message.xid)
        if cell is None:
            if message.xid in store.dead_xids:
                return (Note("producer: TAKEN for nothing leased"),)
            return self._taken_early(message.xid, sender, message.readers)
        return store.apply(message.xid, cell, ShardTaken(rank_of(sender), message.readers), now)

    def _taken_early(self, name: RequestId | Xid, sender: Address, readers: int) -> Effects:
        self.store.remember_reader(name, rank_of(sender), readers)
        return (Note("producer: taken before its prompt was, or after its lease"),)

    def _completed(self, sender: Address, message: Completion, now: Instant) -> Effects:
        """Handle vLLM's pull completion. From a push D that will never register it means: release the prompt (C7)."""
        store = self.store
        xid = store.matching.products.get(message.request_id)
        if xid is None:
            return self._taken_early(message.request_id, sender, max(message.count, 1))
        cell = store.cells.get(xid)
        if cell is None:
            return (Note("producer: completion for a registered prompt"),)
        return store.apply(xid, cell, ShardTaken(rank_of(sender), max(message.count, 1)), now)

    def _heartbeat(self, sender: Address, message: Heartbeat, now: Instant) -> Effects:
        store = self.store
        timers = store.context.timers
        for request_id in message.request_ids:
            xid = store.matching.products.get(request_id)
            if xid is not None:
                store.renew(xid, now + timers.lease_extension_ns)
        if not store.context.dialect.registrations_end:
            return NOTHING
        # C4: a registration lives as long as its D speaks.
        for reg, cell in store.cells.items():
            if isinstance(reg, Reg) and reg.engine == engine_of(sender) and cell.phase in (OPEN, JOINING):
                store.update(reg, cell.with_registration_until(now + timers.registration_ttl_ns))
        return NOTHING

    def _synced(self, sender: Address, message: Sync, now: Instant) -> Effects:
        """Handle SYNC: renew what D wants, answer the progress of what it holds open, shorten what it no longer
        wants."""
        store = self.store
        timers = store.context.timers
        engine = engine_of(sender)
        tombs = store.tombstones(engine, store.peers.incarnations[engine])
        tombs.raise_floor(message.floor)
        for xid in message.interest:
            store.renew(xid, now + timers.lease_ns)
        interest = frozenset(message.interest)
        for xid in sorted(store.interests.get(sender, frozenset()) - interest):
            store.shorten(xid, now + timers.release_lease_ns)
        if interest:
            store.interests[sender] = interest
        else:
            store.interests.pop(sender, None)
        items = []
        d_rank = rank_of(sender)
        for reg in message.open:
            if reg.engine != engine:
                continue  # another's, which this peer may neither renew nor ask for (S9)
            cell = store.cells.get(reg)
            if cell is not None:
                store.update(reg, cell.with_registration_until(now + timers.registration_ttl_ns))
                # A rank whose own REG is missing hears nothing of its siblings', so that it sends it again.
                if any(registration.d_rank == d_rank for registration in cell.registrations):
                    items.append(SyncItem(reg, progress_of(cell), Code.NONE, False))
            elif (verdict := tombs.find(reg)) is not None:
                items.append(verdict)
        return (Send(sender, SyncReply(message.seq, tuple(items))),)


FrameHandler: TypeAlias = Callable[[ProducerFrames, Address, ProducerFrame, Instant], Effects]
"""A handler as the table stores it: it is called only with frames of its row."""
F = TypeVar("F", bound=ProducerFrame)


def _on(kind: type[F], handler: Callable[[ProducerFrames, Address, F, Instant], Effects]) -> tuple[type, FrameHandler]:
    """A row of the table. That the handler takes this kind of frame is checked by its types."""
    return kind, cast(FrameHandler, handler)


ON_FRAME: Final[dict[type, FrameHandler]] = dict(
    (
        _on(Register, ProducerFrames._registered),
        _on(Cancel, ProducerFrames._cancelled),
        _on(Release, ProducerFrames._released),
        _on(Taken, ProducerFrames._taken),
        _on(Completion, ProducerFrames._completed),
        _on(Heartbeat, ProducerFrames._heartbeat),
        _on(Sync, ProducerFrames._synced),
    )
)

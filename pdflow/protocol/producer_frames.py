"""What a frame from D does at one P rank: which cell it means, and whether its sender may speak of it.

A frame counts only from the incarnation that the last handshake showed (S8), and only in its sender's own name (S9). A
registration is given its product, a share of one, or a cell that waits; one that has ended meets its tombstone again.
What a registration then does to its cell stands in `producer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.protocol.effects import NOTHING, Effects, Handshake, Note, Send
from pdflow.protocol.events import Received
from pdflow.protocol.ids import Reg, engine_of, rank_of
from pdflow.protocol.lease import released, renewed
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
from pdflow.protocol.producer import JOINING, OPEN, CancelReceived, ProducerCell, ShardTaken, progress_of
from pdflow.protocol.producer_cells import EARLY_LIMIT, ProducerCells
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, Instant, RequestId, Xid


class ProducerFrames(ProducerCells):
    """The store of a P rank, as frames from D change it."""

    __slots__ = ()

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

    # Registrations and cancels.

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
        if not context.dialect.registrations_end:
            message = self._beside(message)
            reg = message.reg
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

    def _beside(self, message: Register) -> Register:
        """vLLM keeps the registrations that wait apart from those it serves, one for each id of D's; so one that comes
        again, or from a second rank, stands beside the one that is being written (R13). Nothing ends it; a number of
        ours tells them apart."""
        reg = message.reg
        waiting = [known for known in self.matching.registrations.get(reg.request_id, ()) if known.engine == reg.engine]
        if waiting:
            reg = waiting[0]
        while not waiting and reg in self.cells:
            reg = msgspec.structs.replace(reg, seq=reg.seq + 1)
        return message if reg is message.reg else msgspec.structs.replace(message, reg=reg)

    def _place(self, sender: Address, message: Register, now: Instant) -> Effects:
        """A registration that no cell has yet: give it its product, a share of one, or a cell that waits."""
        context = self.contexts[0]
        xid: Xid = message.xid if context.dialect.one_candidate_only else ""
        named = bool(xid)
        if not named:
            xid = self.matching.product_of(message) or f"?{message.reg.engine}/{message.reg.request_id}"
        keys = self.keys.get(xid, ())
        if xid in self.dead_xids and not keys:
            return self._refuse_unborn(sender, message, self.dead_xids[xid])
        if context.dialect.registrations_end:
            until = min(context.timers.registration_ttl_ns, context.timers.no_request_ns)
            self.deadlines.push(now + until, Timer(TimerKind.GRANT, message.reg))
        cell = self.cells.get(xid)
        if cell is not None:
            if not context.dialect.prompts_serve_again:
                self.matching.spend(xid, cell.request_id)
            return self._apply(xid, cell, message, now, self._connected(cell, message))
        shared = next((self.cells[k] for k in keys if self.cells[k].source is not None), None) if keys else None
        if shared is not None and shared.expired:
            # Its blocks go as soon as the WRITEs in flight have ended: nothing would ever answer this registration.
            return self._refuse_unborn(sender, message, Code.EXPIRED)
        expect = now + context.timers.no_request_ns if context.dialect.control_frames else NEVER
        cell = ProducerCell(OPEN, xid, expect_until=expect)
        if shared is not None and shared.source is not None:
            cell = cell.becoming_leased(shared.source, shared.request_id, shared.lease_until)
        elif not named:
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

    # Products that are not written: shortened, taken, renewed.

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
        """Strict pull. It may be here before this rank's own engine has said that there was something to take."""
        cell = self.cells.get(message.xid)
        if cell is None:
            if message.xid in self.dead_xids:
                return (Note("producer: TAKEN for nothing leased"),)
            return self._taken_early(message.xid, sender, message.readers)
        return self._apply(message.xid, cell, ShardTaken(rank_of(sender), message.readers), now)

    def _taken_early(self, name: RequestId | Xid, sender: Address, readers: int) -> Effects:
        if len(self.early_takers) >= EARLY_LIMIT:
            self.early_takers.popitem(last=False)
        self.early_takers.setdefault(name, {})[rank_of(sender)] = readers
        return (Note("producer: taken before its prompt was, or after its lease"),)

    def _completed(self, sender: Address, message: Completion, now: Instant) -> Effects:
        """vLLM's pull completion; from a push D that will never register it means: let go (C7)."""
        xid = self.matching.products.get(message.request_id)
        if xid is None:
            return self._taken_early(message.request_id, sender, max(message.count, 1))
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
        if not self.contexts[0].dialect.registrations_end:
            return NOTHING
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
        d_rank = rank_of(sender)
        for reg in message.open:
            cell = self.cells.get(reg)
            if cell is not None:
                self.cells[reg] = cell.with_grant(now + timers.registration_ttl_ns)
                # A rank whose own REG is missing hears nothing of its siblings', so that it sends it again.
                if any(grant.d_rank == d_rank for grant in cell.grants):
                    items.append(SyncItem(reg, progress_of(cell), Code.NONE, False))
            elif (verdict := tombs.find(reg)) is not None:
                items.append(verdict)
        return (Send(sender, SyncReply(message.seq, tuple(items))),)


_ON_FRAME: dict[type, Callable[[Any, Address, Any, Instant], Effects]] = {
    Register: ProducerFrames._registered,
    Cancel: ProducerFrames._cancelled,
    Release: ProducerFrames._released,
    Taken: ProducerFrames._taken,
    Completion: ProducerFrames._completed,
    Heartbeat: ProducerFrames._heartbeat,
    Sync: ProducerFrames._synced,
}

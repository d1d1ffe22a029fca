"""Mutants of reports to a waiting peer: sent at all, sent again when lost, and asked for when they never come."""

from __future__ import annotations

from pdflow.protocol.consumer.cell import CancelDue, ConsumerCell, ConsumerContext, release_prompt
from pdflow.protocol.consumer.cell import Stepped as ConsumerStepped
from pdflow.protocol.consumer.cells import PrefillPeer
from pdflow.protocol.consumer.frames import ConsumerFrames
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.rules import cancel_again, cancel_due, missing
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import NOTHING, Effects, Handshake, Send
from pdflow.protocol.events import PairMissing, PrefillEnded, PrefillMissing
from pdflow.protocol.ids import rank_address
from pdflow.protocol.messages import Code, Fail, Message, Register, Sync, SyncItem, SyncReply
from pdflow.protocol.producer.cell import (
    OPEN,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
    Stepped,
    progress_of,
)
from pdflow.protocol.producer.cells import ProducerCells
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.producer.writes import end_registration, refused
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address, Instant, Xid
from pdflow_sim.check.mutants.mutant import Mutant, Swap, TableRow
from pdflow_sim.check.scopes.scope import Scope

# Reports that are repeated.


def _cancelled_once(cell: ConsumerCell, _: CancelDue, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


def _not_cancelled_again(cell: ConsumerCell, bit: int, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


def _given_up(cell: ConsumerCell, event: PairMissing, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


def _ended_in_doubt(cell: ProducerCell, event: PrefillEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return end_registration(cell, event.code, False, now, ctx)


def _no_sync(self: ConsumerScheduler, peer: PrefillPeer) -> Effects:
    return NOTHING


def _sync_unanswered(self: ProducerFrames, sender: Address, message: Sync, now: Instant) -> Effects:
    _synced(self, sender, message, now)
    return NOTHING


def _missing_unnoticed(self: ConsumerFrames, sender: Address, message: SyncReply) -> Effects:
    self.synced.pop(sender, None)
    return _sync_answered(self, sender, message)


def _replies_without_verdicts(self: ProducerFrames, sender: Address, message: Sync, now: Instant) -> Effects:
    known = tuple([reg for reg in message.open if reg in self.store.cells])
    return _synced(self, sender, Sync(message.seq, message.floor, message.interest, known), now)


def _replies_about_siblings(self: ProducerFrames, sender: Address, message: Sync, now: Instant) -> Effects:
    """Answer a SYNC with every registration that is open here, whichever D rank's REG has arrived."""
    *before, reply = _synced(self, sender, message, now)
    assert isinstance(reply, Send)
    assert isinstance(reply.message, SyncReply)
    known = {item.reg for item in reply.message.items}
    cells = self.store.cells
    others = [
        SyncItem(reg, progress_of(cells[reg]), Code.NONE, False)
        for reg in message.open
        if reg in cells and reg not in known
    ]
    return (*before, Send(sender, SyncReply(message.seq, (*reply.message.items, *others))))


def _verdict_not_sent(self: ProducerFrames, sender: Address, verdict: SyncItem) -> Effects:
    return NOTHING


def _unsent_is_lost(self: ConsumerRank, peer: Address, message: Message) -> Effects:
    return NOTHING


def _fenced_at_death(self: ConsumerRank, peer: Address, message: Message, now: Instant) -> Effects:
    return self._connect(peer)


_synced = ProducerFrames._synced
_sync_answered = ConsumerFrames._sync_answered

# Reports that are sent.


def _fail_unread(self: ConsumerFrames, sender: Address, message: Fail) -> Effects:
    return NOTHING


def _refusal_not_sent(cell: ProducerCell, event: RegistrationRefused, now: Instant, ctx: ProducerContext) -> Stepped:
    return end_registration(cell, event.code, True, now, ctx, notify=False)


def _late_registration_not_answered(self: ProducerFrames, sender: Address, message: Register, code: Code) -> Effects:
    effects = _refuse_unregistered(self, sender, message, code)
    return effects[:0]


def _failure_forgotten(self: ProducerCells, xid: Xid, code: Code) -> None:
    pass


_remember_dead = ProducerCells.remember_dead


def _expiry_forgotten(self: ProducerCells, xid: Xid, code: Code) -> None:
    if code is not Code.EXPIRED:
        _remember_dead(self, xid, code)


def _release_not_sent(cell: ConsumerCell, ctx: ConsumerContext, registered: bool) -> Effects:
    return NOTHING


_refuse_unregistered = ProducerFrames._refuse_unregistered

# Reports that are requested.


def _never_asked(self: ProducerScheduler, event: PrefillMissing, now: Instant) -> Effects:
    return NOTHING


def _registration_never_ends(self: ProducerCells, timer: Timer) -> Instant | None:
    return None if timer.kind is TimerKind.REGISTRATION else _deadline(self, timer)


_deadline = ProducerCells.deadline


def _connected_by_another(self: ProducerCells, cell: ProducerCell, now: Instant) -> Effects:
    """Start the missing handshakes of a cell, but do not wait for one that is under way for another registration."""
    reg = cell.reg
    assert reg is not None
    effects: Effects = NOTHING
    for registration in cell.registrations:
        peer = rank_address(reg.engine, registration.d_rank)
        if peer not in self.peers.connected and peer not in self.peers.connecting:
            self.waiting.setdefault(peer, {})[reg] = None
            self.peers.connecting.add(peer)
            effects += (Handshake(peer),)
    return effects


CLOCKLESS = Scope(clocks=False)

REPAIR: tuple[Mutant, ...] = (
    Mutant(
        name="cancel-sent-once",
        drops="D repeats a CANCEL that gets no answer. Without it, the loss of one CANCEL keeps D's blocks forever.",
        source="M13; spec 2.9; L3; L5",
        patches=(Swap(cancel_due, _cancelled_once), Swap(cancel_again, _not_cancelled_again)),
        scope=Scope(drop=2, deadline=0, stall=0),
        breaks="S10",
    ),
    Mutant(
        name="cancel-waits-for-its-timer",
        drops="D repeats a CANCEL when a SYNC_REPLY shows that its registration has not ended. Without it, a "
        "periodic outage can lose every CANCEL that the timer sends.",
        source="spec 2.9; L3; L5",
        patches=(Swap(cancel_again, _not_cancelled_again),),
        scope=Scope(drop=1, sync=1, cancel=1, deadline=0, stall=0),
        survives="The timer also repeats the CANCEL, and no outage in these scopes is periodic forever.",
    ),
    Mutant(
        name="registration-sent-once",
        drops="D repeats a REG that P does not know. Without it, D waits until its deadline.",
        source="spec 2.8; L5; R25",
        patches=(Swap(missing, _given_up),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="no-sync",
        drops="D reports its open registrations by SYNC. Without it, a lost message stays lost until the deadline.",
        source="spec 2.8; L5",
        patches=(Swap(ConsumerScheduler._sync, _no_sync),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="sync-unanswered",
        drops="P answers a SYNC. Without it, D does not learn that a message was lost.",
        source="spec 2.8; L5",
        patches=(Swap(_synced, _sync_unanswered),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="missing-unnoticed",
        drops="A registration that is absent from a SYNC_REPLY is missing at P. Without it, D waits until its "
        "deadline.",
        source="spec 2.8; L5",
        patches=(Swap(_sync_answered, _missing_unnoticed),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="verdicts-absent-from-sync",
        drops="A SYNC_REPLY says how registrations have ended.",
        source="spec 2.8",
        patches=(Swap(_synced, _replies_without_verdicts),),
        scope=Scope(drop=1, err=1),
        survives="D treats an absent registration as missing and repeats its REG, and the tombstone answers that.",
    ),
    Mutant(
        name="sync-reply-about-siblings",
        drops="P lists a registration only to a D rank whose own REG has arrived. Without it, that rank does not learn "
        "that its REG is lost, and P waits for it until the lease ends the request.",
        source="spec 2.8; L5; L9; found by random walks",
        patches=(Swap(_synced, _replies_about_siblings),),
        needless=True,
        scope=Scope(d_tp=2, drop=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="L9",
    ),
    Mutant(
        name="tombstone-silent",
        drops="P answers a late REG with the verdict in its tombstone.",
        source="spec 2.7",
        patches=(Swap(ProducerFrames._replay, _verdict_not_sent),),
        scope=Scope(drop=1, err=1),
        survives="The next SYNC_REPLY says the same a second later.",
    ),
    Mutant(
        name="unsent-registration-forgotten",
        drops="A REG that D cannot send fails at once. Without it, D waits for the next SYNC.",
        source="spec 2.10; R25",
        patches=(Swap(ConsumerRank._undeliverable, _unsent_is_lost),),
        scope=Scope(unreachable=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="fail-ignored",
        drops="D accepts a FAIL at once. Without it, D waits for a timer before it asks again.",
        source="M18; spec 2.1",
        patches=(Swap(ConsumerFrames._failed, _fail_unread),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="refusal-not-sent",
        drops="P reports that it cannot serve a registration. Without it, D waits for a timer.",
        source="spec 2.1; R21; R22",
        patches=(Swap(refused, _refusal_not_sent),),
        scope=Scope(unreachable=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="late-registration-not-answered",
        drops="P reports that a REG has come too late. Without it, D waits for a timer.",
        source="spec 2.7; R24",
        patches=(Swap(_refuse_unregistered, _late_registration_not_answered),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="failed-prefill-forgotten",
        drops="P remembers prefills that ended without KV. Without it, a REG for one waits 10 s.",
        source="spec 2.1; R24",
        patches=(Swap(ProducerCells.remember_dead, _failure_forgotten),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="expired-prompt-forgotten",
        drops="P remembers prompts that have expired. Without it, a REG for one waits 10 s.",
        source="spec 2.1; R24",
        patches=(Swap(ProducerCells.remember_dead, _expiry_forgotten),),
        scope=Scope(),
        breaks="L9",
    ),
    Mutant(
        name="prefill-end-ignored",
        drops="A prefill that ends without KV ends the registrations that wait for it. Without it, D waits until "
        "its deadline.",
        source="spec 2.1",
        patches=(TableRow(RULES, (OPEN, PrefillEnded)),),
        scope=Scope(prefill_abort=1),
        breaks="L",
    ),
    Mutant(
        name="aborted-prefill-in-doubt",
        drops="P reports that nothing can land where it has never written. Without it, D's blocks stay in quarantine.",
        source="spec 2.4; L9",
        patches=(TableRow(RULES, (OPEN, PrefillEnded), _ended_in_doubt),),
        scope=Scope(prefill_abort=1),
        breaks="L9",
    ),
    Mutant(
        name="prefill-never-asked-for",
        drops="P's rank asks its scheduler for a prompt that does not come. Without it, D waits until its deadline.",
        source="spec 2.1",
        patches=(Swap(ProducerScheduler._missing, _never_asked),),
        scope=Scope(p_restart=1, sync=1),
        breaks="L",
    ),
    Mutant(
        name="registration-never-ends",
        drops="A registration that is not renewed ends.",
        source="spec 2.8; C4; S9",
        patches=(Swap(_deadline, _registration_never_ends),),
        scope=Scope(d_restart=1, prefill_abort=1, sync=1),
        survives="In strict, a registration also ends with its prompt: when the prompt is finished, ended or "
        "unknown, or its lease has ended.",
    ),
    Mutant(
        name="release-not-sent",
        drops="D sends RELEASE when it will not register. Without it, P holds the prompt for 30 s.",
        source="spec 2.9; L2; R11",
        patches=(Swap(release_prompt, _release_not_sent),),
        scope=CLOCKLESS,
        breaks="L2",
    ),
    Mutant(
        name="lost-wake-up",
        drops="Every registration that waits for a connection is notified of it. Without it, the second one "
        "waits for a timer.",
        source="M16; R29",
        patches=(Swap(ProducerCells.connect, _connected_by_another),),
        scope=Scope(requests=2, abort=0, clocks=False),
        breaks="S11",
    ),
)

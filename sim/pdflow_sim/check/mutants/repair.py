"""Mutants of reports to a waiting peer: sent at all, sent again when lost, and asked for when they never come."""

from __future__ import annotations

from pdflow.protocol.consumer.cell import CancelDue, ConsumerCell, ConsumerContext, release_prompt
from pdflow.protocol.consumer.cell import Stepped as ConsumerStepped
from pdflow.protocol.consumer.cells import PrefillPeer
from pdflow.protocol.consumer.frames import ConsumerFrames
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.rules import cancel_again, cancel_due, missing
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import NOTHING, Effects, Handshake
from pdflow.protocol.events import PairMissing, PrefillEnded, PrefillMissing
from pdflow.protocol.ids import rank_address
from pdflow.protocol.messages import Code, Fail, Message, Register, Sync, SyncItem, SyncReply
from pdflow.protocol.producer.cell import OPEN, ProducerCell, ProducerContext, RegistrationRefused, Stepped
from pdflow.protocol.producer.cells import ProducerCells
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.producer.writes import end_registration, refused
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address, Instant, Xid
from pdflow_sim.check.mutants.mutant import Mutant, Swap, TableRow
from pdflow_sim.check.scopes.scope import Scope

# Said again.


def _cancelled_once(cell: ConsumerCell, _: CancelDue, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


def _not_cancelled_again(cell: ConsumerCell, bit: int, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


def _given_up(cell: ConsumerCell, event: PairMissing, now: Instant, ctx: ConsumerContext) -> ConsumerStepped:
    return cell, NOTHING


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


def _verdict_unspoken(self: ProducerFrames, sender: Address, verdict: SyncItem) -> Effects:
    return NOTHING


def _unsent_is_lost(self: ConsumerRank, peer: Address, message: Message) -> Effects:
    return NOTHING


def _fenced_at_death(self: ConsumerRank, peer: Address, message: Message, now: Instant) -> Effects:
    return self._connect(peer)


_synced = ProducerFrames._synced
_sync_answered = ConsumerFrames._sync_answered

# Said at all.


def _fail_unread(self: ConsumerFrames, sender: Address, message: Fail) -> Effects:
    return NOTHING


def _refused_in_silence(cell: ProducerCell, event: RegistrationRefused, now: Instant, ctx: ProducerContext) -> Stepped:
    return end_registration(cell, event.code, True, now, ctx, notify=False)


def _refuses_in_silence(self: ProducerFrames, sender: Address, message: Register, code: Code) -> Effects:
    effects = _refuse_unregistered(self, sender, message, code)
    return effects[:0]


def _death_forgotten(self: ProducerCells, xid: Xid, code: Code) -> None:
    pass


def _released_by_nobody(cell: ConsumerCell, ctx: ConsumerContext, registered: bool) -> Effects:
    return NOTHING


_refuse_unregistered = ProducerFrames._refuse_unregistered

# Asked for.


def _never_asked(self: ProducerScheduler, event: PrefillMissing, now: Instant) -> Effects:
    return NOTHING


def _registration_for_ever(self: ProducerCells, timer: Timer) -> Instant | None:
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
        drops="A CANCEL without an answer is sent again. Its loss would keep D's blocks for ever.",
        source="1.3(f) 13; 7.4; L3; L5",
        patches=(Swap(cancel_due, _cancelled_once), Swap(cancel_again, _not_cancelled_again)),
        scope=Scope(drop=2, deadline=0, stall=0),
        breaks="L",
    ),
    Mutant(
        name="cancel-waits-for-its-timer",
        drops="A SYNC's answer that tells of no end has CANCEL sent again. A regular outage starves its timer.",
        source="7.4 CANCEL; L3; L5",
        patches=(Swap(cancel_again, _not_cancelled_again),),
        scope=Scope(drop=1, sync=1, cancel=1, deadline=0, stall=0),
        survives="The timer sends it again too, and here no outage is regular for ever.",
    ),
    Mutant(
        name="registration-sent-once",
        drops="A REG that P does not know is sent again. D would wait until its deadline.",
        source="7.4 SYNC; L5; R25",
        patches=(Swap(missing, _given_up),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="no-sync",
        drops="D says what it holds open. Whatever was lost would be missing until the deadline.",
        source="7.4 SYNC; L5",
        patches=(Swap(ConsumerScheduler._sync, _no_sync),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="sync-unanswered",
        drops="P answers a SYNC. D would learn nothing of what was lost.",
        source="7.4 SYNC; L5",
        patches=(Swap(_synced, _sync_unanswered),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="missing-unnoticed",
        drops="What a reply leaves out is missing at P. D would wait until its deadline.",
        source="7.4 SYNC; L5",
        patches=(Swap(_sync_answered, _missing_unnoticed),),
        scope=Scope(drop=1),
        breaks="L",
    ),
    Mutant(
        name="verdicts-left-out-of-sync",
        drops="A reply says how registrations have ended.",
        source="7.4 SYNC",
        patches=(Swap(_synced, _replies_without_verdicts),),
        scope=Scope(drop=1, err=1),
        survives="What is left out counts as missing, its REG comes again, and the tombstone answers that.",
    ),
    Mutant(
        name="tombstone-silent",
        drops="A late REG meets its verdict again.",
        source="7.3; 7.4",
        patches=(Swap(ProducerFrames._replay, _verdict_unspoken),),
        scope=Scope(drop=1, err=1),
        survives="SYNC's reply says the same a second later.",
    ),
    Mutant(
        name="unsent-registration-forgotten",
        drops="A REG that could not leave fails at once. D would wait for the next SYNC.",
        source="7.4; R25",
        patches=(Swap(ConsumerRank._undeliverable, _unsent_is_lost),),
        scope=Scope(unreachable=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="fail-ignored",
        drops="D believes a FAIL at once. It would wait for a timer to ask again.",
        source="1.3(f) 18; 7.4",
        patches=(Swap(ConsumerFrames._failed, _fail_unread),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="refused-in-silence",
        drops="P says that a registration cannot be served. D would wait for a timer.",
        source="7.4; R21; R22",
        patches=(Swap(refused, _refused_in_silence),),
        scope=Scope(unreachable=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="late-registration-in-silence",
        drops="A REG that comes too late is told so. D would wait for a timer.",
        source="7.4; R24",
        patches=(Swap(_refuse_unregistered, _refuses_in_silence),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="dead-prefill-forgotten",
        drops="P remembers prefills that ended without KV. A REG for one would wait 10 s.",
        source="7.4; R24",
        patches=(Swap(ProducerCells.remember_dead, _death_forgotten),),
        scope=Scope(prefill_abort=1, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="prefill-end-unheard",
        drops="A prefill that ends without KV ends what waits for it. D would wait until its deadline.",
        source="7.4",
        patches=(TableRow(RULES, (OPEN, PrefillEnded)),),
        scope=Scope(prefill_abort=1),
        breaks="L",
    ),
    Mutant(
        name="prefill-never-asked-for",
        drops="P asks its scheduler for a prompt that does not come. D would wait until its deadline.",
        source="7.4 NO_REQUEST",
        patches=(Swap(ProducerScheduler._missing, _never_asked),),
        scope=Scope(p_restart=1, sync=1),
        breaks="L",
    ),
    Mutant(
        name="grant-for-ever",
        drops="A registration that nobody renews ends.",
        source="7.4; C4; S9",
        patches=(Swap(_deadline, _registration_for_ever),),
        scope=Scope(d_restart=1, prefill_abort=1, sync=1),
        survives="In strict each ends with its prompt too: when that is finished, ended, unknown, or its lease over.",
    ),
    Mutant(
        name="release-unsaid",
        drops="D says that it will not come. P would hold the prompt for 30 s.",
        source="7.4 RELEASE; L2; R11",
        patches=(Swap(release_prompt, _released_by_nobody),),
        scope=CLOCKLESS,
        breaks="L2",
    ),
    Mutant(
        name="lost-wake-up",
        drops="Everybody who waits for a connection is told of it. The second would wait for a timer.",
        source="1.3(f) 16; R29",
        patches=(Swap(ProducerCells.connect, _connected_by_another),),
        scope=Scope(requests=2, abort=0, clocks=False),
        breaks="L1",
    ),
)

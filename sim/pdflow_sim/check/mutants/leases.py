"""Mutants of the release of P's blocks: leases, pins, releases, and the lease word in which a pulling D sees it."""

from __future__ import annotations

from pdflow.protocol.consumer.reads import ConsumerReads, ReadCell
from pdflow.protocol.effects import NOTHING, Effects, ReadWord, ReleaseBlocks, Send, SendLocal
from pdflow.protocol.events import PairLanded, ReadEnded, ShardReleased, SourceReady, WordRead
from pdflow.protocol.messages import Code, Register, Release, Sync, Taken
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    LEASED,
    LeaseEnded,
    ProducerCell,
    ProducerContext,
    ShardTaken,
    Stepped,
)
from pdflow.protocol.producer.cells import ProducerCells
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.producer.lease import expired_unclaimed, released
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.producer.writes import shard_taken
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address, Instant, Xid
from pdflow_sim.check.mutants.mutant import Mutant, Swap, TableRow
from pdflow_sim.check.scopes.scope import Scope

# A lease's end leaves its entry behind, and a renewal takes it for a living one.


def _expired_but_kept(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    return cell.losing_its_source(), NOTHING


def _revived(self: ProducerCells, xid: Xid, until: Instant) -> None:
    # An entry without a source has nothing to renew; one that is only expired is taken for a living one.
    for key in self.keys.get(xid, ()):
        cell = self.cells[key]
        if cell.source is not None:
            self.update(key, ProducerCell(LEASED, xid).becoming_leased(cell.source, cell.request_id, until))
            self.deadlines.push(until, Timer(TimerKind.LEASE, xid))


_frames_registered = ProducerFrames._registered


def _refused_if_expired(self: ProducerFrames, sender: Address, message: Register, now: Instant) -> Effects:
    cell = self.store.cells.get(message.xid)
    if cell is not None and cell.expired:
        return self._refuse_unregistered(sender, message, Code.EXPIRED)
    return _frames_registered(self, sender, message, now)


# Expiry and completion each report the end, and the scheduler frees at every report.


def _reported_twice(self: ProducerCells, cell: ProducerCell, code: Code) -> Effects:
    effects = _release_shard(self, cell, code)
    return effects + effects[-1:] if cell.expired else effects


def _freed_at_every_report(self: ProducerScheduler, event: ShardReleased, now: Instant) -> Effects:
    product = self.products[event.xid]
    assert product.allocation is not None
    return (ReleaseBlocks(event.xid, product.allocation, event.code),)


_release_shard = ProducerCells._release_shard


def _any_rank_frees(self: ProducerScheduler, event: ShardReleased, now: Instant) -> Effects:
    product = self.products.pop(event.xid, None)
    if product is None or product.allocation is None:
        return NOTHING
    return (ReleaseBlocks(event.xid, product.allocation, event.code),)


# RELEASE.


def _release_frees(self: ProducerFrames, sender: Address, message: Release, now: Instant) -> Effects:
    store = self.store
    effects: Effects = NOTHING
    for key in store.keys.get(message.xid, ()):
        cell = store.cells[key]
        if cell.phase is LEASED:
            effects += store.apply(key, cell, LeaseEnded(), now)
    return effects


def _release_frees_whatever(self: ProducerFrames, sender: Address, message: Release, now: Instant) -> Effects:
    store = self.store
    effects: Effects = NOTHING
    for key in store.keys.get(message.xid, ()):
        cell = store.cells[key]
        if cell.source is not None:
            effects += store.put(key, cell, cell.becoming_gone(Code.EXPIRED), now)
    return effects


def _unshortened(cell: ProducerCell, until: Instant) -> ProducerCell:
    return cell


def _unshortened_where_held(cell: ProducerCell, until: Instant) -> ProducerCell:
    return released(cell, until) if cell.phase is LEASED else cell


def _interest_forgotten(self: ProducerFrames, sender: Address, message: Sync, now: Instant) -> Effects:
    self.store.interests.pop(sender, None)
    return _synced(self, sender, message, now)


_synced = ProducerFrames._synced


def _nothing_early(self: ProducerCells, xid: Xid) -> None:
    pass


# Reading.


def _word_ignored(self: ConsumerReads, event: WordRead, now: Instant) -> Effects:
    read = self.reads.get(event.op)
    if read is not None:
        event = WordRead(event.op, read.params.rank_words[read.op.p_rank].value)
    return _word_read(self, event, now)


_word_read = ConsumerReads.word_read
_post = ConsumerReads.post


def _word_first(self: ConsumerReads, read: ReadCell) -> Effects:
    self.reads[read.op] = read.with_posted()
    return (ReadWord(read.op, read.source, read.params.rank_words[read.op.p_rank].index),)


def _data_after_word(self: ConsumerReads, event: WordRead, now: Instant) -> Effects:
    read = self.reads.get(event.op)
    if read is None:
        return NOTHING
    if event.value != read.params.rank_words[read.op.p_rank].value:
        return self.failed(event.op, Code.STALE)
    return _post(self, read)


def _landed_after_data(self: ConsumerReads, event: ReadEnded, now: Instant) -> Effects:
    read = self.reads.get(event.op)
    if read is None:
        return NOTHING
    if not event.ok:
        return self.failed(event.op, Code.IO)
    del self.reads[event.op]
    taken = Taken(read.params.xid, self.rank, read.readers)
    return (SendLocal(self.scheduler, PairLanded(read.op, read.source)), Send(read.source, taken))


def _readers_counted(cell: ProducerCell, event: ShardTaken, now: Instant, ctx: ProducerContext) -> Stepped:
    counted = ShardTaken(cell.completed_readers.bit_count(), event.readers)
    return shard_taken(cell, counted, now, ctx)


def _first_reader_frees(cell: ProducerCell, event: ShardTaken, now: Instant, ctx: ProducerContext) -> Stepped:
    return shard_taken(cell, ShardTaken(event.d_rank, 1), now, ctx)


def _early_is_early(self: ProducerRank, event: SourceReady, now: Instant) -> Effects:
    self.store.early_readers.clear()
    return _source_ready(self, event, now)


_source_ready = ProducerRank._source_ready

LEASES: tuple[Mutant, ...] = (
    Mutant(
        name="expiry-frees-under-a-write",
        drops="When a lease ends, P keeps the blocks until the WRITEs in flight have ended. Without it, the NIC "
        "reads blocks that belong to another prompt.",
        source="M1; spec 2.11; C3; R01",
        patches=(TableRow(RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed),),
        breaks="S2",
    ),
    Mutant(
        name="deferred-write-after-expiry",
        drops="When a lease ends, P drops a WRITE that waits for its connection. Without it, P posts the WRITE "
        "from freed blocks.",
        source="M2; spec 2.11; C3; R02",
        guards=("lease_rechecked",),
        breaks="S2",
    ),
    Mutant(
        name="heartbeat-revives-a-lease",
        drops="A lease that has ended cannot be renewed. Without it, P posts a WRITE from freed blocks.",
        source="M8; spec 2.11",
        patches=(
            TableRow(RULES, (LEASED, LeaseEnded), _expired_but_kept),
            Swap(_frames_registered, _refused_if_expired),
            Swap(ProducerCells.renew, _revived),
        ),
        scope=Scope(sync=1),
        breaks="S2",
    ),
    Mutant(
        name="released-at-every-report",
        drops="P's scheduler frees a prompt once, when all ranks have released it. Without it, an expiry and a "
        "completion at the same time free it twice.",
        source="M15; R49",
        patches=(
            Swap(_release_shard, _reported_twice),
            Swap(ProducerScheduler._shard_released, _freed_at_every_report),
        ),
        breaks="S6",
    ),
    Mutant(
        name="first-rank-frees",
        drops="P's scheduler frees a prompt when every rank has released it. Without it, P frees blocks that "
        "another rank's WRITE still reads.",
        source="spec 1.1; spec 2.1",
        patches=(Swap(ProducerScheduler._shard_released, _any_rank_frees),),
        scope=Scope(p_tp=2, abort=0, deadline=0, stall=0),
        breaks="S2",
    ),
    Mutant(
        name="release-frees-under-a-write",
        drops="RELEASE has no effect while a registration holds the prompt. Without it, P frees blocks that the "
        "WRITE of another attempt still reads.",
        source="spec 2.9",
        patches=(Swap(ProducerFrames._released, _release_frees_whatever),),
        breaks="S2",
    ),
    Mutant(
        name="release-leaves-no-time",
        drops="RELEASE leaves the lease 2 s, for a REG that it may have overtaken. Without it, P refuses that REG.",
        source="spec 2.9",
        patches=(Swap(ProducerFrames._released, _release_frees),),
        scope=Scope(requests=2, same_product=True, concurrent=False, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="release-shortens-nothing",
        drops="RELEASE shortens the lease. Without it, P holds for 30 s a prompt that no D wants.",
        source="spec 2.9; L2; R11",
        patches=(Swap(released, _unshortened),),
        scope=Scope(clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="release-while-registered-forgotten",
        drops="A RELEASE that arrives while a registration holds the prompt takes effect when that registration "
        "ends. Without it, P holds the prompt for 30 s.",
        source="spec 2.9; L2; R11",
        patches=(Swap(released, _unshortened_where_held),),
        scope=Scope(err=1, clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="early-release-forgotten",
        drops="A RELEASE that arrives before its prompt is computed takes effect when it is computed. Without "
        "it, P holds the prompt for 30 s.",
        source="spec 2.9; L2; R11",
        patches=(Swap(ProducerCells.remember_early, _nothing_early),),
        scope=Scope(clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="lease-word-ignored",
        drops="D commits a READ only if the lease word is unchanged. Without it, D decodes KV that P has put "
        "into the blocks since.",
        source="spec 2.3; R04",
        patches=(Swap(_word_read, _word_ignored),),
        scope=Scope(pulls=True),
        breaks="S2",
    ),
    Mutant(
        name="lease-word-read-first",
        drops="D reads the lease word after the data. Without it, D reads the word before the data, when it "
        "proves nothing.",
        source="spec 2.3; R04",
        patches=(
            Swap(_post, _word_first),
            Swap(_word_read, _data_after_word),
            Swap(ConsumerReads.ended, _landed_after_data),
        ),
        scope=Scope(pulls=True),
        breaks="S2",
    ),
    Mutant(
        name="readers-counted",
        drops="P records which D ranks have sent TAKEN. Without it, one rank's TAKEN counts twice, and P frees "
        "blocks that another rank still reads.",
        source="spec 2.3; C1; R14",
        patches=(Swap(shard_taken, _readers_counted),),
        scope=Scope(pulls=True, d_tp=2, dup=1, clocks=False),
        breaks="S7",
    ),
    Mutant(
        name="first-reader-frees",
        drops="P frees blocks when every D rank that reads them has sent TAKEN. Without it, P frees blocks that "
        "another rank still reads.",
        source="spec 2.3",
        patches=(Swap(shard_taken, _first_reader_frees),),
        scope=Scope(pulls=True, d_tp=2, clocks=False),
        breaks="S7",
    ),
    Mutant(
        name="early-taken-forgotten",
        drops="A TAKEN counts even if it arrives before P's rank knows of the prompt. Without it, P holds the "
        "prompt for 30 s.",
        source="spec 2.3; L2; R26; found by random walks",
        patches=(Swap(_source_ready, _early_is_early),),
        scope=Scope(pulls=True, lagging=True, clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="lost-release-unrepaired",
        drops="When D stops naming a prompt in its SYNCs, P shortens the lease to 2 s.",
        source="spec 2.8; spec 2.9; L5",
        patches=(Swap(_synced, _interest_forgotten),),
        scope=Scope(drop=1, sync=1),
        survives="The rule only shortens a lease, which ends in any case.",
    ),
)

"""Mutants of identity: attempts, prompts, incarnations of an engine, and registrations that have ended already."""

from __future__ import annotations

from heapq import heappop

import msgspec

from pdflow.protocol.consumer.cell import ConsumerCell, bit_of
from pdflow.protocol.consumer.cells import ConsumerCells
from pdflow.protocol.consumer.frames import ConsumerFrames
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import NOTHING, Effects, Send
from pdflow.protocol.events import (
    DecodeAdmitted,
    HandshakeEnded,
    PairFailed,
    PairLanded,
    PairReported,
    PeerRestarted,
    Source,
)
from pdflow.protocol.ids import Op, Reg, base_id, engine_of
from pdflow.protocol.messages import Cancel, CancelAck, Code, Disposition, Register, SyncItem
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.cell import ProducerContext
from pdflow.protocol.producer.frames import ProducerFrames
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.tombstones import Tombstones
from pdflow.protocol.producer.writes import requested_range
from pdflow.protocol.values import Address, EngineId, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, Scope

# Attempts.


def _of_any_attempt(self: ConsumerScheduler, event: PairReported | PairLanded | PairFailed, now: Instant) -> Effects:
    """Apply the event to the first waiting request of the same client id."""
    base = base_id(event.op.reg.request_id)
    for cell in self.cells.values():
        if base_id(cell.request_id) == base and cell.registration is not None:
            event = msgspec.structs.replace(event, op=Op(cell.reg, event.op.p_rank, event.op.d_rank))
            break
    if isinstance(event, PairLanded):
        event = PairLanded(event.op, event.sender)
    return _for_pair(self, event, now)


_for_pair = ConsumerScheduler._for_pair


def _any_sender(cell: ConsumerCell, op: Op, sender: Address) -> int:
    return bit_of(cell, op, f"{cell.params.prefill.engine}.r{op.p_rank}")


# Content.


def _head_for_tail(registration: Register, source: Source, ctx: ProducerContext) -> tuple[int, int] | Code:
    asked = requested_range(registration, source, ctx)
    return asked if isinstance(asked, Code) else (0, asked[1])


# Tombstones and the floor.


def _no_tombstone(self: Tombstones, item: SyncItem) -> None:
    pass


def _floor_forgotten(self: Tombstones, reg: Reg) -> SyncItem | None:
    return self.verdicts.get(reg.seq)


def _floor_ends_its_own(self: Tombstones, floor: int) -> None:
    if floor > self.floor:
        _raise_floor(self, floor)
        if self.order and self.order[0] == floor:
            del self.verdicts[heappop(self.order)]


_raise_floor = Tombstones.raise_floor


def _without_window(self: Tombstones, reg: Reg) -> bool:
    return False


def _floor_too_high(self: ConsumerCells, seq: int) -> None:
    self.floor = self.next_seq


def _floor_never_rises(self: ConsumerCells, seq: int) -> None:
    pass


def _seq_repeated(self: ConsumerScheduler, event: DecodeAdmitted, now: Instant) -> Effects:
    effects = _admitted(self, event, now)
    self.store.next_seq = 1
    return effects


def _no_tombstone_for_unknown(self: ProducerFrames, sender: Address, message: Cancel, now: Instant) -> Effects:
    reg = message.reg
    store = self.store
    if reg in store.cells or store.tombstones(reg.engine, reg.incarnation).find(reg) is not None:
        return _cancelled(self, sender, message, now)
    return (Send(sender, CancelAck(reg, store.context.rank, Disposition.NOT_STARTED, True)),)


_admitted = ConsumerScheduler._admitted
_cancelled = ProducerFrames._cancelled


# Incarnations.


def _any_incarnation(self: Peers, peer: Address, incarnation: int) -> bool:
    self.incarnations.setdefault(engine_of(peer), incarnation)
    return True


def _without_nonce(self: Peers, peer: Address, incarnation: int) -> bool:
    """Accept an incarnation as soon as one of its frames arrives, without a nonce."""
    self.incarnations[engine_of(peer)] = incarnation
    return True


def _ignored_during_fence(self: ConsumerRank, event: HandshakeEnded, now: Instant) -> Effects:
    if event.ok and event.peer in self.fencing:
        self.peers.connecting.discard(event.peer)
        return NOTHING
    return _handshake_ended(self, event, now)


_handshake_ended = ConsumerRank._handshake_ended


def _old_incarnation_kept(self: ProducerRank, engine: EngineId, incarnation: int, now: Instant) -> Effects:
    return NOTHING


def _computed_by_anybody(self: ConsumerScheduler, cell: ConsumerCell) -> bool:
    return True


def _restart_unnoticed(self: ConsumerScheduler, event: PeerRestarted, now: Instant) -> Effects:
    return NOTHING


def _of_any_incarnation(self: ConsumerFrames, reg: Reg) -> bool:
    return True


def _retired_may_return(self: Peers, peer: Address, incarnation: int) -> int | None:
    self.retired.clear()
    return _answered(self, peer, incarnation)


def _every_report_of_a_restart(self: ConsumerScheduler, event: PeerRestarted, now: Instant) -> Effects:
    self.retired.discard((event.engine, event.retired))
    return _restarted(self, event, now)


_answered = Peers.answered
_computed_by_retired = ConsumerScheduler._computed_by_retired
_restarted = ConsumerScheduler._restarted


def _orphan_like_any(self: ConsumerCell) -> ConsumerCell:
    return self


IDENTITY: tuple[Mutant, ...] = (
    Mutant(
        name="any-attempt",
        drops="P's reports belong to one attempt. Without it, D takes the blocks of another attempt for written, "
        "or frees them.",
        source="M4; spec 2.7; S8",
        patches=(Swap(_for_pair, _of_any_attempt),),
        scope=Scope(requests=2, same_product=True, concurrent=False, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="any-sender",
        drops="A report counts only for the shard of the rank that sent it.",
        source="spec 1.3; C1; R14; S9",
        patches=(Swap(bit_of, _any_sender),),
        scope=Scope(p_tp=2, abort=0, deadline=0, stall=0),
        survives="A second check: D's rank names a pair by its sender, and no sender is forged in these scopes.",
    ),
    Mutant(
        name="matched-by-base-id",
        drops="A registration names its prompt by xid. Without it, P confuses two prompts of one client id, or "
        "matches neither.",
        source="spec 1.2; R12; R39",
        guards=("matches_by_xid",),
        scope=Scope(requests=2, same_base=True, abort=0, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="content-unchecked",
        drops="P writes a prompt only if D has sent its digest. Without it and without matching by xid, P writes "
        "another prompt.",
        source="spec 2.12; S4; S5; R39; R52",
        guards=("checks_content", "matches_by_xid"),
        scope=Scope(requests=2, same_base=True, abort=0, deadline=0, stall=0),
        breaks="S4",
    ),
    Mutant(
        name="head-for-tail",
        drops="The blocks of a D that has the beginning of a prompt are for the rest of it. Without it, P writes "
        "the beginning into them.",
        source="M17; spec 2.12; R52",
        patches=(Swap(requested_range, _head_for_tail),),
        scope=Scope(dialect=VLLM_COMPAT, hit_tokens=BLOCK_TOKENS),
        breaks="S4",
    ),
    Mutant(
        name="no-tombstone",
        drops="A registration that has ended leaves a tombstone. Without it, P writes again for a late copy of "
        "the REG.",
        source="M5; spec 2.7; R12",
        patches=(Swap(Tombstones.add_tombstone, _no_tombstone),),
        scope=Scope(dup=1),
        breaks="S1",
    ),
    Mutant(
        name="no-tombstone-for-unknown-cancel",
        drops="A CANCEL that has overtaken its REG leaves a tombstone. Without it, P serves the REG.",
        source="spec 2.7; S1",
        patches=(Swap(_cancelled, _no_tombstone_for_unknown),),
        scope=Scope(delay=1),
        breaks="S1",
    ),
    Mutant(
        name="floor-forgotten",
        drops="P serves no REG below D's floor. Without it, P writes again for a late REG whose tombstone the "
        "floor has removed.",
        source="spec 2.7",
        patches=(Swap(Tombstones.find, _floor_forgotten),),
        scope=Scope(requests=2, same_product=True, concurrent=False, dup=1, deadline=0, stall=0),
        breaks="S1",
    ),
    Mutant(
        name="floor-removes-its-own-tombstone",
        drops="D's floor removes the tombstones below it. Without it, the floor removes the tombstone of its own seq "
        "too, and P writes again for a late REG of a registration that D still asks for.",
        source="spec 2.7",
        patches=(Swap(Tombstones.raise_floor, _floor_ends_its_own),),
        scope=Scope(requests=2, same_product=True, dup=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="floor-too-high",
        drops="The floor is the smallest seq that D may still ask for. Without it, P forgets registrations that "
        "are still open.",
        source="spec 2.7",
        patches=(Swap(ConsumerCells._close, _floor_too_high),),
        scope=Scope(requests=3, delay=1, concurrent=False, abort=0, clocks=False),
        breaks="S11",
    ),
    Mutant(
        name="floor-never-rises",
        drops="D raises its floor. Without it, P remembers every registration that has ended.",
        source="spec 2.7; S9",
        patches=(Swap(ConsumerCells._close, _floor_never_rises),),
        breaks="S11",
    ),
    Mutant(
        name="no-window",
        drops="P keeps at most 65,536 registrations above a floor. Without it, a D that never raises its floor fills "
        "P's memory.",
        source="spec 2.7; S9",
        patches=(Swap(Tombstones.beyond, _without_window),),
        scope=Scope(requests=2, window=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="S11",
    ),
    Mutant(
        name="seq-repeated",
        drops="Every attempt has its own seq. Without it, the tombstone of one attempt ends another.",
        source="spec 2.7",
        patches=(Swap(_admitted, _seq_repeated),),
        scope=Scope(requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="S11",
    ),
    Mutant(
        name="any-incarnation",
        drops="A frame counts only if it is from the incarnation that the last handshake showed. Without it, a "
        "frame of a former incarnation counts.",
        source="M12; spec 1.3; C13; S8; R44; R46",
        patches=(Swap(Peers.current, _any_incarnation),),
        scope=Scope(p_restart=1, drop=1, sync=1, stall=0),
        breaks="S8",
    ),
    Mutant(
        name="incarnation-without-nonce",
        drops="A new incarnation counts only after a handshake reply that echoes a nonce. Without it, a late "
        "frame of a former incarnation counts.",
        source="spec 1.3; S8",
        patches=(Swap(Peers.current, _without_nonce),),
        scope=Scope(p_restart=1, drop=1, sync=1, stall=0),
        breaks="S8",
    ),
    Mutant(
        name="incarnation-ignored-during-fence",
        drops="D records the incarnation in a handshake reply even while it is closing the connection. Without "
        "it, D accepts frames of a former incarnation.",
        source="spec 1.3; S8; found by tests/sim/faults/test_fault_swarm.py",
        patches=(Swap(_handshake_ended, _ignored_during_fence),),
        scope=Scope(d_tp=2, p_restart=1, sync=1, abort=0, deadline=0, stall=0),
        breaks="S8",
    ),
    Mutant(
        name="retired-incarnation-returns",
        drops="An incarnation that has been replaced never counts again. Without it, D acts on frames of two engines "
        "of one id.",
        source="spec 1.3; S8",
        patches=(Swap(_answered, _retired_may_return),),
        scope=Scope(twin=True, lose=2, sync=1, abort=0, deadline=0, stall=0),
        breaks="S8",
    ),
    Mutant(
        name="dead-d-still-registered",
        drops="A new incarnation of D ends the registrations of the former one. Without it, P writes to the "
        "former one.",
        source="spec 1.3; C13; R46",
        patches=(Swap(ProducerRank._retire, _old_incarnation_kept),),
        scope=Scope(d_restart=1, sync=1),
        survives="In these scopes no process reuses a dead process's memory: WRITEs to it fail, and its cells end "
        "by TTL or lease.",
    ),
    Mutant(
        name="p-restart-unnoticed",
        drops="When P restarts, D resolves the requests of its former incarnation and fences it. Without it, an "
        "answer of the new incarnation frees blocks that the former one still writes.",
        source="spec 1.3; R44; R46",
        patches=(Swap(ConsumerScheduler._restarted, _restart_unnoticed),),
        scope=Scope(p_restart=1, sync=1),
        breaks="S1",
    ),
    Mutant(
        name="restart-fails-later-prompts",
        drops="P's answer names its incarnation, so a restart fails only what the former one has computed. Without it, "
        "the first request to a restarted P fails at each D that had connected to the former one.",
        source="spec 1.3; L10",
        patches=(Swap(_computed_by_retired, _computed_by_anybody),),
        scope=Scope(attempts=2, p_restart=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="L10",
    ),
    Mutant(
        name="every-report-of-a-restart",
        drops="Of D's reports that P has restarted, only the first counts. Without it, the report of a second D rank "
        "fails requests that came after the restart.",
        source="spec 1.3; L10",
        patches=(Swap(_restarted, _every_report_of_a_restart),),
        scope=Scope(p_restart=1, sync=1),
        breaks="L10",
    ),
    Mutant(
        name="new-incarnation-settles-orphans",
        drops="An answer of a restarted P settles no WRITE of its former incarnation. Without it, that WRITE "
        "lands in blocks that D has freed.",
        source="spec 2.6; F9; S8",
        patches=(Swap(ConsumerCell.with_orphaned, _orphan_like_any),),
        scope=Scope(p_restart=1, sync=1),
        breaks="S1",
    ),
    Mutant(
        name="answers-to-another-incarnation",
        drops="D accepts no answer to its former incarnation.",
        source="spec 1.3; S8",
        patches=(Swap(ConsumerFrames._mine, _of_any_incarnation),),
        scope=Scope(d_restart=1, drop=1, deadline=0),
        survives="A second check: an answer names a registration of that incarnation, which the new one does not have.",
    ),
)

"""Mutants of rules that depend on clocks, searched with clocks: the end of a quarantine, and silent peers."""

from __future__ import annotations

import msgspec

from pdflow.protocol.consumer.cell import QUARANTINED, ConsumerCell, ConsumerContext, RequestFailed, Stepped
from pdflow.protocol.consumer.cells import ConsumerCells, PrefillPeer
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.rules import _outcome, freed, reclaim_at, reported, resolve
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import NOTHING, Effects, Outcome, SendLocal
from pdflow.protocol.events import DecodeQueued, PairReported, PrefillMissing
from pdflow.protocol.ids import Reg
from pdflow.protocol.messages import Code, Heartbeat, Message
from pdflow.protocol.producer.cell import OPEN, ProducerCell
from pdflow.protocol.producer.lease import renewed
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import NEVER, Address, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import ENDLESS, Scope


def _without_margin(now: Instant, ctx: ConsumerContext) -> Instant:
    """Return the end of a quarantine as if both engines had one clock, and nothing took any time."""
    return now + ctx.timers.lease_ns


def _stalled_at_once(cell: ConsumerCell, event: PairReported, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = reported(cell, event, now, ctx)
    return (after.with_progress(after.best, now - ctx.timers.stall_ns) if after.stall_until < NEVER else after), effects


def _cancelled_as_failed(code: Code) -> Outcome:
    return Outcome.FAILED


def _without_lease(now: Instant, ctx: ConsumerContext) -> Instant:
    return reclaim_at(now, ctx) - ctx.timers.lease_ns


def _renewed_after_its_end(self: ConsumerScheduler, peer: PrefillPeer) -> Effects:
    """Send a SYNC that renews the leases of quarantined requests too."""
    kept = self.store.cells
    cells = dict(kept)
    for request_id, cell in cells.items():
        if cell.phase is QUARANTINED:
            kept[request_id] = cell.becoming_queued()
    effects = _sync(self, peer)
    kept.clear()
    kept.update(cells)
    return effects


def _heartbeat_kept(self: ConsumerRank, peer: Address, message: Message, now: Instant) -> Effects:
    effects = _defer(self, peer, message, now)
    if type(message) is Heartbeat and peer in self.peers.connecting:
        self.pending[peer] = (*self.pending.get(peer, ()), message)
    return effects


def _silence_frees(self: ConsumerScheduler, peer: PrefillPeer, now: Instant) -> Effects:
    effects = _fail_silent(self, peer, now)
    if not effects:
        return NOTHING
    for request_id in tuple(peer.requests):
        cell = self.cells[request_id]
        if cell.phase is QUARANTINED:
            after, more = freed(cell, self.store.context)
            effects += more + self.store.put(cell, after, now)
    return effects


def _silence_unnoticed(self: ConsumerScheduler, peer: PrefillPeer, now: Instant) -> Effects:
    return NOTHING


def _silence_unfenced(self: ConsumerScheduler, peer: PrefillPeer, now: Instant) -> Effects:
    dead = self.store.context.timers.dead_ns
    if all(now - last_seen < dead for last_seen in peer.last_seen.values()):
        return NOTHING
    return self._to_all_of(peer.info.engine, RequestFailed(Code.PEER_DEAD), now)


def _never_renewed(cell: ProducerCell, until: Instant) -> ProducerCell:
    return cell


def _never_suspect(self: ConsumerCells, peer: PrefillPeer, now: Instant) -> bool:
    return False


def _overdue_sync_kept(self: ConsumerScheduler, event: DecodeQueued, now: Instant) -> Effects:
    peer = self.store.peers.get(event.params.prefill.engine)
    at = None if peer is None else peer.sync_at
    if peer is None or at is None:
        return _queued(self, event, now)
    peer.sync_at = max(at, now)
    effects = _queued(self, event, now)
    peer.sync_at = at
    return effects


def _asked_for_again(self: ProducerRank, timer: Timer, now: Instant) -> Effects:
    """Ask for a prompt whenever the timer of its open registration fires."""
    cell = self.cells.get(timer.key) if isinstance(timer.key, Reg) else None
    if timer.kind is not TimerKind.REGISTRATION or cell is None or cell.phase is not OPEN:
        return _fire(self, timer, now)
    return (SendLocal(self.store.scheduler, PrefillMissing(cell.xid, self.store.context.rank)),)


def _quarantine_ends_by_the_clock(
    cell: ConsumerCell, outcome: Outcome, code: Code, now: Instant, ctx: ConsumerContext
) -> Stepped:
    """End a quarantine when P's transport has given up, as D's clock has it."""
    after, effects = _resolve(cell, outcome, code, now, ctx)
    if after.phase is QUARANTINED:
        after = msgspec.structs.replace(after, reclaim_until=now + ctx.timers.transport_ns)
    return after, effects


_queued = ConsumerScheduler._queued
_fire = ProducerRank._fire
_resolve = resolve
_sync = ConsumerScheduler._sync
_fail_silent = ConsumerScheduler._fail_silent
_defer = ConsumerRank._defer

CLOCKS = Scope(dialect=VLLM_COMPAT, horizon=ENDLESS, abort=0)

TIMING: tuple[Mutant, ...] = (
    Mutant(
        name="stalled-at-once",
        drops="A transfer may take `stall_ns` without progress. Without it, each ends as soon as P begins it.",
        source="spec 2.8",
        patches=(Swap(reported, _stalled_at_once),),
        scope=Scope(sync=1),
        breaks="L12",
    ),
    Mutant(
        name="cancelled-as-failed",
        drops="A request that its client aborts ends as cancelled. Without it, the router begins another attempt.",
        source="spec 2.4",
        patches=(Swap(_outcome, _cancelled_as_failed),),
        scope=Scope(abort=1),
        breaks="S6",
    ),
    Mutant(
        name="reclaimed-without-margin",
        drops="A deadline that depends on another engine's clock has a margin. Without it, P writes into blocks "
        "that D has reclaimed.",
        source="M14; spec 6.2; R06; R15",
        patches=(Swap(reclaim_at, _without_margin),),
        scope=CLOCKS,
        breaks="S1",
    ),
    Mutant(
        name="reclaimed-within-the-lease",
        drops="A quarantine lasts longer than P's lease. Without it, P writes into blocks that D has reclaimed.",
        source="spec 6.2; R15",
        patches=(Swap(reclaim_at, _without_lease),),
        scope=CLOCKS,
        breaks="S1",
    ),
    Mutant(
        name="heartbeats-after-the-end",
        drops="D stops renewing the lease when the request is resolved. Without it, P keeps the prompt and "
        "writes it into blocks that D has reclaimed.",
        source="C6; L4; R21",
        patches=(Swap(_sync, _renewed_after_its_end),),
        scope=CLOCKS,
        breaks="S1",
    ),
    Mutant(
        name="heartbeat-kept",
        drops="D discards a heartbeat that has no connection. Without it, the heartbeat is sent later and "
        "extends the lease, and P writes into blocks that D has reclaimed.",
        source="spec 6.2; found by this search",
        patches=(Swap(_defer, _heartbeat_kept),),
        scope=CLOCKS,
        breaks="S1",
    ),
    Mutant(
        name="silence-frees",
        drops="D fences a peer that it takes for dead before it frees the blocks. Without it, a peer that was "
        "only slow writes into freed blocks.",
        source="spec 2.10; H6; R15",
        patches=(Swap(_fail_silent, _silence_frees),),
        scope=Scope(horizon=4, abort=0),
        breaks="S1",
    ),
    Mutant(
        name="silence-unnoticed",
        drops="D takes a peer that is silent for long for dead.",
        source="spec 2.10; L1; L3",
        patches=(Swap(_fail_silent, _silence_unnoticed),),
        scope=Scope(horizon=4, abort=0),
        survives="In these scopes every P, or its next incarnation, sends again. In the simulator some do not.",
    ),
    Mutant(
        name="silence-unfenced",
        drops="D fences a peer that it takes for dead.",
        source="spec 2.10; L3; R15",
        patches=(Swap(_fail_silent, _silence_unfenced),),
        scope=Scope(horizon=4, abort=0),
        survives="As for silence-unnoticed: a P that answers CANCELs in the end needs no fence.",
    ),
    Mutant(
        name="lease-never-renewed",
        drops="P renews a lease when D asks for it. Without it, a request that waits for long fails.",
        source="spec 2.8; R05; R09",
        patches=(Swap(renewed, _never_renewed),),
        scope=Scope(horizon=4, abort=0),
        breaks="L5",
    ),
    Mutant(
        name="registration-never-renewed",
        drops="In vllm-compat, a D that sends heartbeats keeps its waiting registrations. Without it, P drops them.",
        source="C4",
        patches=(Swap(ProducerCell.with_registration_until, _never_renewed),),
        scope=Scope(dialect=VLLM_COMPAT, unreachable=1, horizon=1, abort=0),
        breaks="L5",
    ),
    Mutant(
        name="suspect-peer-admitted",
        drops="While much is in quarantine, D admits nothing of a peer that is silent. Without it, such a peer's "
        "requests take blocks that others need.",
        source="spec 2.13; L6",
        patches=(Swap(ConsumerCells._suspect, _never_suspect),),
        scope=Scope(pulls=True, requests=2, pool_blocks=4, horizon=1, concurrent=False),
        breaks="L6",
    ),
    Mutant(
        name="overdue-sync-judged",
        drops="A SYNC that is overdue because nothing was open is settled before the next request. Without it, D takes "
        "a P that it has not asked for dead.",
        source="spec 2.10; L6",
        patches=(Swap(ConsumerScheduler._queued, _overdue_sync_kept),),
        scope=Scope(pulls=True, requests=2, horizon=1, drift=1, idle=True, concurrent=False, abort=0),
        breaks="L6",
    ),
    Mutant(
        name="open-registration-asked-for-again",
        drops="P ends a registration without a prompt that D does not renew. Without it, P asks for the prompt again "
        "and again.",
        source="spec 2.7; C3",
        patches=(Swap(ProducerRank._fire, _asked_for_again),),
        scope=Scope(d_restart=1, horizon=5, abort=0),
        breaks="S10",
    ),
    Mutant(
        name="quarantine-ends-by-the-clock",
        drops="In strict, no time frees a block. Without it, D's clock runs twice as fast as P's, and a WRITE lands in "
        "blocks that D has freed.",
        source="spec 2.4; H6; F3",
        patches=(Swap(resolve, _quarantine_ends_by_the_clock),),
        scope=Scope(horizon=2, drift=1),
        breaks="S1",
    ),
)

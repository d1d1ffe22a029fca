"""Mutants of the rules for a lost connection and a refused reconnect, which resolve a request but free none of its
blocks."""

from __future__ import annotations

import msgspec

from pdflow.protocol.consumer.cell import WAITING, ConsumerCell, ConsumerContext, RequestFailed, Stepped
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.rules import fenced, freed, reconnect_refused
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import NOTHING, Effects, Outcome, Resolve
from pdflow.protocol.events import ConnectionLost, HandshakeEnded, PeerFenced, ReconnectRefused
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Code, Message, Sync
from pdflow.protocol.values import Address, Instant
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope


def _refusal_frees(cell: ConsumerCell, event: ReconnectRefused, now: Instant, ctx: ConsumerContext) -> Stepped:
    after, effects = freed(cell, ctx)
    return after, (Resolve(cell.request_id, Outcome.FAILED, Code.PEER_DEAD), *effects)


def _refusal_is_a_fence(cell: ConsumerCell, event: ReconnectRefused, now: Instant, ctx: ConsumerContext) -> Stepped:
    return fenced(cell, PeerFenced(event.peer, event.d_rank, event.newest), now, ctx)


def _refusal_settles_its_pair(
    cell: ConsumerCell, event: ReconnectRefused, now: Instant, ctx: ConsumerContext
) -> Stepped:
    after, effects = reconnect_refused(cell, event, now, ctx)
    bits = sum(1 << i for i, (p_rank, _) in enumerate(cell.pairs) if event.peer.endswith(f".r{p_rank}"))
    return after.with_settled(bits), effects


def _timeout_is_a_refusal(self: ConsumerRank, event: HandshakeEnded, now: Instant) -> Effects:
    return _handshake_ended(self, msgspec.structs.replace(event, refused=not event.ok), now)


def _connection_lost_unnoticed(self: ConsumerScheduler, event: ConnectionLost, now: Instant) -> Effects:
    return NOTHING


def _lost_connection_fails(self: ConsumerScheduler, event: ConnectionLost, now: Instant) -> Effects:
    """Fail the requests that wait for a peer with which a connection is lost."""
    effects = _connection_lost(self, event, now)
    peer = self.store.peers.get(engine_of(event.peer))
    for request_id in () if peer is None else tuple(peer.requests):
        cell = self.store.cells[request_id]
        if cell.phase is WAITING:
            effects += self.store.apply(cell, RequestFailed(Code.UNREACHABLE), now)
    return effects


def _sync_needs_a_connection(self: ConsumerRank, peer: Address, message: Message, now: Instant) -> Effects:
    return NOTHING if type(message) is Sync else _defer(self, peer, message, now)


_handshake_ended = ConsumerRank._handshake_ended
_defer = ConsumerRank._defer
_connection_lost = ConsumerScheduler._connection_lost

DOWN = Scope(p_restart=1, down=True, sync=1)

REFUSALS: tuple[Mutant, ...] = (
    Mutant(
        name="lost-connection-unnoticed",
        drops="D sends its next SYNC soon after it has lost a connection. Without it, D learns of a failed WRITE "
        "at the next regular SYNC.",
        source="spec 2.8; issue 18: a failed WRITE is an error within a second",
        patches=(Swap(_connection_lost, _connection_lost_unnoticed),),
        scope=Scope(lose=1, err=1, horizon=3, concurrent=False, abort=0),
        survives="Everything ends, only a second later. tests/protocol/test_lost_connection.py checks the time.",
    ),
    Mutant(
        name="lost-connection-fails-requests",
        drops="A lost connection ends no request. Without it, requests fail that P would still have served over the "
        "next connection.",
        source="spec 2.10; L9",
        patches=(Swap(_connection_lost, _lost_connection_fails),),
        needless=True,
        scope=Scope(lose=1, abort=0, deadline=0, stall=0),
        breaks="L9",
    ),
    Mutant(
        name="sync-needs-a-connection",
        drops="D connects to send a SYNC. Without it, a REG that was lost with its connection stays lost, until P's "
        "lease ends the request.",
        source="spec 2.8; spec 2.10; L5; L9",
        patches=(Swap(_defer, _sync_needs_a_connection),),
        needless=True,
        scope=Scope(d_tp=2, lose=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="L9",
    ),
    Mutant(
        name="refusal-unnoticed",
        drops="A reconnect that P refuses resolves the requests that wait for P. Without it, they wait until D "
        "takes P for dead.",
        source="spec 2.10; L1; R44; R48",
        guards=("refusals_resolve",),
        scope=DOWN,
        breaks="L1",
    ),
    Mutant(
        name="timeout-is-a-refusal",
        drops="Only a refusal shows that no process listens. Without it, a slow network fails requests that a "
        "live P still writes.",
        source="spec 2.10; L6",
        patches=(Swap(_handshake_ended, _timeout_is_a_refusal),),
        scope=Scope(lose=1, unreachable=1, sync=1),
        breaks="L6",
    ),
    Mutant(
        name="refusal-frees",
        drops="A refusal resolves the request and does not free its blocks. Without it, a WRITE that a dead P's "
        "NIC has begun lands in another request's blocks.",
        source="spec 2.6; F9; H6",
        patches=(Swap(reconnect_refused, _refusal_frees),),
        scope=DOWN,
        breaks="S1",
    ),
    Mutant(
        name="refusal-is-a-fence",
        drops="A refusal is not a fence, whether P is alive or not. Without it, a WRITE that P's NIC has begun "
        "lands in another request's blocks.",
        source="spec 2.6; F9",
        patches=(Swap(reconnect_refused, _refusal_is_a_fence),),
        scope=Scope(lose=1, refused=1, sync=1),
        breaks="S1",
    ),
    Mutant(
        name="refusal-settles-its-pair",
        drops="A rank that refuses a reconnect may still write. Without it, D frees the blocks when the other "
        "rank has ended.",
        source="spec 2.4; F9",
        patches=(Swap(reconnect_refused, _refusal_settles_its_pair),),
        scope=Scope(p_tp=2, lose=1, refused=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0),
        breaks="L9",
    ),
)

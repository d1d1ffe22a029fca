"""Checks of leases: a registration for an expired prompt is refused at once (L9), and what D asks for is renewed (L5).

An expired prompt never comes back, so a registration that arrives later has nothing to wait for. In scopes a timer may
fire at any moment, so that no search sees a wait that only a timer ends. Instead, where a rank releases an expired
prompt, a copy of the rank is given such a registration.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.protocol.effects import Effect, Send, SendLocal
from pdflow.protocol.events import Received, ShardReleased
from pdflow.protocol.ids import Reg, Shards, engine_of, rank_of
from pdflow.protocol.messages import Code, Fail, Heartbeat, Register, Sync
from pdflow.protocol.producer.cell import JOINING, OPEN
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import Address, Allocation, EngineId, Instant, Xid

LATER = "later"
"""The id of the request that registers."""


def expired_in(effects: Sequence[Effect]) -> Xid | None:
    """Return the prompt that a P rank releases by these effects because its lease has ended; None if there is none."""
    for effect in effects:
        event = effect.event if isinstance(effect, SendLocal) else None
        if isinstance(event, ShardReleased) and event.code is Code.EXPIRED:
            return event.xid
    return None


def waits_in_vain(rank: ProducerRank, xid: Xid, shards: Shards) -> bool:
    """True if a registration of a connected D rank for this prompt would not be refused in the turn in which it
    arrives. `shards`: those of the D engines."""
    copy = rank.fork()
    store = copy.store
    connected = sorted(store.peers.connected)
    if not connected:
        return False
    peer = connected[0]
    engine = engine_of(peer)
    incarnation = store.peers.incarnations[engine]
    tombs = store.tombstones(engine, incarnation)
    seq = tombs.floor + tombs.window - 1
    if seq in tombs.verdicts:
        return False  # The last number that D may use now is taken.
    reg = Reg(engine, incarnation, seq, LATER)
    asked = Register(reg, xid, rank_of(peer), shards, Allocation(1, (1,)), 0, 1, 0, 0, 0)
    effects = copy.handle(Received(peer, incarnation, asked), 0)
    return not any(isinstance(effect, Send) and isinstance(effect.message, Fail) for effect in effects)


def unrenewed(rank: ProducerRank, sender: Address, message: Sync | Heartbeat, now: Instant) -> str:
    """Return, in words, which lease or registration is not renewed by a message that its rank has just handled, and
    that calls for it (L5); "" if none. A SYNC renews what it names, and a heartbeat the waiting registrations of its
    engine too."""
    store, timers = rank.store, rank.store.context.timers
    if isinstance(message, Sync):
        wanted, period = message.interest, timers.lease_ns
        if store.interests.get(sender, frozenset()) != frozenset(wanted):
            return f"{sender} wants {wanted}, which is not remembered: what it wants no more would be kept"
    else:
        named = [store.matching.products.get(request_id) for request_id in message.request_ids]
        wanted, period = tuple([xid for xid in named if xid is not None]), timers.lease_extension_ns
    for xid in wanted:
        for key in store.keys.get(xid, ()):
            cell = store.cells[key]
            if cell.source is not None and not cell.expired and cell.lease_until < now + period:
                return f"the lease of {xid} ends in {cell.lease_until - now}, although a D has just asked for it"
    for reg in message.open if isinstance(message, Sync) else _waiting(rank, engine_of(sender)):
        held = store.cells.get(reg)
        if held is not None and held.registration_until < now + timers.registration_ttl_ns:
            left = held.registration_until - now
            return f"registration {reg.request_id} ends in {left}, although D has just asked for it"
    return ""


def _waiting(rank: ProducerRank, engine: EngineId) -> list[Reg]:
    """Return the registrations of a D engine that wait for a prompt, where a D that is silent loses them."""
    store = rank.store
    if not store.context.dialect.registrations_end:
        return []
    return [
        key
        for key, cell in store.cells.items()
        if isinstance(key, Reg) and key.engine == engine and cell.phase in (OPEN, JOINING)
    ]

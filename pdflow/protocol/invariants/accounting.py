"""A check that an endpoint's counts and indexes equal what its cells say (S11), in every state.

Counts and indexes spare a search through the cells, and none is in a fingerprint: an explorer takes states that differ
only in a wrong count for one. What is judged here follows from the cells alone. `overadmitted` and
`underadmitted` compare two states.

| endpoint | what must agree |
| --- | --- |
| D's scheduler | blocks in quarantine; each P engine's requests, blocks and held requests, and its next SYNC; |
|  | the open sequence numbers and the floor |
| D's rank | frames and READs that wait, with the connections under way that they wait for |
| P's rank | the keys of each prompt; what waits for a connection or a flush; tombstones, with the cells; limits |
| P's scheduler | lease words and holders, with the prompts |

Off the hot path: drivers never call this.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.protocol.consumer.cell import HELD, QUARANTINED, ConsumerCell
from pdflow.protocol.consumer.cells import ConsumerCells, PrefillPeer
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.ids import Reg, rank_address
from pdflow.protocol.producer.cell import OPEN, READY, SETTLING
from pdflow.protocol.producer.cells import EARLY_LIMIT, Key, ProducerCells
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import EngineId, Instant, RequestId


def miscounted(endpoint: object) -> str:
    """Return, in words, the first count or index of an endpoint that its cells contradict; "" if there is none."""
    if isinstance(endpoint, ConsumerScheduler):
        return next(_scheduler_of_d(endpoint.store), "")
    if isinstance(endpoint, ProducerRank):
        return next(_rank_of_p(endpoint.store), "")
    if isinstance(endpoint, ConsumerRank):
        return next(_rank_of_d(endpoint), "")
    if isinstance(endpoint, ProducerScheduler):
        return next(_scheduler_of_p(endpoint), "")
    return ""


# D's scheduler.


def _scheduler_of_d(store: ConsumerCells) -> Iterator[str]:
    by_peer: dict[EngineId, list[ConsumerCell]] = {engine: [] for engine in store.peers}
    quarantined, open_seqs = 0, []
    for cell in store.cells.values():
        by_peer[cell.params.prefill.engine].append(cell)
        if cell.phase is QUARANTINED:
            quarantined += len(cell.allocation.blocks)
        if cell.registration is not None and cell.registration.reg.seq:
            open_seqs.append(cell.registration.reg.seq)
    if quarantined != store.quarantined_blocks:
        yield f"{store.quarantined_blocks} blocks are counted in quarantine, but {quarantined} are there"
    for engine, found in by_peer.items():
        yield from _peer_of_d(store, store.peers[engine], found)
    if [seq for seq in store.seqs if seq not in store.closed] != sorted(open_seqs):
        yield f"sequence numbers {list(store.seqs)} without {sorted(store.closed)} are not those of registrations"
    if not store.closed.issubset(store.seqs):
        yield f"of the closed sequence numbers {sorted(store.closed)} not all are at or above the floor"
    if store.floor != (store.seqs[0] if store.seqs else store.next_seq) or store.floor in store.closed:
        yield f"the floor is {store.floor}, with {list(store.seqs)} given out above it"


def _peer_of_d(store: ConsumerCells, peer: PrefillPeer, cells: list[ConsumerCell]) -> Iterator[str]:
    engine = peer.info.engine
    phases = {cell.request_id: cell.phase for cell in cells}
    if peer.requests.keys() != phases.keys():
        yield f"the requests of {engine} are indexed as {list(peer.requests)}, but they are {list(phases)}"
        return
    blocks = sum(cell.num_blocks for cell in cells if cell.phase is not HELD)
    if peer.blocks != blocks:
        yield f"{peer.blocks} blocks are counted for {engine}, but its requests bind {blocks}"
    held = [request_id for request_id in peer.requests if phases[request_id] is HELD]
    if [request_id for request_id in peer.held if phases.get(request_id) is HELD] != held:
        yield f"the requests held back for {engine} are {held} in their order, but {list(peer.held)} wait"
    if held and not store.context.dialect.limits_peers:
        yield f"{held} are held back for {engine}, though nothing limits it"
    given_up = not store.context.dialect.quarantine_ends and all(cell.phase is QUARANTINED for cell in cells)
    if cells and peer.sync_at is None and not given_up:
        yield f"{len(cells)} requests of {engine} are open, but no SYNC is due"
    if peer.sync_at is None and peer.last_seen:
        yield f"{engine} is expected to respond, but no SYNC is due"


def overadmitted(before: object, after: object, now: Instant) -> str:
    """Return, in words, which request an event has admitted beyond its engine's limit, or although its engine was
    suspect before and after it (L6); "" if none. `before` and `after` are an endpoint before and after the event."""
    if not isinstance(before, ConsumerScheduler) or not isinstance(after, ConsumerScheduler):
        return ""
    if not after.store.context.dialect.limits_peers:
        return ""
    for peer in after.store.peers.values():
        if found := _over(before.store, after.store, peer, now):
            return found
    return ""


def underadmitted(before: object, after: object, now: Instant) -> str:
    """Return, in words, which request an event has left held back although its engine is below its limit (S11); "" if
    none. `before` and `after` are an endpoint before and after the event."""
    if not isinstance(before, ConsumerScheduler) or not isinstance(after, ConsumerScheduler):
        return ""
    for peer in after.store.peers.values():
        if found := _under(before.store, after.store, peer, now):
            return found
    return ""


def limit_of(store: ConsumerCells) -> int:
    """Return how many blocks one prefill engine may bind: all if it is the only one."""
    return store.pool_blocks if len(store.peers) == 1 else store.peer_limit


def _over(before: ConsumerCells, after: ConsumerCells, peer: PrefillPeer, now: Instant) -> str:
    suspect = _is_suspect(after, peer, now) and _was_suspect(before, peer, now)
    if peer.blocks <= limit_of(after) and not suspect:
        return ""
    admitted = [request_id for request_id in peer.requests if after.cells[request_id].phase is not HELD]
    new = [name for name in admitted if name not in before.cells or before.cells[name].phase is HELD]
    if new and suspect:
        return f"{new} are admitted, and {peer.info.engine} is suspect"
    if new and len(admitted) > 1:
        return f"{new} are admitted, and {peer.info.engine} binds {peer.blocks} blocks of {limit_of(after)}"
    return ""


def _under(before: ConsumerCells, after: ConsumerCells, peer: PrefillPeer, now: Instant) -> str:
    """A request that comes, and one before which blocks of its engine have become free, is admitted at once; one that
    was kept out because its engine was suspect, with the next SYNC."""
    if not peer.held:
        return ""
    held = next((name for name in peer.held if name in after.cells and after.cells[name].phase is HELD), None)
    if held is None or not _has_room(after, peer, held) or _is_suspect(after, peer, now):
        return ""
    peer_before = before.peers.get(peer.info.engine)
    freed = peer_before is not None and peer_before.blocks > peer.blocks
    if freed or held not in before.cells:
        return f"{held} is held back, but {peer.info.engine} binds only {peer.blocks} blocks of {limit_of(after)}"
    return ""


def _has_room(store: ConsumerCells, peer: PrefillPeer, request_id: RequestId) -> bool:
    return not peer.blocks or peer.blocks + store.cells[request_id].num_blocks <= limit_of(store)


def _was_suspect(before: ConsumerCells, peer: PrefillPeer, now: Instant) -> bool:
    known = before.peers.get(peer.info.engine)
    return known is not None and _is_suspect(before, known, now)


def _is_suspect(store: ConsumerCells, peer: PrefillPeer, now: Instant) -> bool:
    silent = any(now - last_seen >= store.context.timers.suspect_ns for last_seen in peer.last_seen.values())
    return silent and store.quarantined_blocks > store.suspect_limit


# D's rank.


def _rank_of_d(rank: ConsumerRank) -> Iterator[str]:
    comes = rank.peers.connecting | rank.fencing
    if not rank.pending.keys() <= comes:
        yield f"frames wait for {sorted(rank.pending.keys() - comes)}, but no connection is under way"
    if rank.fencing & rank.peers.connected:
        yield f"{sorted(rank.fencing & rank.peers.connected)} are connected while they are being fenced"
    waiting = rank.reading.waiting
    if not waiting.keys() <= comes:
        yield f"READs wait for {sorted(waiting.keys() - comes)}, but no connection is under way"
    unposted = {op for op, read in rank.reads.items() if not read.posted}
    if unposted != {op for ops in waiting.values() for op in ops}:
        yield f"{len(unposted)} READs are not posted, but others wait for a connection"


# P's rank.


def _rank_of_p(store: ProducerCells) -> Iterator[str]:
    unindexed = sum(map(len, store.keys.values())) != len(store.cells)
    for key, cell in store.cells.items():
        unindexed = unindexed or key not in store.keys.get(cell.xid, ())
        if key != (cell.xid if cell.reg is None else cell.reg):
            yield f"the cell of {cell.xid} is stored under {key}"
    if unindexed:
        yield f"prompts are indexed by {store.keys}, but the keys of cells are {list(store.cells)}"
    if not store.waiting.keys() <= store.peers.connecting:
        yield f"cells wait for {sorted(store.waiting.keys() - store.peers.connecting)}, but no connection is under way"
    awaited = {reg for regs in store.waiting.values() for reg in regs}
    for key, cell in store.cells.items():
        if cell.phase is READY and key not in awaited:
            yield f"{key} is READY, but waits for no connection"
        if cell.phase is SETTLING and not cell.failed:
            yield from _flushes(store, key, cell.in_flight_mask)
        if cell.phase is OPEN and cell.source is not None:
            yield f"{key} is OPEN, though its prompt is here"
    yield from _memory(store)


def _flushes(store: ProducerCells, key: Key, unsettled: int) -> Iterator[str]:
    assert isinstance(key, Reg)
    for d_rank in range(unsettled.bit_length()):
        peer = rank_address(key.engine, d_rank)
        if unsettled >> d_rank & 1 and key not in store.flushes.get(peer, ()):
            yield f"{key} is SETTLING, but no flush to {peer} is under way for it"


def _memory(store: ProducerCells) -> Iterator[str]:
    """Judge what P's rank remembers beyond its cells."""
    for what, remembered in (
        ("ended prompts", store.dead_xids),
        ("early RELEASEs", store.early),
        ("early readers", store.early_readers),
        ("ended registrations", store.ended),
    ):
        if len(remembered) > EARLY_LIMIT:
            yield f"{len(remembered)} {what} are remembered, more than {EARLY_LIMIT}"
    for engine, tombs in store.tombs.items():
        seqs = sorted(tombs.order)
        if seqs != sorted(tombs.verdicts):
            yield f"the tombstones of {engine} are not those that its floor would remove"
        if seqs and not tombs.floor <= seqs[0] <= seqs[-1] < tombs.floor + tombs.window:
            yield f"tombstones {seqs[0]} to {seqs[-1]} of {engine} are not within the window of {tombs.floor}"
        buried = [reg for reg in store.cells if isinstance(reg, Reg) and reg.engine == engine and _buried(store, reg)]
        if buried:
            yield f"{buried[0]} is open, but has a tombstone"


def _buried(store: ProducerCells, reg: Reg) -> bool:
    tombs = store.tombs[reg.engine]
    return tombs.incarnation == reg.incarnation and reg.seq in tombs.verdicts


# P's scheduler.


def _scheduler_of_p(scheduler: ProducerScheduler) -> Iterator[str]:
    everyone = (1 << len(scheduler.ranks)) - 1
    for xid, record in scheduler.products.items():
        if record.holders & ~everyone or (record.holders and record.allocation is None):
            yield f"{xid} is held by ranks {record.holders:b} that have no shard of it"
        if record.complete and not record.holders:
            yield f"no rank holds {xid} any more, but it is remembered"
    begun = [xid for xid in scheduler.begun_words if xid not in scheduler.products or scheduler.products[xid].complete]
    if begun:
        yield f"the lease words of {begun} are kept, though they are not being computed"

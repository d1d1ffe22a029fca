"""A check that at rest nothing is left in an endpoint (L8).

At rest no request is open, no operation, handshake or frame is under way, and no further event comes but timers.

What an endpoint keeps on purpose, and its bound:

| kept | bound |
| --- | --- |
| connections, incarnations, back-off (`Peers`) | one entry for each peer; a retired incarnation for each restart |
| P: tombstones | those at or above D's floor, at most WINDOW for each D engine (S11) |
| P: dead prompts, early RELEASEs and readers, ended registrations | EARLY_LIMIT each (S11) |
| P: interest of the last SYNC | one entry for each D rank |
| D: the last SYNC without an answer, and in vllm-compat what the last heartbeat named | one entry for each P rank |
| D: the SYNC after the last request, and who was to answer it | one for each P engine, until that SYNC is due |
| entries in the heap of a timer that is no longer armed | until their instant |

Off the hot path: drivers never call this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.ids import engine_of
from pdflow.protocol.peers import Peers
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.values import Address


def leftovers(endpoint: object) -> dict[str, int]:
    """Return the size of everything that an endpoint still has and must not have at rest, by name; empty if all is
    well."""
    kept: dict[str, Sized | int] = {}
    if isinstance(endpoint, ProducerRank):
        kept = _of_p_rank(endpoint)
    elif isinstance(endpoint, ConsumerScheduler):
        kept = _of_d_scheduler(endpoint)
    elif isinstance(endpoint, ConsumerRank):
        kept = _of_d_rank(endpoint)
    elif isinstance(endpoint, ProducerScheduler):
        kept = {"prompts": endpoint.products, "lease words": endpoint.begun_words}
    sizes = {name: found if isinstance(found, int) else len(found) for name, found in kept.items()}
    return {name: size for name, size in sizes.items() if size}


def _of_p_rank(rank: ProducerRank) -> dict[str, Sized | int]:
    store, matching = rank.store, rank.store.matching
    return {
        "cells": store.cells,
        "keys of prompts": store.keys,
        "cells that wait for a connection": store.waiting,
        "flushes": store.flushes,
        "prompts to be matched": matching.products,
        "base ids of prompts": matching.product_bases,
        "registrations to be matched": matching.registrations,
        "base ids of registrations": matching.registration_bases,
        "prompts matched for good": matching.spent,
        "interests of peers that are unknown": _unknown(store.interests, store.peers),
        "timers": rank.armed(),
        **_of_peers(store.peers),
    }


def _of_d_scheduler(scheduler: ConsumerScheduler) -> dict[str, Sized | int]:
    store = scheduler.store
    peers = store.peers.values()
    return {
        "cells": store.cells,
        "requests of peers": sum(len(peer.requests) for peer in peers),
        "held requests": sum(len(peer.held) for peer in peers),
        "blocks of peers": sum(peer.blocks for peer in peers),
        "blocks in quarantine": store.quarantined_blocks,
        "sequence numbers": store.seqs,
        "closed sequence numbers": store.closed,
        "timers": [timer for timer in scheduler.armed() if timer.kind is not TimerKind.SYNC],
    }


def _of_d_rank(rank: ConsumerRank) -> dict[str, Sized | int]:
    return {
        "frames that wait for a connection": rank.pending,
        "peers that are being fenced": rank.fencing,
        "READs": rank.reading.reads,
        "READs that wait for a connection": rank.reading.waiting,
        "SYNCs of peers that are unknown": _unknown(rank.frames.synced, rank.peers),
        "completions that are awaited": rank.frames.awaited if rank.dialect.quarantine_ends else 0,
        **_of_peers(rank.peers),
    }


def _of_peers(peers: Peers) -> dict[str, Sized | int]:
    return {
        "peers that are being connected": peers.connecting,
        "back-off of peers that have not failed": len(peers.retry_at.keys() ^ peers.failures.keys()),
    }


def _unknown(addresses: Iterable[Address], peers: Peers) -> int:
    """Return how many of these addresses are of no engine that has shown its incarnation."""
    return sum(engine_of(address) not in peers.incarnations for address in addresses)

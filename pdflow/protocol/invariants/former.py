"""Checks of S8 and L10: once a handshake has shown a peer's new incarnation, an endpoint acts on no frame of the former
one, and another report of its restart fails no request that has come since.

In the explored world a dead process's frames are gone with its connections, so that no sequence of moves delivers one.
Instead, where a handshake has shown that a peer has started again, a copy of the endpoint is given such a frame, and
discarded. Likewise a copy of D's scheduler is given a request, and then the report of the restart again, as another of
its ranks sends it.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.effects import Handshake, Note, Resolve
from pdflow.protocol.events import DecodeQueued, PeerRestarted, Received
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Sync, SyncReply
from pdflow.protocol.values import Address

LATER = "later"
"""The id of the request that a copy of D's scheduler is given."""


def acts_on(body: Any, peer: Address, incarnation: int) -> bool:
    """True if the endpoint would act on a frame of this incarnation of a peer."""
    message = SyncReply(0, ()) if isinstance(body, ConsumerRank) else Sync(0, 0, (), ())
    effects = body.fork().handle(Received(peer, incarnation, message), 0)
    return any(type(effect) not in (Note, Handshake) for effect in effects)


def fails_for_former_restart(scheduler: Any, event: PeerRestarted) -> bool:
    """True if D's scheduler, which has handled a report of a restart, would fail a later request at another one."""
    peer = scheduler.store.peers.get(event.engine)
    if peer is None:
        return False
    copy = scheduler.fork()
    copy.handle(DecodeQueued(LATER, KvParams(peer.info, LATER, LATER, 1), 1, 0), 0)
    return any(type(effect) is Resolve and effect.request_id == LATER for effect in copy.handle(event, 0))

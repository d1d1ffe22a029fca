"""A check of S8: once a handshake has shown a peer's new incarnation, an endpoint acts on no frame of the former one.

In the explored world a dead process's frames are gone with its connections, so that no sequence of moves delivers one.
Instead, where a handshake has shown that a peer has started again, a copy of the endpoint is given such a frame, and
discarded.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.effects import Handshake, Note
from pdflow.protocol.events import HandshakeEnded, Received
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Sync, SyncReply
from pdflow_sim.check.state.cluster import FIRST_INCARNATION


def acts_on_former_incarnation(body: Any, event: HandshakeEnded) -> bool:
    """True if the endpoint of this handshake would act on a frame of its peer's former incarnation."""
    if (
        not event.ok
        or event.incarnation == FIRST_INCARNATION[engine_of(event.peer)]
        or not body.peers.dialect.checks_incarnation
    ):
        return False
    message = SyncReply(0, ()) if isinstance(body, ConsumerRank) else Sync(0, 0, (), ())
    effects = body.fork().handle(Received(event.peer, event.incarnation - 1, message), 0)
    return any(type(effect) not in (Note, Handshake) for effect in effects)

"""Whether what a handshake has shown counts: from then on no frame of the life before makes the endpoint act (S8).

In the explored world a dead process's frames die with its connections, so that no story ever brings one. Instead, where
a handshake has shown that a peer has started again, the endpoint as it is then is handed one, and forgotten.
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
    """Whether the endpoint that this handshake has ended for would act on what its peer's life before had to say."""
    if (
        not event.ok
        or event.incarnation == FIRST_INCARNATION[engine_of(event.peer)]
        or not body.peers.dialect.checks_incarnation
    ):
        return False
    message = SyncReply(0, ()) if isinstance(body, ConsumerRank) else Sync(0, 0, (), ())
    effects = body.fork().handle(Received(event.peer, event.incarnation - 1, message), 0)
    return any(type(effect) not in (Note, Handshake) for effect in effects)

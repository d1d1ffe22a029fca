"""Doubts without a cause: P reports that bytes of a registration may still land, and has never written any (L9).

D keeps the blocks of such a registration in quarantine until P's lease has ended, although it could have them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.protocol.effects import Effect, Send
from pdflow.protocol.messages import CancelAck, Fail
from pdflow.protocol.producer.cell import IN_FLIGHT, SETTLING
from pdflow.protocol.producer.rank import ProducerRank


def doubted_in_vain(before: ProducerRank, effects: Sequence[Effect]) -> str:
    """Return, in words, the first answer of a P rank that leaves a registration open to WRITEs that were never posted;
    "" if there is none. `before`: the rank before the event that has these effects."""
    for effect in effects:
        message = effect.message if isinstance(effect, Send) else None
        if not isinstance(message, Fail | CancelAck) or message.flushed:
            continue
        for cell in before.store.cells.values():
            if cell.reg == message.reg and cell.phase not in (IN_FLIGHT, SETTLING) and not cell.in_flight_mask:
                return f"registration {message.reg.request_id} has no WRITE, and P reports that one may land"
    return ""

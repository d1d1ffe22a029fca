"""Doubts without a cause (L9): P reports that bytes may still land where it has never written any, or D asks a rank to
cancel what is settled.

D keeps the blocks of such a registration in quarantine until P's lease has ended, although it could have them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Effect, Send, SendLocal
from pdflow.protocol.events import FrameOrdered
from pdflow.protocol.ids import rank_of
from pdflow.protocol.messages import Cancel, CancelAck, Fail
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


def cancelled_in_vain(after: ConsumerScheduler, effects: Sequence[Effect]) -> str:
    """Return, in words, the first CANCEL that a D orders although no operation of that pair of ranks can land any more;
    "" if there is none. `after`: the endpoint after the event that has these effects."""
    for effect in effects:
        if not isinstance(effect, SendLocal) or not isinstance(effect.event, FrameOrdered):
            continue
        message = effect.event.message
        cell = after.cells.get(message.reg.request_id) if isinstance(message, Cancel) else None
        if cell is None:
            continue
        for peer in effect.event.to:
            pair = cell.pairs.index((rank_of(peer), rank_of(effect.to)))
            if cell.settled >> pair & 1:
                return f"{cell.request_id} is settled between {peer} and {effect.to}, and is cancelled there"
    return ""

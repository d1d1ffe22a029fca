"""P's rules in one table: (phase, event) -> rule. A missing row is a named no-op."""

from __future__ import annotations

from pdflow.protocol.effects import NOTHING
from pdflow.protocol.events import PrefillEnded, SourceCompleted, SourceReady, WriteEnded, WriteStopped
from pdflow.protocol.messages import Register
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    JOINING,
    LEASED,
    OPEN,
    READY,
    SETTLING,
    CancelReceived,
    CellEvent,
    Connected,
    JoinEnded,
    PeerQuiet,
    ProducerCell,
    ProducerContext,
    RegistrationRefused,
    RegistrationRetired,
    Rules,
    ShardTaken,
    Stepped,
    rows,
)
from pdflow.protocol.producer.lease import LEASE_RULES
from pdflow.protocol.producer.writes import (
    cancelled,
    cancelled_in_flight,
    completed,
    connected,
    fenced_in_flight,
    join_ended,
    peer_quiet,
    prefill_ended,
    refused,
    registered,
    retired,
    shard_taken,
    source_lost,
    source_matches_open,
    write_ended,
    write_stopped,
)
from pdflow.protocol.values import Instant

RULES: Rules = {
    **rows(Register, registered, OPEN, LEASED, JOINING, READY, IN_FLIGHT, SETTLING),
    **rows(SourceReady, source_matches_open, OPEN),
    **rows(PrefillEnded, prefill_ended, OPEN),
    **rows(PrefillEnded, source_lost, LEASED, JOINING, READY, IN_FLIGHT, SETTLING),
    **rows(SourceCompleted, completed, LEASED, JOINING, READY, IN_FLIGHT, SETTLING),
    **rows(Connected, connected, READY),
    **rows(RegistrationRefused, refused, OPEN, JOINING, READY),
    **rows(CancelReceived, cancelled, OPEN, JOINING, READY),
    **rows(CancelReceived, cancelled_in_flight, IN_FLIGHT, SETTLING),
    **rows(RegistrationRetired, retired, OPEN, JOINING, READY),
    **rows(JoinEnded, join_ended, JOINING),
    **rows(WriteEnded, write_ended, IN_FLIGHT),
    **rows(WriteStopped, write_stopped, IN_FLIGHT),
    **rows(PeerQuiet, fenced_in_flight, IN_FLIGHT),
    **rows(PeerQuiet, peer_quiet, SETTLING),
    **rows(ShardTaken, shard_taken, LEASED),
    **LEASE_RULES,
}


def step(cell: ProducerCell, event: CellEvent, now: Instant, ctx: ProducerContext) -> Stepped:
    """Return the next state of a cell and the effects. Pure; an event without a rule returns the very same cell."""
    rule = RULES.get((cell.phase, type(event)))
    return (cell, NOTHING) if rule is None else rule(cell, event, now, ctx)

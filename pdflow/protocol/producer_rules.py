"""P's rules in one table: (phase, event) -> rule. A missing row is a named no-op."""

from __future__ import annotations

from typing import Any

from pdflow.protocol.effects import NOTHING
from pdflow.protocol.events import PrefillEnded, SourceCompleted, SourceReady, WriteEnded, WriteStopped
from pdflow.protocol.lease import LEASE_RULES
from pdflow.protocol.messages import Register
from pdflow.protocol.phases import ProducerPhase
from pdflow.protocol.producer import (
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
    ShardTaken,
    Stepped,
)
from pdflow.protocol.producer_writes import (
    cancelled,
    cancelled_in_flight,
    completed,
    connected,
    cut_off,
    join_ended,
    peer_quiet,
    prefill_ended,
    refused,
    registered,
    retired,
    shard_taken,
    source_lost,
    source_meets_open,
    write_ended,
    write_stopped,
)
from pdflow.protocol.values import Instant

# Any: a table of rules over different event types has no common parameter type but the union's members one by one.
RULES: dict[tuple[ProducerPhase, type], Any] = {
    (OPEN, Register): registered,
    (LEASED, Register): registered,
    (JOINING, Register): registered,
    (READY, Register): registered,
    (IN_FLIGHT, Register): registered,
    (SETTLING, Register): registered,
    (OPEN, SourceReady): source_meets_open,
    (OPEN, PrefillEnded): prefill_ended,
    **{(phase, PrefillEnded): source_lost for phase in (LEASED, JOINING, READY, IN_FLIGHT, SETTLING)},
    **{(phase, SourceCompleted): completed for phase in (LEASED, JOINING, READY, IN_FLIGHT, SETTLING)},
    (READY, Connected): connected,
    (OPEN, RegistrationRefused): refused,
    (JOINING, RegistrationRefused): refused,
    (READY, RegistrationRefused): refused,
    (OPEN, CancelReceived): cancelled,
    (JOINING, CancelReceived): cancelled,
    (READY, CancelReceived): cancelled,
    (IN_FLIGHT, CancelReceived): cancelled_in_flight,
    (SETTLING, CancelReceived): cancelled_in_flight,
    (OPEN, RegistrationRetired): retired,
    (JOINING, RegistrationRetired): retired,
    (READY, RegistrationRetired): retired,
    (JOINING, JoinEnded): join_ended,
    (IN_FLIGHT, WriteEnded): write_ended,
    (IN_FLIGHT, WriteStopped): write_stopped,
    (IN_FLIGHT, PeerQuiet): cut_off,
    (SETTLING, PeerQuiet): peer_quiet,
    (LEASED, ShardTaken): shard_taken,
    **LEASE_RULES,
}


def step(cell: ProducerCell, event: CellEvent, now: Instant, ctx: ProducerContext) -> Stepped:
    """The pure transition of one cell. An event without a rule returns the very same cell."""
    rule = RULES.get((cell.phase, type(event)))
    if rule is None:
        return cell, NOTHING
    stepped: Stepped = rule(cell, event, now, ctx)
    return stepped

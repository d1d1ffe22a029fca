"""The state of one prefill product at one P rank (its cell), and the events that may happen to it.

A cell holds the lease and at most one registration, so that matching, in either order, is a row of the table. What
happens in each phase stands in `producer.writes`, what a lease's end means in `lease`, and which rule answers which
event in `producer.rules`. The `becoming_*` methods alone change a cell's phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeAlias, TypeVar, cast

import msgspec

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import Effects
from pdflow.protocol.events import PrefillEnded, Source, SourceCompleted, SourceReady, WriteEnded, WriteStopped
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import (
    Code,
    Progress,
    Register,
    SyncItem,
)
from pdflow.protocol.phases import ProducerPhase
from pdflow.protocol.producer.tombstones import WINDOW
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import NEVER, Address, Instant, RequestId, Value, Xid

OPEN, LEASED, JOINING, READY, IN_FLIGHT, SETTLING, GONE = ProducerPhase


class ProducerContext(Value, frozen=True, gc=False):
    """The input of a rule besides its cell. `connected`: all target ranks of the cell are connected."""

    rank: int
    shards: Shards
    dialect: Dialect
    timers: Timers
    geometry: Geometry
    done_is_remote: bool
    """The transport's DONE means that the bytes have landed; else a flush must follow (spec 2.5)."""
    in_pieces: bool = False
    """A WRITE is posted in pieces, so it can be stopped between two of them."""
    into_staging: bool = False
    """D grants staging memory beside its blocks, in parts of its own."""
    connected: bool = False
    window: int = WINDOW
    """How far above its floor a D may register."""


class ProducerCell(Value, frozen=True, gc=False):
    phase: ProducerPhase
    xid: Xid
    request_id: RequestId = ""
    source: Source | None = None
    lease_until: Instant = 0
    expired: bool = False
    """The lease ended while WRITEs were in flight."""
    freed: bool = False
    """vllm-stock: the lease ended while WRITEs were in flight, and the source was freed under them."""
    unwanted: bool = False
    """A RELEASE arrived while a registration held the prompt."""
    reg: Reg | None = None
    registrations: tuple[Register, ...] = ()
    """The registrations, one per D rank that has registered, by rank."""
    targets: tuple[int, ...] = ()
    registration_until: Instant = 0
    join_until: Instant = NEVER
    expect_until: Instant = NEVER
    """When the scheduler is asked whether this registration's prompt exists."""
    in_flight_mask: int = 0
    """Bit per D rank with a WRITE whose handle is not final, or that a flush or fence must still settle."""
    failed: bool = False
    stopped: Code = Code.NONE
    """The reason why no further piece is posted."""
    truncated: bool = False
    """A piece was held back, so that D does not have everything."""
    cancel_waiters: tuple[Address, ...] = ()
    """D ranks whose CANCEL waits for the WRITEs to end."""
    completed_readers: int = 0
    """Pull: bit per D rank that has finished reading."""
    verdict: SyncItem | None = None
    """How the last registration ended: the content of its tombstone."""
    end: Code = Code.NONE
    """The reason of the end, in GONE."""

    def becoming_leased(self, source: Source, request_id: RequestId, until: Instant) -> Self:
        return msgspec.structs.replace(self, phase=LEASED, source=source, request_id=request_id, lease_until=until)

    def becoming_sourced(self, source: Source, request_id: RequestId, until: Instant, join_until: Instant) -> Self:
        return msgspec.structs.replace(
            self, phase=JOINING, source=source, request_id=request_id, lease_until=until, join_until=join_until
        )

    def becoming_registered(
        self,
        phase: ProducerPhase,
        registration: Register,
        targets: tuple[int, ...],
        until: Instant,
        join_until: Instant,
    ) -> Self:
        registrations = (
            tuple(sorted((*self.registrations, registration), key=_by_rank)) if self.registrations else (registration,)
        )
        return msgspec.structs.replace(
            self,
            phase=phase,
            reg=registration.reg,
            registrations=registrations,
            targets=targets,
            registration_until=until,
            join_until=join_until,
            verdict=None,
        )

    def becoming_ready(self) -> Self:
        return msgspec.structs.replace(self, phase=READY)

    def becoming_in_flight(self, in_flight_mask: int) -> Self:
        return msgspec.structs.replace(self, phase=IN_FLIGHT, in_flight_mask=in_flight_mask)

    def becoming_settling(self, unsettled: int, failed: bool) -> Self:
        return msgspec.structs.replace(self, phase=SETTLING, in_flight_mask=unsettled, failed=failed)

    def becoming_unregistered(self, verdict: SyncItem) -> Self:
        """Drop the registration, which has ended; the product waits for another one."""
        return msgspec.structs.replace(
            self,
            phase=LEASED,
            reg=None,
            registrations=(),
            targets=(),
            registration_until=0,
            join_until=NEVER,
            in_flight_mask=0,
            failed=False,
            stopped=Code.NONE,
            truncated=False,
            cancel_waiters=(),
            verdict=verdict,
        )

    def becoming_gone(self, end: Code, verdict: SyncItem | None = None) -> Self:
        return msgspec.structs.replace(self, phase=GONE, end=end, verdict=verdict)

    def with_whole_source(self, until: Instant) -> Self:
        """Mark the prompt as wholly computed; its lease begins."""
        assert self.source is not None
        source = msgspec.structs.replace(self.source, complete=True)
        return msgspec.structs.replace(self, source=source, lease_until=min(self.lease_until, until))

    def stopping(self, code: Code) -> Self:
        return msgspec.structs.replace(self, stopped=code)

    def with_write_ended(self, in_flight_mask: int, failed: bool) -> Self:
        return msgspec.structs.replace(self, in_flight_mask=in_flight_mask, failed=failed)

    def being_truncated(self) -> Self:
        return msgspec.structs.replace(self, truncated=True)

    def with_asker(self, asker: Address) -> Self:
        return msgspec.structs.replace(self, cancel_waiters=(*self.cancel_waiters, asker))

    def with_reader(self, completed_readers: int) -> Self:
        return msgspec.structs.replace(self, completed_readers=completed_readers)

    def with_lease(self, until: Instant) -> Self:
        return msgspec.structs.replace(self, lease_until=until, unwanted=False)

    def with_release(self) -> Self:
        return msgspec.structs.replace(self, unwanted=True)

    def with_xid(self, xid: Xid) -> Self:
        """Set the xid of the prompt that was found for a registration without one (vllm-compat)."""
        return msgspec.structs.replace(self, xid=xid)

    def with_registration_until(self, until: Instant) -> Self:
        return msgspec.structs.replace(self, registration_until=until)

    def expecting(self, until: Instant) -> Self:
        return msgspec.structs.replace(self, expect_until=until)

    def outliving_its_lease(self) -> Self:
        return msgspec.structs.replace(self, expired=True)

    def losing_its_source(self) -> Self:
        return msgspec.structs.replace(self, expired=True, freed=True)

    def registered_by_all(self) -> Self:
        """Count the first rank's registration for every rank that is written."""
        registration = self.registrations[0]
        registrations = tuple(msgspec.structs.replace(registration, d_rank=rank) for rank in self.targets)
        return msgspec.structs.replace(self, registrations=registrations)


# What the endpoint tells a cell, beyond the events that reach it unchanged.


class Connected(Value, frozen=True, gc=False):
    """Every target rank is connected."""


class RegistrationRefused(Value, frozen=True, gc=False):
    """The registration cannot be served: its peer is unreachable, or its grant's time is over."""

    code: Code


class RegistrationRetired(Value, frozen=True, gc=False):
    """D's incarnation is retired or its process dead: as CANCEL, but no peer is left to answer."""


class CancelReceived(Value, frozen=True, gc=False):
    asker: Address


class LeaseEnded(Value, frozen=True, gc=False):
    pass


class JoinEnded(Value, frozen=True, gc=False):
    pass


class ShardTaken(Value, frozen=True, gc=False):
    """Pull: one D rank, named by its sender address, has read this shard (C1: a bitmap, never a counter)."""

    d_rank: int
    readers: int


class PeerQuiet(Value, frozen=True, gc=False):
    """A flush or a fence has proved that nothing of ours can land at this D rank any more.

    A fence proves just that, and not that what was waiting for its flush has landed.
    """

    d_rank: int
    ok: bool
    fenced: bool


CellEvent: TypeAlias = (
    Register
    | SourceReady
    | SourceCompleted
    | PrefillEnded
    | Connected
    | RegistrationRefused
    | RegistrationRetired
    | CancelReceived
    | LeaseEnded
    | JoinEnded
    | ShardTaken
    | PeerQuiet
    | WriteEnded
    | WriteStopped
)
Stepped: TypeAlias = tuple[ProducerCell, Effects]
Rule: TypeAlias = Callable[[ProducerCell, CellEvent, Instant, ProducerContext], Stepped]
"""A rule as the table stores it: it is called only with events of its row."""
Rules: TypeAlias = dict[tuple[ProducerPhase, type], Rule]
E = TypeVar("E", bound=CellEvent)


def rows(
    event: type[E], rule: Callable[[ProducerCell, E, Instant, ProducerContext], Stepped], *phases: ProducerPhase
) -> Rules:
    """Return rows of the table of rules, one for each phase. That the rule takes this kind of event is checked by its
    types."""
    return {(phase, event): cast(Rule, rule) for phase in phases}


def progress_of(cell: ProducerCell) -> Progress:
    """Return the progress of a cell as it is reported to D. A prompt that is still being computed is QUEUED, however
    much of it was sent: D gives up what is READY or IN FLIGHT and shows no progress, and how long it takes to compute
    says nothing."""
    if cell.source is not None and not cell.source.complete:
        return Progress.QUEUED
    return _PROGRESS[cell.phase]


_PROGRESS = {
    OPEN: Progress.QUEUED,
    LEASED: Progress.UNKNOWN,
    JOINING: Progress.READY,
    READY: Progress.READY,
    IN_FLIGHT: Progress.IN_FLIGHT,
    SETTLING: Progress.IN_FLIGHT,
    GONE: Progress.UNKNOWN,
}


def _by_rank(registration: Register) -> int:
    return registration.d_rank

"""The end of P's lease on a finished prompt, in every phase and in every dialect.

A lease is how long P keeps a prompt's blocks without a sign that D wants them. D renews it: in `strict` by the
interest list of its SYNC, in `vllm-compat` by heartbeats. Its end stops new work only: no completion, cancel or timeout
can stop a WRITE that a NIC has begun, so a request and its blocks end separately.

spec 2.11 lists what the end of a lease does in each phase and dialect; the rules below implement all of it. No other
rule frees P's blocks because of time.
"""

from __future__ import annotations

from pdflow.protocol.effects import NOTHING
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.cell import (
    IN_FLIGHT,
    JOINING,
    LEASED,
    READY,
    SETTLING,
    LeaseEnded,
    ProducerCell,
    ProducerContext,
    Rules,
    Stepped,
    rows,
)
from pdflow.protocol.producer.writes import end_registration
from pdflow.protocol.values import NEVER, Instant


def expired_unclaimed(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End the lease of a prompt without a registration: this rank releases it."""
    return cell.becoming_gone(Code.EXPIRED), NOTHING


def expired_unposted(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a lease before a WRITE is posted: no WRITE will be posted, since it could read reused blocks (R02)."""
    if not ctx.dialect.lease_rechecked:
        return cell.losing_its_source(), NOTHING
    return end_registration(cell.outliving_its_lease(), Code.EXPIRED, True, now, ctx)


def expired_in_flight(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a lease during a WRITE: the blocks stay pinned until every handle is final; no further registration is served
    (R01)."""
    if not ctx.dialect.writes_pin:
        return cell.losing_its_source(), NOTHING
    return cell.outliving_its_lease(), NOTHING


def renewed(cell: ProducerCell, until: Instant) -> ProducerCell:
    """Renew the lease of a cell. A renewal never shortens it, nor revives one that has ended under a WRITE. A prompt
    that is still being computed has no lease, even if another D has released it."""
    if cell.source is not None and not cell.source.complete:
        until = NEVER
    if cell.source is None or cell.expired or (until <= cell.lease_until and not cell.unwanted):
        return cell
    return cell.with_lease(max(until, cell.lease_until))


def released(cell: ProducerCell, until: Instant) -> ProducerCell:
    """Apply a RELEASE: D will not register. An unclaimed lease is shortened, which leaves time for a late REG; one that
    a registration holds is shortened when that registration ends (`end_registration`)."""
    if cell.phase is LEASED:
        return cell.with_lease(until) if until < cell.lease_until else cell
    return cell if cell.source is None or cell.unwanted else cell.with_release()


LEASE_RULES: Rules = {
    **rows(LeaseEnded, expired_unclaimed, LEASED),
    **rows(LeaseEnded, expired_unposted, JOINING, READY),
    **rows(LeaseEnded, expired_in_flight, IN_FLIGHT, SETTLING),
}

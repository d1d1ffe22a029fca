"""The end of P's lease on a finished prompt, in every phase and in every dialect.

A lease is how long P keeps a prompt's blocks without a sign that D wants them. D renews it: in `strict` by the
interest list of its SYNC, in `vllm-compat` by heartbeats. Its end stops *new* work only. A request and its blocks
end separately, because no completion, cancel or timeout can stop a WRITE that a NIC has begun.

What the end of a lease means depends on how far the transfer is:

LEASED, no registration has come. The blocks are freed. A registration that comes later is refused: FAIL(EXPIRED) in
strict; in vllm-compat P has no message for it, and D's watchdog resolves the request.

JOINING or READY, matched but nothing posted. No WRITE will be posted any more, and the blocks are freed. In strict
every D rank that registered gets FAIL(EXPIRED), and a tombstone gives late frames the same answer. In vllm-compat D
cannot be told: its watchdog resolves the request, and its blocks wait in quarantine.

IN_FLIGHT or SETTLING, **a WRITE is under way**. Nothing is freed, in either dialect: the cell only notes that its lease
is over (`expired`), and no second registration will be served from it. Then

- the WRITE ends well: the source was pinned throughout, so the data are good. D counts the DONE (vllm-compat: the
  completion) and may commit. P's rank lets go of the prompt; the blocks are freed when all ranks have.
- the WRITE ends badly: an error proves nothing, so P closes its own endpoint to that D rank first (fence F10), and lets
  go after that. In strict D gets FAIL(IO, flushed). In vllm-compat it gets nothing, as above.
- D cancels meanwhile (strict): the answer waits for the WRITE's end, and is SENT or DRAINED.

vLLM 0.32.0, and so `vllm-stock`, frees in every one of these cases, posts from READY all the same, and writes on: D
then decodes whatever was written into those blocks next (R01, R02: S2). The rules below are all that a lease's end
does; nothing else frees P's blocks for time.
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
    """End an unclaimed lease (LEASED): the blocks are freed."""
    return cell.becoming_gone(Code.EXPIRED), NOTHING


def expired_unposted(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a lease before a WRITE was posted (JOINING, READY): one posted later would read reused blocks (R02)."""
    if not ctx.dialect.lease_rechecked:
        return cell.losing_its_source(), NOTHING
    return end_registration(cell.outliving_its_lease(), Code.EXPIRED, True, now, ctx)


def expired_in_flight(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """End a lease under a WRITE (IN_FLIGHT, SETTLING): pinned until every handle is final, then not served again
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

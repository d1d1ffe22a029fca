"""What happens when P's lease on a finished prompt ends: in every phase, in every dialect.

A lease says how long P keeps a prompt's blocks without a sign that somebody wants them. D renews it: in `strict` by the
interest list of its SYNC, in `vllm-compat` by heartbeats. Its end stops *new* work only. The life of a request and the
life of its blocks are separate, because no completion, cancel or timeout can stop a WRITE that a NIC has begun.

| phase when it ends | strict | vllm-compat |
| --- | --- | --- |
| LEASED: nobody came | the blocks are freed | the same |
| JOINING, READY: matched, nothing posted yet | FAIL(EXPIRED) to D; freed; a tombstone answers late frames | freed; D |
|                                             |                     | cannot be told, its watchdog resolves the request |
| IN_FLIGHT, SETTLING: **a WRITE is in flight** | nothing is freed. The cell notes that its lease is over. The WRITE ends | |
|   - it ends well | the data are good: the source was pinned throughout. DONE counts, P reports SENT, frees then | same |
|   - it ends badly | P fences D's rank, FAIL(IO, flushed); no second registration is served; freed then | fences; freed |
|   - D cancels meanwhile | the answer waits for the WRITE's end: SENT or DRAINED | D has no cancel: its blocks stay |
|                         |                                                          | in quarantine |

vLLM 0.32.0 frees in the IN_FLIGHT row, and D then decodes whatever was written there next (R01, R02: S2). Both rules
below are the whole difference: `expired_unposted` and `expired_in_flight`. Nothing else ever frees P's blocks for time.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.effects import NOTHING
from pdflow.protocol.messages import Code
from pdflow.protocol.phases import ProducerPhase
from pdflow.protocol.producer import (
    IN_FLIGHT,
    JOINING,
    LEASED,
    READY,
    SETTLING,
    LeaseEnded,
    ProducerCell,
    ProducerContext,
    Stepped,
    end_registration,
)
from pdflow.protocol.values import Instant


def expired_unclaimed(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """LEASED: nobody came."""
    return cell.becoming_gone(Code.EXPIRED), NOTHING


def expired_unposted(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """JOINING, READY: a WRITE posted from here on would read blocks that are somebody else's (R02)."""
    return end_registration(cell.outliving_its_lease(), Code.EXPIRED, True, now, ctx)


def expired_in_flight(cell: ProducerCell, _: LeaseEnded, now: Instant, ctx: ProducerContext) -> Stepped:
    """IN_FLIGHT, SETTLING: pinned until every handle is final; then no second registration is served (R01)."""
    return cell.outliving_its_lease(), NOTHING


def renewed(cell: ProducerCell, until: Instant) -> ProducerCell:
    """A lease is never shortened by a renewal, nor revived once it has ended under a WRITE."""
    return cell if cell.source is None or cell.expired or until <= cell.lease_until else cell.with_lease(until)


def released(cell: ProducerCell, until: Instant) -> ProducerCell:
    """RELEASE: this dispatch will not come. Only an unclaimed lease is cut short, to leave time for a late REG."""
    return cell.with_lease(until) if cell.phase is LEASED and until < cell.lease_until else cell


LEASE_RULES: dict[tuple[ProducerPhase, type], Any] = {
    (LEASED, LeaseEnded): expired_unclaimed,
    (JOINING, LeaseEnded): expired_unposted,
    (READY, LeaseEnded): expired_unposted,
    (IN_FLIGHT, LeaseEnded): expired_in_flight,
    (SETTLING, LeaseEnded): expired_in_flight,
}

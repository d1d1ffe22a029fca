"""Named scopes of engines that take time: an admission or a computed prompt is reported some time after it has
happened, decoding lasts, and D's engine takes blocks of requests that it decodes (preemption)."""

from __future__ import annotations

from pdflow_sim.check.scopes.named import DELIVERED, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

LATE = {"resolved before its admission was reported"}
DECODED = DELIVERED | {"decoded after a preemption", "aborted after a preemption"}

CORES = (
    Named("late reports", Scope(late=True, drop=1), DELIVERED | LATE | resolved("CANCELLED", "DEADLINE"), 4333, 12896),
    Named(
        "late reports, aborted at P",
        Scope(late=True, abort=2, prefill_abort=1, stall=0),
        DELIVERED | LATE | {"cancelled too late"},
        2719,
        7264,
    ),
    Named(
        "late reports and messages, no timer",
        Scope(late=True, lagging=True, clocks=False),
        DELIVERED | LATE,
        1188,
        3051,
    ),
    Named("late reports, pulled", Scope(late=True, pulls=True, err=1), DELIVERED | LATE, 175, 266),
    Named("late reports, P starts again", Scope(late=True, p_restart=1, stall=0), DELIVERED | LATE, 2328, 7065),
    Named("decoding takes time", Scope(decodes=True, preempt=1, drop=1), DECODED, 2676, 7944),
    Named("decoding takes time, pulled", Scope(decodes=True, preempt=1, pulls=True, err=1), DECODED, 123, 188),
    Named(
        "two requests, one pool, late reports and decoding",
        Scope(requests=2, pool=1, late=True, decodes=True, preempt=1, deadline=0, stall=0),
        DECODED | LATE,
        68447,
        266794,
    ),
)

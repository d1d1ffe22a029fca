"""Named scopes in which the router crashes and starts again. Everything that it had dispatched must end."""

from __future__ import annotations

from pdflow_sim.check.routed.crash import BETWEEN_LEGS, DURING_TRANSFER
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

CRASHED = frozenset({DURING_TRANSFER, BETWEEN_LEGS, "completed"}) | resolved("CANCELLED")
CANCELLED = frozenset({"cancelled before the WRITE", "cancelled in flight", "cancelled too late"})
P_LOST, D_LOST = "a leg is lost with P", "a leg is lost with D"

ROUTER_CRASHES = (
    Named(
        "the router crashes, P starts again",
        Scope(attempts=1, router_restart=1, p_restart=1, abort=0, deadline=0, stall=0),
        ENDS | CRASHED | CANCELLED | {P_LOST} | resolved("PEER_RESTARTED", "NO_REQUEST"),
        37224,
        170284,
    ),
    # No timer may be needed to end what the router has left.
    Named(
        "the router crashes, no timer, two requests",
        Scope(attempts=1, router_restart=1, requests=2, concurrent=False, clocks=False, abort=0),
        DELIVERED | CRASHED | CANCELLED,
        100116,
        410492,
    ),
    Named(
        "the router crashes, no timer, clients stream, a prefill fails",
        Scope(attempts=2, router_restart=1, streams=True, prefill_abort=1, clocks=False, abort=0),
        DELIVERED | CRASHED | CANCELLED | {"retried"},
        133745,
        587206,
        nightly=True,
    ),
    Named(
        "the router crashes, D starts again",
        Scope(attempts=1, router_restart=1, d_restart=1, abort=0, deadline=0, stall=0),
        ENDS | CRASHED | CANCELLED | {D_LOST},
        33962,
        158207,
        nightly=True,
    ),
    Named(
        "the router crashes, one leg after the other, broken connections",
        Scope(attempts=2, router_restart=1, concurrent=False, lose=1, sync=1, abort=0, deadline=0, stall=0),
        ENDS | CRASHED | CANCELLED | {"retried"},
        104929,
        399457,
        nightly=True,
    ),
    Named(
        "the router crashes, pull",
        Scope(attempts=2, router_restart=1, pulls=True, err=1),
        ENDS | CRASHED | {"cancelled too late"} | resolved("STALE"),
        27539,
        83849,
        nightly=True,
    ),
    Named(
        "the router crashes, two requests",
        Scope(attempts=1, router_restart=1, requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | CRASHED | CANCELLED,
        572990,
        2618194,
        nightly=True,
    ),
)

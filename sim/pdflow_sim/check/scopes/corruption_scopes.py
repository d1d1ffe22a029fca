"""Named scopes in which frames arrive undecodable, so that their receiver closes the connection (spec 3.1)."""

from __future__ import annotations

from pdflow_sim.check.moves.frames import DURING_TRANSFER
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

CORRUPTED = frozenset({DURING_TRANSFER})

CORRUPTIONS = (
    Named(
        "a corrupted frame, SYNC and CANCEL",
        Scope(corrupt=1, sync=1, cancel=1, deadline=0, stall=0),
        EVERY_END | CORRUPTED,
        60438,
        205769,
    ),
    Named(
        "two P engines, a corrupted frame",
        Scope(p_engines=2, requests=2, corrupt=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | CORRUPTED,
        33032,
        119552,
    ),
    Named(
        "pull, a corrupted frame",
        Scope(pulls=True, corrupt=1, err=1, sync=1, deadline=0, stall=0),
        ENDS | CORRUPTED | resolved("STALE", "IO"),
        1033,
        2031,
        nightly=True,
    ),
    Named(
        "two P ranks to one D rank, a corrupted frame",
        Scope(p_tp=2, corrupt=1, concurrent=False, abort=0, deadline=0, stall=0),
        EVERY_END | CORRUPTED,
        31932,
        130253,
        nightly=True,
    ),
    Named(
        "one P rank to two D ranks, a corrupted frame",
        Scope(d_tp=2, corrupt=1, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        ENDS | CORRUPTED,
        115679,
        484226,
        nightly=True,
    ),
    Named(
        "a corrupted frame and a duplicate",
        Scope(corrupt=1, dup=1, sync=1, abort=0, deadline=0, stall=0),
        DELIVERED | CORRUPTED,
        31824,
        105560,
        nightly=True,
    ),
)

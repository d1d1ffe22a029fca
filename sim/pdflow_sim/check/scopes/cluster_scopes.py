"""Named scopes of clusters with more engines or other processes than one P and one D, and the goals that each must
reach: two engines of one id that both run."""

from __future__ import annotations

from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

REPLACED = frozenset({"of two engines of one id, one replaces the other"})
REFUSED = REPLACED | {"of two engines of one id, both have answered"}

CLUSTERS = (
    # Two engines of P's id: D refuses both once a replaced one has answered again (spec 1.3).
    Named(
        "two engines of one id",
        Scope(twin=True, lose=2, sync=1, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED", "NO_REQUEST"),
        15503,
        64198,
    ),
    Named(
        "two engines of one id, one P rank to two D ranks",
        Scope(twin=True, lose=1, d_tp=2, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED", "NO_REQUEST"),
        62326,
        258276,
    ),
    Named(
        "two engines of one id, D starts again",
        Scope(twin=True, lose=1, d_restart=1, abort=0, deadline=0, stall=0),
        DELIVERED | REPLACED,
        1398,
        4522,
    ),
    # D registers further above its floor than P's window allows: P drops the REG, and D repeats it (spec 2.7).
    Named(
        "two requests, a window of one",
        Scope(requests=2, window=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | {"released after use", "beyond the window"} | resolved("EXPIRED"),
        17258,
        53304,
    ),
    # Larger ones.
    Named(
        "two requests, a window of one, and an abort",
        Scope(requests=2, window=1, sync=1, concurrent=False, deadline=0, stall=0),
        EVERY_END | {"beyond the window"},
        141144,
        483882,
        nightly=True,
    ),
    Named(
        "three requests, a window of two",
        Scope(requests=3, window=2, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | {"beyond the window"},
        325523,
        1306584,
        nightly=True,
    ),
    Named(
        "two engines of one id, two requests",
        Scope(twin=True, lose=2, requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED", "NO_REQUEST"),
        104988,
        456346,
        nightly=True,
    ),
    Named(
        "two engines of one id, an abort and a repeated CANCEL",
        Scope(twin=True, lose=1, sync=1, cancel=1, stall=0),
        EVERY_END | REFUSED | resolved("PEER_RESTARTED"),
        607228,
        2310546,
        nightly=True,
    ),
    Named(
        "two engines of one id, an error and a lost frame",
        Scope(twin=True, lose=2, sync=1, drop=1, err=1, stall=0),
        EVERY_END | REFUSED | resolved("PEER_RESTARTED", "IO"),
        1246203,
        6811989,
        nightly=True,
    ),
)

"""Named scopes of unusual clusters, and the goals that each must reach: two engines of one id that both run, a D whose
registrations exceed P's window, and three engines of a kind."""

from __future__ import annotations

from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

REPLACED = frozenset({"of two engines of one id, one replaces the other"})
ELSEWHERE = frozenset({"delivered after a crash elsewhere"})
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
        24170,
        70888,
    ),
    # Three engines of a kind.
    Named(
        "no timer, three P engines",
        Scope(p_engines=3, requests=3, concurrent=False, clocks=False, abort=0),
        DELIVERED,
        33501,
        134505,
    ),
    Named(
        "no timer, three D engines, one starts again",
        Scope(d_engines=3, requests=3, d_restart=1, concurrent=False, clocks=False, abort=0),
        DELIVERED | ELSEWHERE,
        27455,
        119952,
    ),
    # Larger ones.
    Named(
        "no timer, three P engines, one starts again",
        Scope(p_engines=3, requests=3, p_restart=1, concurrent=False, clocks=False, abort=0),
        DELIVERED | ELSEWHERE,
        128346,
        553080,
        nightly=True,
    ),
    Named(
        "pull, three P engines, one starts again",
        Scope(pulls=True, p_engines=3, requests=3, p_restart=1, clocks=False, abort=0),
        DELIVERED | ELSEWHERE | resolved("STALE"),
        24434,
        69147,
        nightly=True,
    ),
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

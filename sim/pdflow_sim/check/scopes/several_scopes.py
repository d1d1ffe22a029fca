"""Named scopes of two requests, or of several ranks, with the faults that only they show, and their goals.

A local DONE and a broken connection concern one pair of ranks, while the request and its blocks concern all of them.
P forgets a tombstone when D's floor passes it: that takes two registrations of one D (spec 2.7).
"""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

COMPAT = VLLM_COMPAT
SERVED = ENDS | {"released after use"}

SEVERAL = (
    Named(
        "two attempts at one prompt, a duplicate and a SYNC",
        Scope(requests=2, same_product=True, dup=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0),
        SERVED | resolved("EXPIRED", "NO_REQUEST"),
        362775,
        1_249716,
    ),
    # DONE is local: a WRITE that has ended at P may not have landed.
    Named(
        "WRITE completes before it lands, two requests",
        Scope(done_is_remote=False, requests=2, err=1, concurrent=False, abort=0, deadline=0, stall=0),
        SERVED | resolved("IO"),
        34928,
        127682,
    ),
    Named(
        "WRITE completes before it lands, two requests, one pool",
        Scope(done_is_remote=False, requests=2, pool=1, concurrent=False, deadline=0, stall=0),
        EVERY_END | resolved("CANCELLED"),
        13674,
        45926,
    ),
    Named(
        "WRITE completes before it lands, two P ranks to one D rank",
        Scope(done_is_remote=False, p_tp=2, concurrent=False, deadline=0, stall=0),
        EVERY_END | resolved("CANCELLED"),
        77448,
        383671,
    ),
    Named(
        "WRITE completes before it lands, one P rank to two D ranks",
        Scope(done_is_remote=False, d_tp=2, err=1, concurrent=False, deadline=0, stall=0),
        EVERY_END | {"late REG refused"} | resolved("IO"),
        55006,
        252707,
    ),
    Named(
        "compat, WRITE completes before it lands, two requests",
        Scope(dialect=COMPAT, done_is_remote=False, requests=2, drop=1, err=1),
        SERVED,
        39709,
        174816,
    ),
    Named(
        "compat, WRITE completes before it lands, two P ranks to one D rank",
        Scope(dialect=COMPAT, done_is_remote=False, p_tp=2, drop=1, err=1),
        SERVED,
        9429,
        36668,
    ),
    Named(
        "compat, WRITE completes before it lands, one P rank to two D ranks",
        Scope(dialect=COMPAT, done_is_remote=False, d_tp=2, drop=1, err=1),
        SERVED,
        5364,
        18115,
    ),
    # Connections of one pair of ranks break.
    Named(
        "broken connections, two P ranks to one D rank",
        Scope(p_tp=2, lose=1, concurrent=False, abort=0, deadline=0, stall=0),
        EVERY_END,
        22948,
        98966,
    ),
    Named(
        "broken connections, one P rank to two D ranks",
        Scope(d_tp=2, lose=1, concurrent=False, deadline=0, stall=0),
        EVERY_END | {"late REG refused"},
        53533,
        254384,
    ),
    Named(
        "broken connections, two P ranks to two D ranks",
        Scope(p_tp=2, d_tp=2, lose=1, concurrent=False, abort=0, deadline=0, stall=0),
        EVERY_END,
        22948,
        115238,
    ),
    Named(
        "broken connections, two P ranks to one D rank, no clocks",
        Scope(p_tp=2, lose=1, clocks=False, abort=0),
        DELIVERED,
        3576,
        13092,
    ),
    Named(
        "pull, broken connections, two P ranks to two D ranks",
        Scope(pulls=True, p_tp=2, d_tp=2, lose=2),
        ENDS | resolved("STALE"),
        8493,
        52533,
    ),
    Named(
        "compat, broken connections, two P ranks to one D rank",
        Scope(dialect=COMPAT, p_tp=2, lose=2),
        SERVED,
        17730,
        84511,
    ),
)

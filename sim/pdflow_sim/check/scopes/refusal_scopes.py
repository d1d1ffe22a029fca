"""Named scopes in which P's address refuses D's reconnects, and the goals that each must reach to count.

P may be dead for a while, or, with clocks, for good (`down`); one of its ranks may be dead alone (`rank_dies`); or P
lives, and the refusal is wrong (`refused`). In each case the request is resolved in the turn of the refusal (L1), and
its blocks wait for an answer or a fence (S1).
"""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

REFUSED = frozenset({"resolved by a refusal"}) | resolved("PEER_DEAD", "UNREACHABLE")
FENCED = frozenset({"fenced while P is down"})

REFUSALS = (
    # P lives. Nobody gives up, so that every CANCEL follows from a refusal.
    Named(
        "reconnect refused, P running",
        Scope(lose=1, refused=1, sync=2, cancel=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED,
        26684,
        84409,
    ),
    Named(
        "reconnect refused, P running, a WRITE in two pieces and an error",
        Scope(lose=1, refused=1, chunks=2, err=1, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED | resolved("IO"),
        11712,
        34689,
    ),
    Named(
        "reconnect refused, P running, lagging ranks",
        Scope(lose=1, refused=1, lagging=True, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED,
        40149,
        131668,
    ),
    Named(
        "pull, reconnect refused, P running",
        Scope(pulls=True, lose=1, refused=1, err=1, sync=1),
        ENDS | REFUSED | resolved("STALE", "IO"),
        2929,
        6782,
    ),
    Named(
        "router, reconnect refused, P running",
        Scope(attempts=1, lose=1, refused=1, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED,
        15836,
        55195,
    ),
    Named(
        "reconnect refused, an orphan survives",
        Scope(p_restart=1, orphan=True, lose=1, refused=1, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED | {"an orphan posts", "an orphan is fenced"},
        12733,
        38982,
    ),
    # P dies.
    Named(
        "P is down",
        Scope(p_restart=1, down=True, drop=1, sync=2, deadline=0, stall=0),
        EVERY_END | REFUSED | resolved("PEER_RESTARTED", "NO_REQUEST"),
        116274,
        470653,
    ),
    Named(
        "P is down twice",
        Scope(p_restart=2, down=True, sync=2, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED"),
        21159,
        64946,
        endless=True,
    ),
    Named(
        "P is down, lagging ranks",
        Scope(p_restart=1, down=True, lagging=True, sync=1, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED"),
        12222,
        37885,
        endless=True,
    ),
    Named(
        "P is down, two requests, one pool",
        Scope(p_restart=1, down=True, requests=2, pool=1, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED"),
        49485,
        138602,
    ),
    Named(
        "pull, P is down",
        Scope(pulls=True, p_restart=1, down=True, err=1, sync=1),
        ENDS | REFUSED | resolved("PEER_RESTARTED", "STALE", "IO"),
        4951,
        10406,
    ),
    Named(
        "P stays down, with clocks for four ticks",
        Scope(p_restart=1, down=True, horizon=4, concurrent=False, abort=0),
        EVERY_END | REFUSED | FENCED | resolved("PEER_RESTARTED"),
        228827,
        702005,
    ),
    Named(
        "pull, P stays down, with clocks for four ticks",
        Scope(pulls=True, p_restart=1, down=True, horizon=4, abort=0),
        ENDS | REFUSED | resolved("PEER_RESTARTED", "STALE"),
        115918,
        299066,
    ),
    Named(
        "two P engines without clocks, one is down",
        Scope(p_engines=2, requests=2, p_restart=1, down=True, clocks=False, abort=0),
        DELIVERED | {"delivered after a crash elsewhere"},
        14928,
        50476,
    ),
    # A P rank dies alone.
    Named(
        "one of two P ranks dies",
        Scope(p_restart=1, rank_dies=True, p_tp=2, concurrent=False, abort=0, deadline=0, stall=0),
        EVERY_END | resolved("PEER_RESTARTED", "UNREACHABLE"),
        12194,
        54363,
        endless=True,
    ),
    Named(
        "one of two P ranks dies, two D ranks",
        Scope(p_restart=1, rank_dies=True, p_tp=2, d_tp=2, concurrent=False, abort=0, deadline=0, stall=0),
        EVERY_END | resolved("PEER_RESTARTED", "UNREACHABLE"),
        14724,
        60639,
        endless=True,
    ),
    Named(
        "pull, one of two P ranks dies",
        Scope(pulls=True, p_restart=1, rank_dies=True, p_tp=2, d_tp=2, err=1, abort=0, deadline=0, stall=0),
        ENDS | resolved("UNREACHABLE", "STALE", "IO"),
        3534,
        10149,
    ),
    Named(
        "compat, one of two P ranks dies",
        Scope(
            dialect=VLLM_COMPAT,
            p_restart=1,
            rank_dies=True,
            p_tp=2,
            concurrent=False,
            sync=1,
            abort=0,
            deadline=0,
            stall=0,
        ),
        ENDS | resolved("PEER_RESTARTED", "UNREACHABLE", "DEADLINE"),
        8698,
        34093,
        endless=True,
    ),
    Named(
        "no timer, one of two P ranks dies, a broken connection",
        Scope(p_restart=1, rank_dies=True, p_tp=2, lose=1, clocks=False, concurrent=False, abort=0),
        DELIVERED | resolved("PEER_RESTARTED", "UNREACHABLE"),
        6886,
        28692,
    ),
    Named(
        "no timer, both P ranks die, one after the other",
        Scope(p_restart=2, rank_dies=True, p_tp=2, clocks=False, concurrent=False, abort=0),
        DELIVERED | FENCED | resolved("PEER_RESTARTED", "UNREACHABLE"),
        7326,
        21167,
    ),
    # Larger ones.
    Named(
        "reconnect refused twice, P running",
        Scope(lose=1, refused=2, sync=2, cancel=1, deadline=0, stall=0),
        EVERY_END | REFUSED,
        373592,
        1357020,
        nightly=True,
    ),
    Named(
        "reconnect refused, P running, with clocks for three ticks",
        Scope(lose=1, refused=1, horizon=3, abort=0),
        EVERY_END | REFUSED,
        1307842,
        3763610,
        nightly=True,
    ),
    Named(
        "P is down, two P ranks to one D rank",
        Scope(p_restart=1, down=True, p_tp=2, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED | resolved("PEER_RESTARTED"),
        288712,
        1206755,
        nightly=True,
    ),
    Named(
        "P is down, one P rank to two D ranks",
        Scope(p_restart=1, down=True, d_tp=2, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | {"late REG refused"} | resolved("PEER_RESTARTED"),
        200987,
        765631,
        nightly=True,
    ),
    Named(
        "one of two P ranks dies, two D ranks and a SYNC",
        Scope(p_restart=1, rank_dies=True, p_tp=2, d_tp=2, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED | resolved("PEER_RESTARTED"),
        346528,
        1466745,
        nightly=True,
    ),
    Named(
        "both P ranks die, one after the other, and a SYNC",
        Scope(p_restart=2, rank_dies=True, p_tp=2, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        EVERY_END | REFUSED | FENCED | resolved("PEER_RESTARTED"),
        771678,
        3154585,
        nightly=True,
    ),
    Named(
        "two P engines, one is down",
        Scope(p_engines=2, requests=2, p_restart=1, down=True, concurrent=False, sync=1, abort=0, deadline=0, stall=0),
        ENDS | REFUSED | {"delivered after a crash elsewhere"},
        328019,
        1381094,
        nightly=True,
    ),
    Named(
        "P stays down, with clocks for six ticks",
        Scope(p_restart=1, down=True, horizon=6, abort=0),
        EVERY_END | REFUSED | FENCED | resolved("PEER_RESTARTED"),
        1434876,
        5179156,
        nightly=True,
    ),
)

"""The named scopes that `pdflow check scopes` searches, and the goals that each must reach for its result to count.

A scope that never reaches its goals proves nothing, and fails. How many states each has is asserted by the tests, so
that a change of the space is noticed; the numbers depend on no hash seed.
"""

from __future__ import annotations

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow_sim.check.scopes.cluster_scopes import CLUSTERS
from pdflow_sim.check.scopes.core_scopes import CORES
from pdflow_sim.check.scopes.corruption_scopes import CORRUPTIONS
from pdflow_sim.check.scopes.engine_scopes import ENGINES
from pdflow_sim.check.scopes.group_scopes import GROUPS
from pdflow_sim.check.scopes.method_scopes import BY_METHOD
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.orphan_scopes import ORPHANS
from pdflow_sim.check.scopes.pairs import PAIRS
from pdflow_sim.check.scopes.refusal_scopes import REFUSALS
from pdflow_sim.check.scopes.routed_scopes import ROUTED
from pdflow_sim.check.scopes.router_crash_scopes import ROUTER_CRASHES
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, ENDLESS, TOKENS, Scope
from pdflow_sim.check.scopes.several_scopes import SEVERAL
from pdflow_sim.check.scopes.timed_scopes import TIMED

COMPAT = VLLM_COMPAT
SCOPES = (
    # One push request, and one kind of trouble after another.
    Named(
        "drop and duplicate",
        Scope(drop=1, dup=1),
        EVERY_END | {"late REG refused"} | resolved("STALLED"),
        25158,
        92449,
    ),
    Named("three drops and three duplicates", Scope(drop=3, dup=3, abort=0, deadline=0, stall=0), ENDS, 26376, 119329),
    Named("drop, SYNC and repeated CANCEL", Scope(drop=1, sync=1, cancel=1), EVERY_END, 68225, 242584),
    Named("two SYNCs", Scope(drop=1, sync=2, cancel=1, deadline=0, stall=0), EVERY_END, 139853, 538297),
    Named("errors and broken connections", Scope(drop=1, err=1, lose=1), EVERY_END | resolved("IO"), 12773, 42421),
    Named(
        "unreachable peers and aborted prefills",
        Scope(unreachable=1, prefill_abort=1, sync=1),
        EVERY_END | resolved("UNREACHABLE", "PREFILL_ABORTED"),
        12434,
        35555,
    ),
    Named("CANCEL overtakes REG", Scope(delay=2, cancel=1), EVERY_END | {"late REG refused"}, 25018, 98122),
    Named("a WRITE in two pieces", Scope(chunks=2, err=1, drop=1), EVERY_END | resolved("IO"), 6487, 20235),
    Named(
        "WRITE completes before it lands",
        Scope(done_is_remote=False, err=1, drop=1),
        EVERY_END | resolved("IO"),
        6291,
        20686,
    ),
    Named("half of the prompt is cached at D", Scope(hit_tokens=BLOCK_TOKENS, drop=1, dup=1), EVERY_END, 25158, 92449),
    Named("all of the prompt is cached at D", Scope(hit_tokens=TOKENS, drop=1, dup=1), ENDS, 96, 175),
    # Several ranks.
    Named("one P rank to two D ranks", Scope(d_tp=2, deadline=0, stall=0), EVERY_END, 39465, 180446),
    Named("two P ranks to one D rank", Scope(p_tp=2, abort=0, deadline=0, stall=0), ENDS, 19382, 80644),
    Named("one lagging rank", Scope(lagging=True, deadline=0, stall=0), EVERY_END, 4054, 13559),
    Named(
        "one P rank to two D ranks, lagging",
        Scope(lagging=True, d_tp=2, abort=0, deadline=0, stall=0),
        ENDS,
        35932,
        161026,
    ),
    # Several requests.
    Named("two requests", Scope(requests=2, abort=0, deadline=0, stall=0), ENDS, 26142, 92942),
    Named("two requests, one pool", Scope(requests=2, pool=1, deadline=0, stall=0), EVERY_END, 27108, 96624),
    Named(
        "two prompts, one base id", Scope(requests=2, same_base=True, abort=0, deadline=0, stall=0), ENDS, 26142, 92942
    ),
    Named(
        "two attempts at one prompt",
        Scope(requests=2, same_product=True, concurrent=False, deadline=0, stall=0),
        EVERY_END,
        23001,
        74810,
    ),
    Named(
        "RELEASE and a late REG",
        Scope(requests=2, same_product=True, concurrent=False, delay=1, deadline=0, stall=0),
        EVERY_END | {"late REG refused"},
        121091,
        459710,
    ),
    # Deaths.
    Named(
        "P starts again",
        Scope(p_restart=1, drop=1, sync=1, stall=0),
        EVERY_END | resolved("PEER_RESTARTED", "NO_REQUEST"),
        32066,
        115217,
    ),
    Named("D starts again", Scope(d_restart=1, drop=1, sync=1), EVERY_END, 49226, 178926),
    Named(
        "both start again",
        Scope(p_restart=1, d_restart=1, drop=1, dup=1, deadline=0, stall=0),
        EVERY_END,
        34579,
        156483,
    ),
    Named(
        "two broken connections, P starts again",
        Scope(lose=2, p_restart=1, sync=1, deadline=0, stall=0),
        EVERY_END,
        51606,
        215168,
    ),
    # Pull.
    Named(
        "pull",
        Scope(pulls=True, drop=1, dup=1, err=1, lose=1, sync=1),
        ENDS | resolved("STALE", "IO"),
        16871,
        51993,
    ),
    Named("pull in two pieces", Scope(pulls=True, chunks=2, drop=1, err=1), ENDS | resolved("STALE", "IO"), 206, 385),
    Named("pull, two requests", Scope(pulls=True, requests=2, deadline=0), ENDS | resolved("STALE"), 6180, 16862),
    Named(
        "pull, P starts again",
        Scope(pulls=True, p_restart=1, sync=1),
        DELIVERED | resolved("STALE", "PEER_RESTARTED"),
        1052,
        2107,
    ),
    Named("pull, D starts again", Scope(pulls=True, d_restart=1, drop=1), ENDS, 248, 397),
    Named("pull, lagging ranks", Scope(pulls=True, lagging=True, drop=1, sync=1), ENDS | resolved("STALE"), 3115, 8092),
    Named("pull, lagging ranks, no clocks", Scope(pulls=True, lagging=True, clocks=False), DELIVERED, 63, 110),
    Named(
        "compat pull, lagging ranks, no clocks",
        Scope(dialect=COMPAT, pulls=True, lagging=True, clocks=False),
        DELIVERED,
        69,
        127,
    ),
    Named("pull, half of the prompt is cached at D", Scope(pulls=True, hit_tokens=BLOCK_TOKENS, drop=1), ENDS, 98, 142),
    # vllm-compat, as far as it claims to hold: clocks agree, and every dispatch has an id of its own.
    Named(
        "compat",
        Scope(dialect=COMPAT, drop=1, dup=1, err=1),
        ENDS | {"released after use"} | resolved("DEADLINE"),
        557,
        1361,
    ),
    Named("compat, one P rank to two D ranks", Scope(dialect=COMPAT, d_tp=2, dup=1), ENDS, 4590, 15435),
    Named("compat, two P ranks to one D rank", Scope(dialect=COMPAT, p_tp=2, drop=1, err=1), ENDS, 3449, 11370),
    Named(
        "compat, a retry with the same base id",
        Scope(dialect=COMPAT, requests=2, same_product=True, dup=1, err=1),
        ENDS,
        20709,
        79205,
    ),
    Named(
        "compat, P starts again",
        Scope(dialect=COMPAT, p_tp=2, p_restart=1),
        DELIVERED | resolved("PEER_RESTARTED"),
        2179,
        7628,
    ),
    Named("compat, D starts again", Scope(dialect=COMPAT, d_restart=1), ENDS, 294, 588),
    Named(
        "compat, WRITE completes before it lands",
        Scope(dialect=COMPAT, done_is_remote=False, drop=1, err=1),
        ENDS,
        228,
        502,
    ),
    Named(
        "compat pull",
        Scope(dialect=COMPAT, pulls=True, drop=1, dup=1, err=1, sync=1),
        ENDS | resolved("IO"),
        981,
        2041,
    ),
    Named("compat pull in two pieces", Scope(dialect=COMPAT, pulls=True, chunks=2, drop=1), ENDS, 68, 104),
    # With clocks.
    Named(
        "compat, with clocks",
        Scope(dialect=COMPAT, horizon=ENDLESS, abort=0),
        ENDS | resolved("DEADLINE"),
        188523,
        536402,
    ),
    Named(
        "pull, with clocks for eight ticks",
        Scope(pulls=True, horizon=8, abort=0),
        ENDS | resolved("STALE", "PEER_DEAD"),
        147460,
        366521,
    ),
    Named(
        "pull, two requests, an unreachable peer and a tick",
        Scope(pulls=True, requests=2, unreachable=1, horizon=1, abort=0),
        DELIVERED | resolved("UNREACHABLE"),
        72028,
        194281,
    ),
    Named(
        "push, with unlimited clocks",
        Scope(horizon=ENDLESS, abort=0),
        EVERY_END | resolved("DEADLINE", "EXPIRED", "PEER_DEAD", "STALLED"),
        412960,
        1277988,
    ),
    # Larger ones.
    Named(
        "compat, with clocks and an abort", Scope(dialect=COMPAT, horizon=ENDLESS), ENDS, 529618, 1562826, nightly=True
    ),
    Named(
        "compat, with clocks and a lost frame",
        Scope(dialect=COMPAT, horizon=ENDLESS, drop=1, abort=0),
        ENDS,
        453704,
        1352936,
        nightly=True,
    ),
    Named(
        "compat, with clocks and a duplicate",
        Scope(dialect=COMPAT, horizon=ENDLESS, dup=1, abort=0),
        ENDS | {"released after use"} | resolved("DEADLINE"),
        854923,
        2818007,
        nightly=True,
    ),
    Named(
        "drop, duplicate, SYNC and repeated CANCEL",
        Scope(drop=1, dup=1, sync=1, cancel=1),
        EVERY_END,
        896828,
        3741340,
        nightly=True,
    ),
    Named("two drops and an error", Scope(drop=2, err=1, sync=1, cancel=1), EVERY_END, 151150, 585142, nightly=True),
    Named(
        "three SYNCs", Scope(drop=1, sync=3, cancel=1, deadline=0, stall=0), EVERY_END, 461420, 1856346, nightly=True
    ),
    Named("broken connections and SYNC", Scope(dup=1, lose=1, sync=1), EVERY_END, 466302, 1756215, nightly=True),
    Named(
        "three drops, three duplicates, both start again",
        Scope(drop=3, dup=3, p_restart=1, d_restart=1),
        EVERY_END,
        2316449,
        14844645,
        nightly=True,
    ),
    Named(
        "two P ranks to one D rank, with aborts",
        Scope(p_tp=2, deadline=0, stall=0),
        EVERY_END,
        210163,
        1038907,
        nightly=True,
    ),
    Named(
        "two P ranks to one D rank, lagging",
        Scope(p_tp=2, lagging=True, abort=0, deadline=0, stall=0),
        ENDS,
        449175,
        2220358,
        nightly=True,
    ),
    Named(
        "one P rank to two D ranks, duplicates",
        Scope(d_tp=2, dup=1, deadline=0, stall=0),
        EVERY_END,
        636467,
        3395092,
        nightly=True,
    ),
    Named(
        "two requests, one lost frame",
        Scope(requests=2, drop=1, deadline=0, stall=0),
        EVERY_END,
        821930,
        3628920,
        nightly=True,
    ),
    Named(
        "two requests, one pool, a loss and a duplicate",
        Scope(requests=2, pool=1, drop=1, dup=1, deadline=0, stall=0),
        EVERY_END,
        966216,
        4408108,
        nightly=True,
    ),
    Named(
        "two requests, one SYNC",
        Scope(requests=2, sync=1, abort=0, deadline=0, stall=0),
        ENDS,
        351824,
        1324290,
        nightly=True,
    ),
    Named(
        "two prompts, one base id, aborts",
        Scope(requests=2, same_base=True, deadline=0, stall=0),
        EVERY_END,
        265118,
        1063278,
        nightly=True,
    ),
    Named(
        "two attempts, an error",
        Scope(requests=2, same_product=True, err=1, dup=1, deadline=0, stall=0),
        EVERY_END,
        2430777,
        9797244,
        nightly=True,
    ),
    Named(
        "P starts again twice, two requests",
        Scope(p_restart=2, requests=2, abort=0, deadline=0, stall=0),
        ENDS,
        36192,
        140465,
        nightly=True,
    ),
    Named(
        "P starts again, lagging ranks",
        Scope(p_restart=1, lagging=True, sync=1, deadline=0, stall=0),
        EVERY_END,
        72822,
        281727,
        nightly=True,
    ),
    Named(
        "broken connections, lagging ranks",
        Scope(lagging=True, lose=1, sync=1, deadline=0, stall=0),
        EVERY_END,
        476881,
        1845172,
        nightly=True,
    ),
    Named(
        "compat, lagging ranks",
        Scope(dialect=COMPAT, lagging=True, p_tp=2, drop=1, err=1),
        ENDS,
        9347,
        33374,
        nightly=True,
    ),
    Named("compat, two requests", Scope(dialect=COMPAT, requests=2, drop=1, dup=1), ENDS, 59835, 272446, nightly=True),
    Named(
        "pull, with unlimited clocks",
        Scope(pulls=True, horizon=ENDLESS),
        ENDS | resolved("STALE", "PEER_DEAD"),
        92046,
        264440,
        nightly=True,
    ),
    # Too many to count in every run: 6,505,623 of 13 million, requests being alike.
    Named(
        "two requests, a loss and a duplicate",
        Scope(requests=2, drop=1, dup=1, deadline=0, stall=0),
        EVERY_END | {"late REG refused"},
        nightly=True,
    ),
    *SEVERAL,
    *TIMED,
    *CLUSTERS,
    *ROUTED,
    *CORES,
    *ENGINES,
    *ORPHANS,
    *REFUSALS,
    *CORRUPTIONS,
    *ROUTER_CRASHES,
    *GROUPS,
    *BY_METHOD,
    *PAIRS,
)

assert len({named.name for named in SCOPES}) == len(SCOPES)
assert all(named.scope.dialect in (STRICT, COMPAT) for named in SCOPES)

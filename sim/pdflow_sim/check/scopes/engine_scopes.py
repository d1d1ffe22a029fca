"""Named scopes with several engines of a kind, or unequal ones, and the goals that each must reach to count.

Two P engines feed one D, or one P two Ds, or two two. Whatever happens to one engine, requests that it does not serve
are delivered, and without clocks at once (L6, promptness.py); no P engine takes more of D's pool than its share.
"""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, Scope

COMPAT = VLLM_COMPAT
SERVED = DELIVERED | {"released after use"}
STAGING = SERVED | {"delivered after a crash elsewhere"}
LET_IN = SERVED | {"admitted once blocks were free"}

ENGINES = (
    # Push, two P engines and one D.
    Named(
        "two P engines",
        Scope(p_engines=2, requests=2, drop=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | SERVED,
        15080,
        56136,
    ),
    Named(
        "two P engines, one starts again",
        Scope(p_engines=2, requests=2, p_restart=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | STAGING | resolved("PEER_RESTARTED", "NO_REQUEST"),
        16180,
        59040,
        endless=True,
    ),
    Named(
        "two P engines without clocks, one starts again",
        Scope(p_engines=2, requests=2, p_restart=1, clocks=False, abort=0),
        STAGING,
        5404,
        18304,
    ),
    Named(
        "a P engine's share of the pool",
        Scope(p_engines=2, requests=3, pool_blocks=8, concurrent=False, clocks=False, abort=0),
        LET_IN,
        34960,
        138634,
    ),
    # Push, one P engine and two Ds.
    Named(
        "two D engines",
        Scope(d_engines=2, requests=2, drop=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | SERVED,
        7086,
        25410,
    ),
    Named(
        "two D engines, one starts again",
        Scope(d_engines=2, requests=2, d_restart=1, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | STAGING,
        12301,
        44046,
    ),
    Named(
        "two D engines without clocks, one starts again",
        Scope(d_engines=2, requests=2, d_restart=1, clocks=False, abort=0),
        STAGING,
        4455,
        14904,
    ),
    Named(
        "two attempts, at two D engines",
        Scope(d_engines=2, requests=2, same_product=True, concurrent=False, deadline=0, stall=0),
        EVERY_END,
        22190,
        84969,
        endless=True,
    ),
    Named(
        "two P and two D engines",
        Scope(p_engines=2, d_engines=2, requests=3, concurrent=False, clocks=False, abort=0),
        SERVED,
        10149,
        41169,
    ),
    # Pull.
    Named(
        "pull, two P engines, one starts again",
        Scope(pulls=True, p_engines=2, requests=2, p_restart=1, abort=0, deadline=0),
        ENDS | STAGING | resolved("STALE"),
        3347,
        8648,
    ),
    Named(
        "pull, two D engines, one starts again",
        Scope(pulls=True, d_engines=2, requests=2, d_restart=1, drop=1, abort=0, deadline=0),
        ENDS | STAGING | resolved("STALE"),
        5550,
        14692,
    ),
    # vllm-compat.
    Named(
        "compat, two P engines, one starts again",
        Scope(dialect=COMPAT, p_engines=2, requests=2, p_restart=1, drop=1, abort=0),
        ENDS | STAGING | resolved("DEADLINE"),
        10320,
        39136,
    ),
    Named(
        "compat, two D engines, one starts again",
        Scope(dialect=COMPAT, d_engines=2, requests=2, d_restart=1, drop=1, abort=0),
        ENDS | STAGING | resolved("DEADLINE"),
        21546,
        76236,
    ),
    # D's blocks hold half as many tokens as P's.
    Named(
        "blocks of half the size",
        Scope(d_block=8, hit_tokens=BLOCK_TOKENS, drop=1, err=1),
        EVERY_END | resolved("IO"),
        3559,
        10543,
    ),
    Named(
        "compat, blocks of half the size",
        Scope(dialect=COMPAT, d_block=8, drop=1, err=1),
        resolved("LAYOUT") | {"expired", "released after use"},
        42,
        64,
    ),
    # Larger ones.
    Named(
        "two P engines without clocks, one starts again, and an abort",
        Scope(p_engines=2, requests=2, p_restart=1, clocks=False),
        STAGING | resolved("CANCELLED"),
        65422,
        255492,
        nightly=True,
    ),
    Named(
        "two D engines without clocks, one starts again, and an abort",
        Scope(d_engines=2, requests=2, d_restart=1, clocks=False),
        STAGING | resolved("CANCELLED"),
        44019,
        170298,
        nightly=True,
    ),
    Named(
        "compat, a P engine's share of the pool, five requests",
        Scope(dialect=COMPAT, p_engines=2, requests=5, pool_blocks=8, concurrent=False, clocks=False, abort=0),
        LET_IN,
        239180,
        1073360,
        nightly=True,
    ),
    Named(
        "two P engines, one starts again, and SYNC",
        Scope(p_engines=2, requests=2, p_restart=1, sync=1, abort=0, deadline=0, stall=0),
        ENDS | STAGING | resolved("PEER_RESTARTED", "NO_REQUEST"),
        666634,
        3326664,
        nightly=True,
    ),
    Named(
        "two P and two D engines, one P starts again",
        Scope(p_engines=2, d_engines=2, requests=3, p_restart=1, clocks=False, abort=0),
        STAGING,
        164526,
        796417,
        nightly=True,
    ),
    Named(
        "two D engines, an error and a broken connection",
        Scope(d_engines=2, requests=2, err=1, lose=1, abort=0, deadline=0, stall=0),
        ENDS | SERVED | resolved("IO"),
        116532,
        540482,
        nightly=True,
    ),
)

"""The named scopes with the router's endpoint in them. What each must reach says what became of clients, too."""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from sim.check.named import ENDS, EVERY_END, Named, resolved
from sim.check.scope import Scope

ANSWERED = ENDS | {"completed", "failed"}
GIVEN_UP = ANSWERED | {"cancelled", "taken back too late"}
RETRIED = ANSWERED | {"retried"}
P_LOST, D_LOST = "a leg is lost with P", "a leg is lost with D"
COMPAT = VLLM_COMPAT

ROUTED = (
    Named(
        "router, a client hangs up",
        Scope(attempts=1, stall=0),
        EVERY_END | GIVEN_UP | resolved("DEADLINE"),
        15214,
        63418,
    ),
    Named(
        "router, a prefill fails",
        Scope(attempts=2, prefill_abort=1, abort=0, deadline=0, stall=0),
        RETRIED | {"taken back too late"} | resolved("PREFILL_ABORTED"),
        75349,
        301500,
    ),
    Named(
        "router, one leg after the other",
        Scope(attempts=2, concurrent=False, prefill_abort=1, drop=1, dup=1, deadline=0, stall=0),
        EVERY_END | GIVEN_UP | RETRIED | {"late REG refused"},
        92994,
        406709,
    ),
    Named(
        "router, errors and broken connections",
        Scope(attempts=2, concurrent=False, err=1, lose=1, abort=0, deadline=0, stall=0),
        RETRIED | resolved("IO"),
        2421,
        6912,
    ),
    Named(
        "router, two requests",
        Scope(attempts=1, requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        ANSWERED,
        10159,
        35520,
    ),
    Named(
        "router, P starts again",
        Scope(attempts=1, p_restart=1, deadline=0, stall=0),
        EVERY_END | GIVEN_UP | {P_LOST} | resolved("PEER_RESTARTED", "NO_REQUEST"),
        36486,
        156108,
    ),
    Named(
        "router, one leg after the other, P starts again",
        Scope(attempts=2, concurrent=False, p_restart=1, deadline=0, stall=0),
        EVERY_END | GIVEN_UP | RETRIED | {P_LOST} | resolved("PEER_RESTARTED"),
        18931,
        68975,
    ),
    Named(
        "router, D starts again",
        Scope(attempts=1, d_restart=1, deadline=0, stall=0),
        EVERY_END | GIVEN_UP | {D_LOST},
        33255,
        145428,
    ),
    Named(
        "router, pull",
        Scope(attempts=2, pulls=True, prefill_abort=1),
        GIVEN_UP | RETRIED | resolved("STALE"),
        6144,
        15512,
    ),
    Named(
        "router, pull, P starts again",
        Scope(attempts=2, pulls=True, p_restart=1),
        GIVEN_UP | RETRIED | {P_LOST} | resolved("STALE"),
        43824,
        135467,
    ),
    Named(
        "router, pull, D starts again",
        Scope(attempts=2, pulls=True, d_restart=1, deadline=0, stall=0),
        GIVEN_UP | RETRIED | {D_LOST},
        39191,
        126149,
    ),
    Named(
        "router, compat",
        Scope(dialect=COMPAT, attempts=2, drop=1, err=1, abort=0),
        RETRIED | {"taken back too late"} | resolved("DEADLINE"),
        36841,
        171408,
    ),
    Named(
        "router, compat, one leg after the other",
        Scope(dialect=COMPAT, attempts=2, concurrent=False, prefill_abort=1, err=1),
        GIVEN_UP | RETRIED,
        10373,
        36864,
    ),
    Named(
        "router, compat, P starts again",
        Scope(dialect=COMPAT, attempts=1, p_restart=1),
        GIVEN_UP | {P_LOST},
        14831,
        54745,
    ),
    Named(
        "router, compat, one leg after the other, P starts again",
        Scope(dialect=COMPAT, attempts=2, concurrent=False, p_restart=1),
        GIVEN_UP | RETRIED | {P_LOST} | resolved("PEER_RESTARTED"),
        39555,
        158444,
    ),
    Named(
        "router, compat, D starts again",
        Scope(dialect=COMPAT, attempts=1, d_restart=1),
        GIVEN_UP | {D_LOST},
        15390,
        57826,
    ),
    Named("router, compat pull", Scope(dialect=COMPAT, attempts=2, pulls=True, err=1), GIVEN_UP | RETRIED, 4087, 12559),
    Named(
        "router, compat, with clocks for two ticks",
        Scope(dialect=COMPAT, attempts=1, p_restart=1, horizon=2, abort=0),
        ANSWERED | {P_LOST},
        43296,
        122561,
    ),
    # Larger ones.
    Named(
        "router, both legs at once, two attempts",
        Scope(attempts=2, deadline=0, stall=0),
        EVERY_END | GIVEN_UP | RETRIED,
        193798,
        1050438,
        nightly=True,
    ),
    Named(
        "router, a prefill fails, and a frame is lost",
        Scope(attempts=2, prefill_abort=1, drop=1, abort=0, deadline=0, stall=0),
        RETRIED | {"taken back too late"},
        218850,
        949033,
        nightly=True,
    ),
    Named(
        "router, two attempts, P starts again",
        Scope(attempts=2, p_restart=1, abort=0, deadline=0, stall=0),
        RETRIED | {P_LOST},
        772943,
        4249557,
        nightly=True,
    ),
    Named(
        "router, two attempts, D starts again",
        Scope(attempts=2, concurrent=False, d_restart=1, deadline=0, stall=0),
        GIVEN_UP | RETRIED | {D_LOST},
        398680,
        1839231,
        nightly=True,
    ),
    Named(
        "router, two requests, P starts again",
        Scope(attempts=1, requests=2, concurrent=False, p_restart=1, abort=0, deadline=0, stall=0),
        ANSWERED | {P_LOST},
        95404,
        367562,
        nightly=True,
    ),
    Named(
        "router, two requests, both legs at once",
        Scope(attempts=1, requests=2, abort=0, deadline=0, stall=0),
        ANSWERED | {"taken back too late"},
        nightly=True,
    ),
    Named(
        "router, two requests, a client hangs up",
        Scope(attempts=1, requests=2, concurrent=False, deadline=0, stall=0),
        EVERY_END | GIVEN_UP,
        nightly=True,
    ),
    Named(
        "router, two to one rank",
        Scope(attempts=1, p_tp=2, concurrent=False, deadline=0, stall=0),
        EVERY_END | GIVEN_UP,
        nightly=True,
    ),
    Named(
        "router, compat, two attempts",
        Scope(dialect=COMPAT, attempts=2, prefill_abort=1),
        GIVEN_UP | RETRIED,
        nightly=True,
    ),
    Named(
        "router, compat, two attempts, P starts again",
        Scope(dialect=COMPAT, attempts=2, p_restart=1),
        GIVEN_UP | RETRIED | {P_LOST},
        nightly=True,
    ),
    Named(
        "router, compat, two attempts, D starts again",
        Scope(dialect=COMPAT, attempts=2, concurrent=False, d_restart=1),
        GIVEN_UP | RETRIED | {D_LOST},
        nightly=True,
    ),
    Named(
        "router, compat, with clocks",
        Scope(dialect=COMPAT, attempts=1, horizon=6),
        GIVEN_UP | resolved("DEADLINE"),
        nightly=True,
    ),
    Named(
        "router, compat, with clocks, P starts again",
        Scope(dialect=COMPAT, attempts=1, p_restart=1, horizon=6, abort=0),
        ANSWERED | {P_LOST},
        nightly=True,
    ),
    Named(
        "router, pull, with clocks",
        Scope(attempts=1, pulls=True, horizon=6),
        GIVEN_UP,
        nightly=True,
    ),
)

"""Named scopes with clocks, and the goals that each must reach: outcomes of comparisons of instants that no other
scope takes (benchmarks/check_instants.py), and clocks of which one runs faster than the other.

Untimed scopes have `now = 0` and no back-off. Whatever takes an instant's difference is never decided there.
"""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.scopes.named import ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import ENDLESS, Scope

HELD = frozenset({"admitted once blocks were free"})

TIMED = (
    Named(
        "pull, two requests, space for one, with clocks for one tick",
        Scope(pulls=True, requests=2, pool_blocks=2, horizon=1, concurrent=False),
        ENDS | HELD | resolved("CANCELLED"),
        56854,
        138052,
    ),
    Named(
        "compat, an unreachable peer, with clocks for one tick",
        Scope(dialect=VLLM_COMPAT, unreachable=1, horizon=1, abort=0),
        ENDS | resolved("UNREACHABLE"),
        700,
        1354,
    ),
    Named(
        "pull, two requests, D stands still between them",
        Scope(pulls=True, requests=2, horizon=1, drift=1, idle=True, concurrent=False, abort=0),
        ENDS | {"released after use"} | resolved("PEER_DEAD"),
        89819,
        251269,
    ),
    # One clock runs faster than the other.
    Named(
        "D's clock runs twice as fast, for two ticks of P",
        Scope(horizon=2, drift=1, abort=0),
        EVERY_END | resolved("DEADLINE", "PEER_DEAD", "STALLED"),
        34041,
        87154,
    ),
    Named(
        "P's clock runs twice as fast, for six ticks",
        Scope(horizon=3, drift=-1, abort=0),
        EVERY_END | resolved("EXPIRED", "PEER_DEAD", "STALLED"),
        53386,
        135990,
    ),
    Named(
        "pull, D's clock runs twice as fast, without limit",
        Scope(pulls=True, horizon=ENDLESS, drift=1),
        ENDS | resolved("DEADLINE", "PEER_DEAD", "STALE"),
        41112,
        113703,
    ),
    Named(
        "pull, P's clock runs twice as fast, without limit",
        Scope(pulls=True, horizon=ENDLESS, drift=-1, abort=0),
        ENDS | resolved("DEADLINE", "PEER_DEAD", "STALE"),
        33441,
        89847,
    ),
    # Larger ones.
    Named(
        "pull, two requests, a suspect peer, with clocks for one tick",
        Scope(pulls=True, requests=2, pool_blocks=4, horizon=1, concurrent=False),
        ENDS | resolved("CANCELLED"),
        300912,
        911388,
        nightly=True,
    ),
    Named(
        "D starts again, with clocks for five ticks",
        Scope(d_restart=1, horizon=5, abort=0),
        EVERY_END | resolved("DEADLINE", "EXPIRED", "PEER_DEAD", "STALLED"),
        713550,
        2255914,
        nightly=True,
    ),
    Named(
        "D's clock runs twice as fast, for two ticks of P, and an abort",
        Scope(horizon=2, drift=1),
        EVERY_END | resolved("CANCELLED", "DEADLINE", "PEER_DEAD", "STALLED"),
        172059,
        481016,
        nightly=True,
    ),
    Named(
        "D's clock runs twice as fast, without limit",
        Scope(horizon=ENDLESS, drift=1, abort=0),
        EVERY_END | resolved("DEADLINE", "EXPIRED", "PEER_DEAD", "STALLED"),
        272058,
        836185,
        nightly=True,
    ),
    Named(
        "P's clock runs twice as fast, without limit",
        Scope(horizon=ENDLESS, drift=-1, abort=0),
        EVERY_END | resolved("DEADLINE", "EXPIRED", "PEER_DEAD", "STALLED"),
        239421,
        745030,
        nightly=True,
    ),
)

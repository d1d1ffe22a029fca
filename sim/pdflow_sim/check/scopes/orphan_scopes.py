"""Named scopes in which P's rank processes outlive their scheduler, and the goals that each must reach to count.

D learns of P's new incarnation, whose answers prove nothing of the former one (F9, S8): an orphan posts the
WRITEs that it had accepted. Only D's fence keeps them from blocks that D has freed.
"""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.scopes.named import ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope

COMPAT = VLLM_COMPAT
OUTLIVED = frozenset({"an orphan posts", "an orphan is fenced"})

ORPHANS = (
    Named(
        "P starts again, its rank survives",
        Scope(p_restart=1, orphan=True, sync=1),
        EVERY_END | OUTLIVED | resolved("PEER_RESTARTED", "NO_REQUEST"),
        30770,
        95340,
    ),
    Named(
        "P starts again, its two ranks survive",
        Scope(p_tp=2, p_restart=1, orphan=True, abort=0, deadline=0, stall=0),
        ENDS | OUTLIVED | resolved("PEER_RESTARTED"),
        29406,
        146876,
    ),
    Named(
        "P starts again, its rank survives, two requests",
        Scope(p_restart=1, orphan=True, requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | OUTLIVED | resolved("PEER_RESTARTED"),
        32634,
        95196,
    ),
    Named(
        "compat, P starts again, its ranks survive",
        Scope(dialect=COMPAT, p_tp=2, p_restart=1, orphan=True),
        ENDS | OUTLIVED,
        5650,
        18398,
    ),
    Named(
        "both start again, P's rank survives",
        Scope(p_restart=1, d_restart=1, orphan=True, drop=1, dup=1, deadline=0, stall=0),
        EVERY_END | OUTLIVED,
        65981,
        296374,
        nightly=True,
    ),
    Named(
        "P starts again twice, its rank survives",
        Scope(p_restart=2, orphan=True, drop=1, sync=1, deadline=0, stall=0),
        EVERY_END | OUTLIVED | resolved("PEER_RESTARTED"),
        87545,
        288508,
        nightly=True,
    ),
    Named(
        "P starts again, its rank survives, CANCEL overtakes REG",
        Scope(p_restart=1, orphan=True, delay=1, cancel=1, sync=1, deadline=0, stall=0),
        EVERY_END | OUTLIVED | {"late REG refused"},
        191400,
        759520,
        nightly=True,
    ),
    Named(
        "two P engines, one starts again, its rank survives",
        Scope(p_engines=2, requests=2, p_restart=1, orphan=True, concurrent=False, abort=0, deadline=0, stall=0),
        ENDS | {"an orphan posts", "delivered after a crash elsewhere"},
        29395,
        109460,
        nightly=True,
    ),
    Named(
        "P starts again, its rank survives, one P rank to two D ranks, lagging",
        Scope(d_tp=2, p_restart=1, orphan=True, lagging=True, abort=0, deadline=0, stall=0),
        ENDS | {"an orphan posts"},
        170362,
        699809,
        nightly=True,
    ),
)

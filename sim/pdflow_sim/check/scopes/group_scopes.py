"""Named scopes with two KV cache groups, of which the second has a sliding window, and the goals that each must reach.

Which block holds which tokens decides nothing in the protocol, so each has as many states as with one group. What is
explored is that block tables reach every WRITE and READ as the engines made them (S4).
"""

from __future__ import annotations

from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, Scope

MOVED = frozenset({"moved without the tokens outside the window"})

GROUPS = (
    Named(
        "two KV cache groups, errors and broken connections",
        Scope(groups=2, drop=1, err=1, lose=1),
        EVERY_END | MOVED | resolved("IO"),
        12773,
        42421,
    ),
    Named(
        "two KV cache groups, half of the prompt is cached at D",
        Scope(groups=2, hit_tokens=BLOCK_TOKENS, err=1, drop=1),
        EVERY_END | resolved("IO"),
        3559,
        10543,
    ),
    Named(
        "two KV cache groups, two requests, one pool",
        Scope(groups=2, requests=2, pool=1, deadline=0, stall=0),
        EVERY_END | MOVED,
        27108,
        96624,
    ),
    Named(
        "pull, two KV cache groups",
        Scope(groups=2, pulls=True, drop=1, err=1),
        ENDS | MOVED | resolved("STALE"),
        134,
        196,
    ),
    Named(
        "two KV cache groups, two blocks of D for one of P",
        Scope(groups=2, d_block=8, err=1, drop=1),
        EVERY_END | MOVED,
        3559,
        10543,
    ),
    Named(
        "two KV cache groups, P engines share a pool",
        Scope(groups=2, p_engines=2, requests=3, pool_blocks=16, concurrent=False, clocks=False, abort=0),
        DELIVERED | MOVED | {"admitted once blocks were free"},
        34960,
        138634,
    ),
)

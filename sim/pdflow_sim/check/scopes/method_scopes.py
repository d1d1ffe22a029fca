"""Named scopes of the transfer methods (pdflow/methods): a few of each, and the goals that they must reach to count.

They are derived from a method's properties, so that a new method has scopes as soon as it is in the catalogue. The
scopes of a method: every fault with one request; several ranks, where nothing may need a timer; engines that start
again; two requests, with room for one in each memory that may be full, and where that is on both sides, no timer that
would help; a WRITE that fails or is aborted, and a request behind it; engines that report late, copies that take time,
and messages within an engine that do. Where P reports that something has landed before it has, and where two attempts
share a prompt that is being computed, only methods to which that matters have a scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Grain, MemoryKind, Method
from pdflow.protocol.dialect import STRICT
from pdflow_sim.check.scopes.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.cluster import BOUNDED

STOPS = frozenset({"stopped between two pieces", "stopped before the first piece"})
EARLY = frozenset({"posted while being computed", "aborted while being computed"})
QUIET: dict[str, Any] = {"abort": 0, "deadline": 0, "stall": 0}
COUNTS: dict[str, tuple[int, int]] = {
    "nixl-push, one request": (4291, 12905),
    "nixl-push, two ranks": (2026, 5842),
    "nixl-push, both start again": (415, 1138),
    "nixl-push, two requests": (4856, 15200),
    "nixl-push, progressive, one request": (14920, 49826),
    "nixl-push, progressive, two ranks": (8566, 27298),
    "nixl-push, progressive, both start again": (885, 2561),
    "nixl-push, progressive, two requests": (10417, 36848),
    "nixl-push, progressive, slow engines": (21151, 76977),
    "nixl-push, progressive, two requests, slow copies": (19358, 71710),
    "nixl-push, progressive, WRITE completes before it lands": (14874, 50943),
    "nixl-push, progressive, two attempts at one prompt": (6667, 18481),
    "nixl-push, progressive, drop, SYNC and repeated CANCEL": (191676, 741278),
    "nixl-pull, one request": (152, 241),
    "nixl-pull, two ranks": (102, 191),
    "nixl-pull, both start again": (553, 1225),
    "nixl-pull, two requests": (1020, 2080),
    "cpu-staged, one request": (29551, 111890),
    "cpu-staged, two ranks": (9930, 32032),
    "cpu-staged, both start again": (1079, 3280),
    "cpu-staged, two requests": (11575, 42970),
    "cpu-staged, two requests and no timer": (1917, 6288),
    "cpu-staged, no timer, a WRITE fails": (26051, 82062),
    "cpu-staged, no timer, a request is aborted": (167231, 663918),
    "cpu-staged, slow engines": (50673, 210263),
    "cpu-staged, two requests, slow copies": (29820, 116904),
    "cpu-staged, WRITE completes before it lands": (33464, 128476),
    "cpu-staged, two attempts at one prompt": (7405, 21945),
    "cpu-staged, drop, SYNC and repeated CANCEL": (387769, 1680539),
    "p2p-nccl-put, one request": (16542, 60939),
    "p2p-nccl-put, two ranks": (8143, 26646),
    "p2p-nccl-put, both start again": (589, 1745),
    "p2p-nccl-put, two requests": (6536, 20548),
    "p2p-nccl-put, no timer, a WRITE fails": (17834, 51704),
    "p2p-nccl-put, no timer, a request is aborted": (110968, 429448),
    "p2p-nccl-put, slow engines": (14354, 55454),
    "p2p-nccl-put, two requests, slow copies": (11679, 39732),
    "p2p-nccl-put, WRITE completes before it lands": (8301, 28541),
    "p2p-nccl-put-async, one request": (29551, 111890),
    "p2p-nccl-put-async, two ranks": (37680, 138904),
    "p2p-nccl-put-async, both start again": (1079, 3280),
    "p2p-nccl-put-async, two requests": (13632, 51488),
    "p2p-nccl-put-async, slow engines": (50523, 209828),
    "p2p-nccl-put-async, two requests, slow copies": (33653, 135578),
    "p2p-nccl-put-async, WRITE completes before it lands": (33464, 128476),
    "p2p-nccl-put-async, two attempts at one prompt": (5629, 16661),
    "p2p-nccl-put-async, drop, SYNC and repeated CANCEL": (387769, 1680539),
    "p2p-nccl-get, one request": (308, 566),
    "p2p-nccl-get, two ranks": (687, 1509),
    "p2p-nccl-get, both start again": (1211, 2769),
    "p2p-nccl-get, two requests": (852, 1474),
    "p2p-nccl-get, slow engines": (676, 1538),
    "p2p-nccl-get, two requests, slow copies": (1067, 1900),
    "kv-store, one request": (248, 412),
    "kv-store, two ranks": (343, 725),
    "kv-store, both start again": (987, 2173),
    "kv-store, two requests": (1020, 2080),
    "kv-store, one request, put into the store": (4291, 12905),
    "mooncake-v0, one request": (152, 241),
    "mooncake-v0, two ranks": (102, 191),
    "mooncake-v0, both start again": (553, 1225),
    "mooncake-v0, two requests": (668, 1146),
    "mooncake-v0, slow engines": (238, 422),
    "mooncake-v0, two requests, slow copies": (843, 1488),
    "mooncake-v1, one request": (4291, 12905),
    "mooncake-v1, two ranks": (2026, 5842),
    "mooncake-v1, both start again": (415, 1138),
    "mooncake-v1, two requests": (4856, 15200),
    "mooncake-v1, progressive, one request": (14920, 49826),
    "mooncake-v1, progressive, two ranks": (8566, 27298),
    "mooncake-v1, progressive, both start again": (885, 2561),
    "mooncake-v1, progressive, two requests": (10417, 36848),
    "mooncake-v1, progressive, slow engines": (21151, 76977),
    "mooncake-v1, progressive, two requests, slow copies": (19358, 71710),
    "mooncake-v1, progressive, WRITE completes before it lands": (14874, 50943),
    "mooncake-v1, progressive, two attempts at one prompt": (6667, 18481),
    "mooncake-v1, progressive, drop, SYNC and repeated CANCEL": (191676, 741278),
}
"""States and transitions of each scope. A scope that is not here is searched all the same."""


def repeats_another(method: Method, name: str) -> bool:
    """True if an earlier method has a scope that differs from this one in nothing but names. Those are nightly."""
    if method.name == "mooncake-v1":
        return "one request" not in name  # All that it shares with nixl-push: everything but words and limits.
    # Where no memory is ever full, it does not matter at which side KV is staged, as with cpu-staged.
    return name in ("p2p-nccl-put-async, one request", "p2p-nccl-put-async, WRITE completes before it lands")


def scopes_of(method: Method, progressive: bool = False) -> Iterator[Named]:
    name, pulls = method.name + ", progressive" * progressive, method.pulls
    early = method.pipeline_policy(STRICT.name).early
    evicts = method.p_memory is MemoryKind.STORE or method.stores
    faults: dict[str, Any] = {"prefill_abort": int(early), "withdraw": int(evicts)}
    of: dict[str, Any] = {"method": method.name, "progressive": progressive, "pulls": pulls}
    goals = EARLY if early else frozenset()
    goals |= STOPS if method.in_pieces and not pulls else frozenset()
    ends = ENDS | resolved("STALE") if pulls else EVERY_END
    own = frozenset({"withdrawn under a READ"} if evicts else {"lease ended while being computed"} if early else ())
    yield _named(f"{name}, one request", Scope(**of, **faults, drop=1, err=1), ends | goals | own | resolved("IO"))

    # P2P NCCL has as many ranks on both sides.
    ranks = Scope(**of, **faults, p_tp=1 + (method.grain is Grain.LAYER), d_tp=2, err=1, clocks=False, abort=0)
    yield _named(f"{name}, two ranks", ranks, DELIVERED | EARLY if early else DELIVERED)

    again = Scope(**of, **faults, p_restart=1, d_restart=1, sync=int(pulls), **QUIET)
    yield _named(f"{name}, both start again", again, DELIVERED | resolved("PEER_RESTARTED"))

    full: dict[str, Any] = {"p_pool": int(method.p_memory in BOUNDED), "pool": 1}
    waits = frozenset(
        f"waits for memory at {at}" for at in "PD" if (full["p_pool"] if at == "P" else method.staged_at_d)
    )
    yield _named(f"{name}, two requests", Scope(**of, **full, requests=2, **QUIET), ENDS | waits)
    if len(waits) > 1:
        untimed = Scope(**of, **full, requests=2, clocks=False, abort=0)
        yield _named(f"{name}, two requests and no timer", untimed, DELIVERED | waits)

    waiting = method.pipeline_policy(STRICT.name).prefill_waits
    if method.staged_at_p and not pulls and (full["p_pool"] or waiting):
        # The next request waits for what a prompt has that P keeps for the short lease of a RELEASE.
        behind: dict[str, Any] = {"p_pool": full["p_pool"], "requests": 2, "clocks": False, "deadline": 0, "stall": 0}
        failing, aborted = Scope(**of, **behind, err=1, abort=0), Scope(**of, **behind, abort=1)
        yield _named(f"{name}, no timer, a WRITE fails", failing, DELIVERED | resolved("IO"))
        yield _named(f"{name}, no timer, a request is aborted", aborted, DELIVERED | STOPS, nightly=True)

    if early or method.staged_at_p:
        decodes: dict[str, Any] = {"decodes": True, "preempt": 1} if method.staged_at_d else {}
        own |= {"aborted after a preemption"} if decodes else frozenset()
        slow = Scope(**of, **faults, **decodes, late=True, lagging=True, deadline=0, stall=0)
        yield _named(f"{name}, slow engines", slow, DELIVERED | goals | own)
        copied = Scope(**of, **full, requests=2, late=True, **QUIET)
        yield _named(f"{name}, two requests, slow copies", copied, DELIVERED | waits)

    if method.in_pieces and not pulls:
        local = Scope(**of, **faults, done_is_remote=False, lagging=True, err=1, clocks=False)
        yield _named(f"{name}, WRITE completes before it lands", local, DELIVERED | goals | resolved("IO"))
    if early:
        shared = Scope(**of, **faults, requests=2, same_product=True, clocks=False, abort=0)
        yield _named(f"{name}, two attempts at one prompt", shared, DELIVERED | goals)
        repeated = Scope(**of, **faults, drop=1, sync=1, cancel=1)
        yield _named(f"{name}, drop, SYNC and repeated CANCEL", repeated, EVERY_END | goals, nightly=True)
    if method.stores:
        put = Scope(method=name, pulls=False, drop=1, err=1)
        yield _named(f"{name}, one request, put into the store", put, EVERY_END | resolved("IO"))


def _named(name: str, scope: Scope, goals: frozenset[str], nightly: bool = False) -> Named:
    nightly = nightly or repeats_another(METHODS[scope.method], name)
    return Named(name, scope, goals, *COUNTS.get(name, (0, 0)), nightly)


def _all() -> Iterator[Named]:
    for method in METHODS.values():
        yield from scopes_of(method)
        adapted = method.adapted(True, False)
        if adapted != method:
            yield from scopes_of(adapted, True)


BY_METHOD = tuple(_all())

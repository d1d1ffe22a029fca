"""Named scopes of the transfer methods (pdflow/methods): a few of each, and what they must reach to count.

They are made from what a method is, so that one more has scopes as soon as it is in the catalogue. What is asked for:
everything that may go wrong with one request; several ranks, where nothing may need a timer; engines that start again;
two requests, with room for one in each memory that may be full, and where that is on both sides, no timer that would
help. Where P says that something has landed before it has,
and where two attempts share a prompt that is being computed, only methods to which that matters have a scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Grain, Memory, Method
from pdflow.protocol.dialect import STRICT
from sim.check.cluster import BOUNDED
from sim.check.named import DELIVERED, ENDS, EVERY_END, Named, resolved
from sim.check.scope import Scope

STOPS = frozenset({"stopped between two pieces", "stopped before the first piece"})
EARLY = frozenset({"posted while being computed", "given up while being computed"})
QUIET: dict[str, Any] = {"abort": 0, "deadline": 0, "stall": 0}
COUNTS: dict[str, tuple[int, int]] = {
    "nixl-push, one request": (4291, 12905),
    "nixl-push, two ranks": (2131, 6254),
    "nixl-push, both start again": (415, 1138),
    "nixl-push, two requests": (4856, 15200),
    "nixl-push, progressive, one request": (15273, 50967),
    "nixl-push, progressive, two ranks": (9419, 30194),
    "nixl-push, progressive, both start again": (911, 2615),
    "nixl-push, progressive, two requests": (10417, 36848),
    "nixl-push, progressive, done before it has landed": (15493, 53041),
    "nixl-push, progressive, two attempts at one prompt": (7367, 20947),
    "nixl-push, progressive, drop, SYNC and repeated CANCEL": (202333, 783769),
    "nixl-pull, one request": (152, 241),
    "nixl-pull, two ranks": (102, 191),
    "nixl-pull, both start again": (553, 1225),
    "nixl-pull, two requests": (1020, 2080),
    "cpu-staged, one request": (15291, 51022),
    "cpu-staged, two ranks": (9479, 30400),
    "cpu-staged, both start again": (939, 2729),
    "cpu-staged, two requests": (8807, 31218),
    "cpu-staged, two requests and no timer": (1401, 4310),
    "cpu-staged, done before it has landed": (15578, 53296),
    "cpu-staged, two attempts at one prompt": (6217, 17961),
    "cpu-staged, drop, SYNC and repeated CANCEL": (202527, 784440),
    "p2p-nccl-put, one request": (8708, 28211),
    "p2p-nccl-put, two ranks": (6374, 19713),
    "p2p-nccl-put, both start again": (505, 1449),
    "p2p-nccl-put, two requests": (5902, 19078),
    "p2p-nccl-put, done before it has landed": (4482, 13338),
    "p2p-nccl-put-async, one request": (15291, 51022),
    "p2p-nccl-put-async, two ranks": (26508, 91476),
    "p2p-nccl-put-async, both start again": (939, 2729),
    "p2p-nccl-put-async, two requests": (10047, 36278),
    "p2p-nccl-put-async, done before it has landed": (15578, 53296),
    "p2p-nccl-put-async, two attempts at one prompt": (5973, 17377),
    "p2p-nccl-put-async, drop, SYNC and repeated CANCEL": (202527, 784440),
    "p2p-nccl-get, one request": (308, 566),
    "p2p-nccl-get, two ranks": (687, 1509),
    "p2p-nccl-get, both start again": (1211, 2769),
    "p2p-nccl-get, two requests": (920, 1600),
    "kv-store, one request": (248, 412),
    "kv-store, two ranks": (343, 725),
    "kv-store, both start again": (987, 2173),
    "kv-store, two requests": (1020, 2080),
    "kv-store, one request is put": (4291, 12905),
    "mooncake-v0, one request": (152, 241),
    "mooncake-v0, two ranks": (102, 191),
    "mooncake-v0, both start again": (553, 1225),
    "mooncake-v0, two requests": (708, 1216),
    "mooncake-v1, one request": (4291, 12905),
    "mooncake-v1, two ranks": (2131, 6254),
    "mooncake-v1, both start again": (415, 1138),
    "mooncake-v1, two requests": (4856, 15200),
    "mooncake-v1, progressive, one request": (15273, 50967),
    "mooncake-v1, progressive, two ranks": (9419, 30194),
    "mooncake-v1, progressive, both start again": (911, 2615),
    "mooncake-v1, progressive, two requests": (10417, 36848),
    "mooncake-v1, progressive, done before it has landed": (15493, 53041),
    "mooncake-v1, progressive, two attempts at one prompt": (7367, 20947),
    "mooncake-v1, progressive, drop, SYNC and repeated CANCEL": (202333, 783769),
}
"""States and transitions of each. One that is not here is searched all the same."""


def scopes_of(method: Method, progressive: bool = False) -> Iterator[Named]:
    name, pulls = method.name + ", progressive" * progressive, method.pulls
    early = method.conduct(STRICT.name).early
    evicts = method.p_memory is Memory.STORE or method.stores
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
    waits = frozenset(f"waits for room at {at}" for at in "PD" if (full["p_pool"] if at == "P" else method.staged_at_d))
    yield _named(f"{name}, two requests", Scope(**of, **full, requests=2, **QUIET), ENDS | waits)
    if len(waits) > 1:
        untimed = Scope(**of, **full, requests=2, clocks=False, abort=0)
        yield _named(f"{name}, two requests and no timer", untimed, DELIVERED | waits)

    if method.in_pieces and not pulls:
        local = Scope(**of, **faults, done_is_remote=False, lagging=True, err=1, clocks=False)
        yield _named(f"{name}, done before it has landed", local, DELIVERED | goals | resolved("IO"))
    if early:
        shared = Scope(**of, **faults, requests=2, same_product=True, clocks=False, abort=0)
        yield _named(f"{name}, two attempts at one prompt", shared, DELIVERED | goals)
        unheard = Scope(**of, **faults, drop=1, sync=1, cancel=1)
        yield _named(f"{name}, drop, SYNC and repeated CANCEL", unheard, EVERY_END | goals, nightly=True)
    if method.stores:
        put = Scope(method=name, pulls=False, drop=1, err=1)
        yield _named(f"{name}, one request is put", put, EVERY_END | resolved("IO"))


def _named(name: str, scope: Scope, goals: frozenset[str], nightly: bool = False) -> Named:
    return Named(name, scope, goals, *COUNTS.get(name, (0, 0)), nightly)


def _all() -> Iterator[Named]:
    for method in METHODS.values():
        yield from scopes_of(method)
        adapted = method.adapted(True, False)
        if adapted != method:
            yield from scopes_of(adapted, True)


BY_METHOD = tuple(_all())

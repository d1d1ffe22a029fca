"""Random clusters beyond the plain ones of `swarm.py`: clocks, the router's endpoint, several engines, transfer methods
and all else that a scope can have.

Each cluster has one leading setting, in turn, and takes on as many others as were drawn and go together with what it
has already: the checks of a scope decide that, and EXCLUDED says which combinations a dialect does not tolerate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Grain, MemoryKind, Method
from pdflow.protocol.dialect import Dialect
from pdflow.workload.rng import Rng, Stream
from pdflow_sim.check.routed.cluster import RoutedCluster
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, ENDLESS, FaultKind, Scope
from pdflow_sim.check.state.cluster import BOUNDED, ScopeCluster

Fields: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[Stream, Scope], Fields]
"""Draws the fields of a setting for a scope that has others already."""
CLUSTERS = 128
"""Wide clusters of one era."""
OTHERS = 3
"""One of so many settings is tried besides the leading one."""
HORIZONS = (ENDLESS, ENDLESS, 8, 3)
SKEWS = (1, 1, 2)
DRIFTS = (0, 0, 0, 1, -1)
MOST_RANKS = 8
"""The most ranks of all engines together."""
QUIET: Fields = dict.fromkeys((fault.name.lower() for fault in FaultKind), 0)


def _clocks(rng: Stream, scope: Scope) -> Fields:
    fields = {"clocks": True, "horizon": _one_of(rng, HORIZONS), "skew": _one_of(rng, SKEWS)}
    if scope.dialect.control_frames:  # vllm-compat rests on clocks of one rate.
        fields |= {"drift": _one_of(rng, DRIFTS), "idle": rng.below(4) == 0}
    return fields


def _router(rng: Stream, scope: Scope) -> Fields:
    fields = {"attempts": 1 + rng.below(2), "streams": rng.below(2) == 0, "same_product": False, "same_base": False}
    return fields | ({"requests": 1} if scope.p_engines + scope.d_engines > 2 else {"requests": min(scope.requests, 2)})


def _p_engines(rng: Stream, scope: Scope) -> Fields:
    return _several(rng, scope, "p_engines") | {"pool_blocks": _one_of(rng, (ENDLESS, ENDLESS, 8))}


def _d_engines(rng: Stream, scope: Scope) -> Fields:
    return _several(rng, scope, "d_engines")


def _several(rng: Stream, scope: Scope, field: str) -> Fields:
    if scope.attempts:
        return {field: 2, "requests": 1, "attempts": min(scope.attempts, 2)}
    return {field: 2, "requests": 3 if scope.p_engines + scope.d_engines > 2 else 2 + rng.below(2)}


def _orphan(rng: Stream, scope: Scope) -> Fields:
    return {"orphan": True}


def _down(rng: Stream, scope: Scope) -> Fields:
    return {"down": True}


def _ranks(rng: Stream, scope: Scope) -> Fields:
    return {"p_tp": 2, "d_tp": 2, "requests": min(scope.requests, 2)}


def _groups(rng: Stream, scope: Scope) -> Fields:
    return {"groups": 2}


def _small_blocks(rng: Stream, scope: Scope) -> Fields:
    return {"d_block": _one_of(rng, (BLOCK_TOKENS // 2, BLOCK_TOKENS * 2)), "hit_tokens": 0}


def _decodes(rng: Stream, scope: Scope) -> Fields:
    return {"decodes": True}


def _late(rng: Stream, scope: Scope) -> Fields:
    return {"late": True}


def _method(rng: Stream, scope: Scope) -> Fields:
    return _of_method(rng, scope, _one_of(rng, methods_of(scope.dialect)))


def methods_of(dialect: Dialect) -> tuple[Method, ...]:
    """Return the methods that have this dialect."""
    return tuple(each for each in METHODS.values() if dialect.name in each.dialects)


def _of_method(rng: Stream, scope: Scope, method: Method) -> Fields:
    """Draw the fields of a method. It decides the direction, and there are as many ranks on both sides where its pieces
    are layers (method_scopes.py)."""
    pulls = method.pulls and not (method.stores and rng.below(2) == 0)
    early = scope.dialect.control_frames and method.adapted(True, False).pipeline_policy(scope.dialect.name).early
    fields: Fields = {"method": method.name, "pulls": pulls, "chunks": 1, "progressive": early and rng.below(2) == 0}
    if pulls and not scope.dialect.control_frames:
        fields["same_product"] = False  # Not tolerated either (swarm.UNBORNE).
    full = method.p_memory in BOUNDED and (scope.clocks or not pulls)
    fields["p_pool"] = rng.below(2) if full else 0
    if method.staged_at_d:
        fields["hit_tokens"] = 0
    if method.grain is Grain.LAYER:
        fields["p_tp"] = scope.d_tp
    return fields


SETTINGS: dict[str, Draw] = {
    "clocks": _clocks,
    "router": _router,
    "two P engines": _p_engines,
    "two D engines": _d_engines,
    "method": _method,
    "orphan": _orphan,
    "down": _down,
    "2x2 ranks": _ranks,
    "groups": _groups,
    "unequal blocks": _small_blocks,
    "decodes": _decodes,
    "late": _late,
}
"""The settings by name."""
LEADS = (*SETTINGS, "method", "clocks", "router")
"""The leading settings of clusters, in turn; those of which there are the most kinds lead twice."""


def settings_of(scope: Scope) -> frozenset[str]:
    """Return the settings that a scope has, by name."""
    found = {
        "clocks": scope.horizon > 0,
        "router": scope.attempts > 0,
        "two P engines": scope.p_engines > 1,
        "two D engines": scope.d_engines > 1,
        "method": scope.method != "",
        "orphan": scope.orphan,
        "down": scope.down,
        "2x2 ranks": scope.p_tp == scope.d_tp == 2,
        "groups": scope.groups > 1,
        "unequal blocks": scope.d_block != BLOCK_TOKENS,
        "decodes": scope.decodes,
        "late": scope.late,
    }
    return frozenset(name for name, has in found.items() if has)


def goes_together(scope: Scope) -> bool:
    """True if a cluster of this scope exists and its dialect claims to tolerate everything that may happen there."""
    if any(excludes(scope) for excludes in EXCLUDED):
        return False
    try:
        RoutedCluster(scope) if scope.attempts else ScopeCluster(scope)
    except ValueError:
        return False
    return True


def _compat_pull_by_the_clock(scope: Scope) -> bool:
    """The leases of a vllm-compat pull would have to be ten ticks long (docs/check.md)."""
    return scope.horizon > 0 and scope.pulls and not scope.dialect.control_frames


def _compat_layout(scope: Scope) -> bool:
    """vllm-compat refuses every request between engines with different block sizes."""
    return scope.d_block != BLOCK_TOKENS and not scope.dialect.control_frames


def _untimed_clocks(scope: Scope) -> bool:
    """Where nothing takes as long as a timer, no clock is needed."""
    return scope.horizon > 0 and not scope.clocks


def _compat_pull_cancelled(scope: Scope) -> bool:
    """With `late`, prefill legs are cancelled, and a decode leg without its prompt is what a vllm-compat pull does not
    tolerate (swarm.UNBORNE). The router sends none."""
    return scope.late and scope.pulls and not scope.dialect.control_frames and not scope.attempts


def _compat_cancelled_untimed(scope: Scope) -> bool:
    """The router cancels the prefill leg of a client that disconnects, and with `late` anything may: vllm-compat has no
    message for that, so D needs a timer."""
    return (scope.attempts > 0 or scope.late) and not scope.clocks and not scope.dialect.control_frames


def _compat_progressive(scope: Scope) -> bool:
    """Scenarios allow `progressive` only with control frames."""
    return scope.progressive and not scope.dialect.control_frames


def _orphaned_lanes(scope: Scope) -> bool:
    """Only living ranks have lanes (pieces.py)."""
    return scope.orphan and scope.method != ""


def _lanes_of_unequal_ranks(scope: Scope) -> bool:
    """Methods that move layers have as many ranks on both sides."""
    return scope.method != "" and METHODS[scope.method].grain is Grain.LAYER and scope.p_tp != scope.d_tp


def _full_memory_of_a_pull_untimed(scope: Scope) -> bool:
    """Where D reads, P's memory evicts a prompt for another one, or keeps a released prompt for the lease that RELEASE
    leaves it. With a memory that may be full, other requests fail or wait for that, although nothing is lost."""
    return scope.p_pool > 0 and scope.pulls and not scope.clocks


def _too_large(scope: Scope) -> bool:
    return scope.p_engines * scope.p_tp + scope.d_engines * scope.d_tp > MOST_RANKS


EXCLUDED = (
    _compat_pull_by_the_clock,
    _compat_layout,
    _compat_pull_cancelled,
    _compat_cancelled_untimed,
    _compat_progressive,
    _untimed_clocks,
    _orphaned_lanes,
    _lanes_of_unequal_ranks,
    _full_memory_of_a_pull_untimed,
    _too_large,
)
"""Combinations that the checks of a scope allow, and no cluster has."""


def evicts(method: Method) -> bool:
    """True if P's memory may evict a prompt."""
    return method.p_memory is MemoryKind.STORE or method.stores


@lru_cache(maxsize=256)
def wide_cluster(number: int, dialect: Dialect) -> Scope:
    """Return the wide cluster of this number, with every budget 0."""
    rng = Rng(number).stream("wide cluster")
    lead = LEADS[number % len(LEADS)]
    pulls = number // len(LEADS) % 3 == 0
    requests = _one_of(rng, (1, 1, 2, 2, 3))
    shared = rng.below(4) if requests > 1 else None
    bears = dialect.control_frames
    scope = Scope(
        dialect=dialect,
        pulls=pulls,
        p_tp=1 + (rng.below(4) == 0),
        d_tp=1 + (rng.below(4) == 0),
        requests=requests,
        same_product=shared == 0 and (bears or not pulls),
        same_base=shared == 1 and bears,
        pool=_one_of(rng, (0, 0, 1)) if requests > 1 else 0,
        hit_tokens=_one_of(rng, (0, 0, 0, 0, 0, BLOCK_TOKENS)),
        lagging=rng.below(3) == 0,
        concurrent=rng.below(4) > 0,
        chunks=_one_of(rng, (1, 1, 2)),
        done_is_remote=rng.below(4) > 0,
        clocks=rng.below(4) > 0,
        **QUIET,
    )
    tried = [(rng.u64(), name) for name in SETTINGS if name != lead and rng.below(OTHERS) == 0]
    for name in (lead, *(name for _, name in sorted(tried))):
        if name == lead == "method":
            # Methods lead in turn, so that each is there in every era.
            fields = _of_method(rng, scope, methods_of(dialect)[number // 3 % len(methods_of(dialect))])
        else:
            fields = SETTINGS[name](rng, scope)
        candidate = attrs.evolve(scope, **fields)
        if settings_of(candidate) >= settings_of(scope) and goes_together(candidate):
            scope = candidate
    return scope


def _one_of(rng: Stream, values: tuple[Any, ...]) -> Any:
    return values[rng.below(len(values))]

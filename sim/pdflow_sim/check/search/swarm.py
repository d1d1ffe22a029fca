"""The random settings of a run: its cluster, its budgets of faults, and its scheduler with what biases it.

The settings of every run differ (swarm testing, Groce et al., ISSTA 2012): each kind of fault is on or off, timers are
eager or slow, a node is starved or none. All of it is drawn from named streams of one seed. Runs of one block of seeds
share a cluster, so that they share its world's memory; budgets and manners are each run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.timers import TimerKind
from pdflow.workload.rng import Rng, Stream
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, ENDLESS, TOKENS, FaultKind, Scope
from pdflow_sim.check.search import wide
from pdflow_sim.check.search.promptness import SILENT
from pdflow_sim.check.search.wide import QUIET, evicts, wide_cluster

T = TypeVar("T")

RANKS = ((1, 1), (1, 2), (1, 1), (2, 1))
"""Pairs (ranks of P, ranks of D) that clusters have in turn."""
BLOCK = 100
"""Seeds in a row that share a cluster."""
CLUSTERS = 64
STRIDE = 37
"""Step between the clusters of neighbouring blocks of one kind. Clusters come in turn, so that few runs see them all,
and far apart, so that neighbours differ; odd, so that it has no divisor in common with the number of clusters."""
ERA = 200_000
"""Number of seeds whose blocks share CLUSTERS plain and wide.CLUSTERS wide clusters; the next seeds have others."""
SCHEDULERS = ("uniform", "partial order", "pct 2", "pct 3", "pct 5", "queue")
FAULT_RATES = (None, 0.02, 0.05, 0.15, 0.4)
TIMER_RATES = (None, 0.0, 0.01, 0.05, 0.2)
"""Probabilities that a timer fires before anything else happens; None: its firing is a move like any other."""
HASTY = (TimerKind.LEASE, TimerKind.REGISTRATION, TimerKind.JOIN, TimerKind.EXPECT, TimerKind.STALL, TimerKind.DEADLINE)
"""Kinds of timers that some runs fire as soon as they are armed, as if a lease lasted one tick."""
REPEATED = {
    FaultKind.DROP: 3,
    FaultKind.DELAY: 3,
    FaultKind.DUP: 3,
    FaultKind.ERR: 2,
    FaultKind.UNREACHABLE: 2,
    FaultKind.REFUSED: 2,
    FaultKind.CORRUPT: 2,
    FaultKind.LOSE: 2,
}
REPEATED |= {FaultKind.SYNC: 3, FaultKind.CANCEL: 3}
"""The most faults of each kind in one run; of any other kind, one for each request, and one restart."""
RESTARTS = (FaultKind.P_RESTART, FaultKind.D_RESTART)
UNDRAWN = (FaultKind.WITHDRAW, FaultKind.ROUTER_RESTART)
"""Faults of a memory that evicts, which few clusters have, and of a router, which no run draws."""
UNBORNE = (FaultKind.PREFILL_ABORT, FaultKind.P_RESTART)
"""Faults that a pull method without control frames does not claim to tolerate: a decode leg for a prompt that P no
longer has, which a READ cannot notice. Nor does it tolerate a second attempt at a prompt; and without control frames no
method tolerates two prompts under one base id (R39)."""
LONG, HORIZON = 0.5, 40
"""LONG: the share of runs that go on until no move is possible. HORIZON: the others' faults are over within so
many moves for each request, and they must settle."""


@attrs.frozen
class Hold:
    """A link or a node whose moves wait from one step to another, unless no other move is left."""

    of: int
    since: int
    until: int


@attrs.frozen(kw_only=True)
class Manner:
    """The scheduler of a run, and what biases its choices: rates of faults and timers, held links and nodes."""

    scheduler: str
    fault_rate: float | None = None
    timer_rate: float | None = None
    hasty: TimerKind | None = None
    links: tuple[Hold, ...] = ()
    """Swizzled links: held one after the other, released in another order."""
    nodes: tuple[Hold, ...] = ()
    """Starved nodes."""
    wire: Hold | None = None
    """A slow wire: one-sided operations wait, frames do not."""
    steps: int | None = None
    """Number of moves after which faults are over; None: when no move is possible."""


def quiet(scope: Scope) -> Scope:
    """Return a scope of the same cluster with every budget of faults 0."""
    return attrs.evolve(scope, **QUIET)


def cluster_of(seed: int, dialect: Dialect) -> Scope:
    """Return the cluster of this seed's block, with every budget 0."""
    return _of_block(seed // BLOCK, dialect)


def is_wide(seed: int) -> bool:
    """True if the cluster of this seed's block is a wide one: every second is."""
    return seed // BLOCK % 2 == 1


@lru_cache(maxsize=64)
def _of_block(block: int, dialect: Dialect) -> Scope:
    era, turn = block * BLOCK // ERA, block // 2 * STRIDE
    if is_wide(block * BLOCK):
        return wide_cluster(era * wide.CLUSTERS + turn % wide.CLUSTERS, dialect)
    return _cluster(era * CLUSTERS + turn % CLUSTERS, dialect)


@lru_cache(maxsize=256)
def _cluster(number: int, dialect: Dialect) -> Scope:
    """Return the cluster of this number. The most important settings go round by the number, so that few clusters cover
    their combinations; the others are drawn."""
    rng = Rng(number).stream("cluster")
    pulls = number % 3 == 0
    lagging = rng.below(3) == 0
    clocks = number // 3 % 4 > 0
    p_tp, d_tp = RANKS[number // 12 % len(RANKS)]
    requests = _one_of(rng, (1, 1, 2, 2, 2, 3))
    concurrent = rng.below(4) > 0
    shared = rng.below(4) if requests > 1 else None
    bears = dialect.control_frames
    if shared == 1 and not bears:
        # Only where each prompt is asked for when it is there can P tell them apart: see `_unborne`.
        concurrent = clocks = lagging = False
    return Scope(
        dialect=dialect,
        pulls=pulls,
        p_tp=p_tp,
        d_tp=d_tp,
        requests=requests,
        same_product=shared == 0 and (bears or not pulls),
        same_base=shared == 1,
        pool=_one_of(rng, (0, 0, 1)) if requests > 1 else 0,
        hit_tokens=_one_of(rng, (0, 0, 0, 0, 0, BLOCK_TOKENS, BLOCK_TOKENS, TOKENS)),
        lagging=lagging,
        concurrent=concurrent,
        chunks=_one_of(rng, (1, 1, 2, 3)),
        done_is_remote=rng.below(4) > 0,
        clocks=clocks,
        **QUIET,
    )


def budget_of(rng: Stream, cluster: Scope) -> tuple[int, ...]:
    """Draw the budgets of a run, by FaultKind: each kind of fault is on in half of the runs, a restart in a third.
    Without clocks, faults that only a clock could notice are off."""
    budget = []
    for fault, one_of, most, possible in _limits(cluster):
        if fault in UNDRAWN and not possible:
            budget.append(0)
            continue
        off = rng.below(one_of)
        amount = 1 if fault in RESTARTS else 1 + rng.below(most)
        budget.append(0 if off or not possible else amount)
    return tuple(budget)


@lru_cache(maxsize=64)
def _limits(cluster: Scope) -> tuple[tuple[FaultKind, int, int, bool], ...]:
    """Return by FaultKind: in one of how many runs it is on, the most faults of it in one run, and whether there are
    any."""
    unborne = (FaultKind.ROUTER_RESTART, *_unborne(cluster), *(() if cluster.clocks else SILENT))
    if not cluster.method or not evicts(METHODS[cluster.method]):
        unborne += (FaultKind.WITHDRAW,)
    return tuple(
        (fault, 3 if fault in RESTARTS else 2, REPEATED.get(fault, cluster.requests), fault not in unborne)
        for fault in FaultKind
    )


def _unborne(cluster: Scope) -> tuple[FaultKind, ...]:
    """Return the faults that this cluster's dialect does not claim to tolerate, and those that it does not have."""
    if cluster.dialect.control_frames:
        return ()
    given_up = (FaultKind.ABORT, FaultKind.PREFILL_ABORT) if cluster.same_base else ()
    return (FaultKind.CORRUPT, *given_up, *(UNBORNE if cluster.pulls else ()))


def with_budget(cluster: Scope, budget: Sequence[int]) -> Scope:
    """Return the scope of a run: a cluster with these budgets, by FaultKind."""
    budgets: dict[str, Any] = {fault.name.lower(): budget[fault] for fault in FaultKind}
    return attrs.evolve(cluster, **budgets)


def manner_of(rng: Stream, cluster: Scope, links: int, nodes: int) -> Manner:
    """Draw the manner of a run. `links` and `nodes` are how many the cluster has."""
    span = HORIZON * cluster.requests
    whim = rng.below(8)
    return Manner(
        scheduler=_one_of(rng, SCHEDULERS),
        fault_rate=_one_of(rng, FAULT_RATES),
        timer_rate=_one_of(rng, TIMER_RATES),
        hasty=_one_of(rng, HASTY) if whim == 0 else None,
        links=_swizzled(rng, links, span) if whim in (1, 2) else (),
        nodes=(_hold(rng, nodes, span),) if whim in (3, 4) else (),
        wire=_hold(rng, 1, span) if whim == 5 else None,
        steps=None if rng.uniform() < LONG and cluster.horizon < ENDLESS else 1 + rng.below(span),
    )


def _one_of(rng: Stream, values: Sequence[T]) -> T:
    return values[rng.below(len(values))]


def _swizzled(rng: Stream, links: int, span: int) -> tuple[Hold, ...]:
    """Draw holds of about half of the links, each from a step of its own in the first half of a run to one in the
    second."""
    half = max(1, span // 2)
    return tuple(Hold(i, rng.below(half), half + rng.below(half)) for i in range(links) if rng.below(2))


def _hold(rng: Stream, nodes: int, span: int) -> Hold:
    since = rng.below(span)
    return Hold(rng.below(nodes), since, since + 1 + rng.below(span))

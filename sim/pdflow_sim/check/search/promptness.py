"""Promptness: in a scope without clocks, where nothing takes as long as any timer, nothing may need one.

Timers hide mistakes: if a peer forgets a message, some deadline repairs it in the end. So here no timer fires, and in
every state in which nothing more happens, every request must have its outcome (L1), D's blocks must be free (L3), P may
keep no unwanted prompt for longer than RELEASE leaves it (L2), and no request may have failed whose client did not give
up and whose peers could be reached (L1: its outcome is the delivery).

Not judged: faults that only a clock can notice (a lost frame, a dead engine); where a dialect has no message for a
failure, requests that wait for one; a second attempt at a prompt that the first has taken; ambiguities of a base id;
the lease of a prompt whose decode leg the router never dispatched, since P never learns of it; that of a prompt whose
WRITE ended badly although it had landed, which D has and P takes for lost; and requests that wait for what a prompt has
that has been released, until its short lease ends: P's staging memory, or P's engine (p2p-nccl-put).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pdflow.protocol.values import NEVER
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import TOKENS, FaultKind
from pdflow_sim.check.search.rest import check_rest
from pdflow_sim.check.state.shadow_state import Broken, PromptStage, RequestStage, ShadowState
from pdflow_sim.check.state.space import State

UNASKED = frozenset(
    {
        "abort",
        "cancel prefill",
        "preempt",
        "disconnect",
        "lose",
        "restart",
        "outlive",
        "kill",
        "kill rank",
        "crash router",
    }
)
"""Moves that may always happen, which nothing waits for."""
LOSSES = (FaultKind.DROP, FaultKind.LOSE, FaultKind.CORRUPT)
SILENT = (*LOSSES, FaultKind.P_RESTART, FaultKind.D_RESTART)
"""Faults that only a clock can notice. Where an engine is gone, requests that it serves are not judged; all others are
(L6)."""
UNREACHED = (FaultKind.UNREACHABLE, FaultKind.REFUSED)
REPORTED_FAULTS = (FaultKind.ERR, *UNREACHED, FaultKind.PREFILL_ABORT, FaultKind.WITHDRAW)
"""Faults that may rightly end a request that nobody gave up, and that are reported to the peer that waits, where the
dialect has a message for it."""


def prompt(world: Transitions, states: Iterable[State]) -> None:
    """Check every state at rest. Raises Broken("L1", "L2" or "L3", ...), whose `state` is the first in which something
    is amiss."""
    for state in states:
        if all(move[0] in UNASKED for move in world.moves(state)):
            found = amiss(world, state, world.space.scope.budget)
            if found is not None:
                found.state = state
                raise found
            check_rest(world, state)


def amiss(world: Transitions, state: State, had: tuple[int, ...]) -> Broken | None:
    """Return the violation of a state at rest: something has not ended, or not well, although nothing more will happen.
    None if there is none. `had`: the budgets before the first move."""
    strict = world.space.scope.dialect.control_frames
    shadow, cluster = world.space.shadow_of(state), world.space.cluster
    left = world.space.left(state)
    spent = {fault for fault in FaultKind if left[fault] != had[fault]}
    if spent.intersection(LOSSES) or (spent.intersection(REPORTED_FAULTS) and not strict):
        return None
    if (world.space.scope.same_product or world.space.scope.same_base) and not strict:
        return None
    failed, waiting = 0, set()
    dead = {engine for engine, restarts in zip(cluster.engines, shadow.restarts, strict=True) if restarts}
    for i, (request, stage) in enumerate(zip(cluster.requests, shadow.stages, strict=True)):
        if dead.intersection(cluster.ends_of(i)):
            continue
        if stage == RequestStage.RESOLVED:
            return Broken("L3", f"the blocks of {request} are freed only by a timer")
        if stage == world.space.over[0] or _taken(world, shadow, i):
            continue
        if stage not in world.space.over:
            if not _waits_for_a_short_lease(world, state, i, spent):
                return Broken("L1", f"{request} is {RequestStage(stage).name} until a timer fires")
            waiting.add(i)
        failed += stage in (RequestStage.FREED, RequestStage.LEFT)
    if not dead and (unanswered := world.space.unanswered(state)):
        return Broken("L1", f"{', '.join(unanswered)} until a timer fires")
    given_up = had[FaultKind.ABORT] - left[FaultKind.ABORT] + world.space.revoked_attempts(state)
    if given_up and world.space.scope.late and world.space.scope.same_product:
        given_up = len(cluster.requests)  # A prefill leg that is cancelled ends every attempt at its prompt.
    if not spent.intersection(REPORTED_FAULTS) and failed > given_up:
        return Broken("L1", "a request has failed that no client or router aborted, although nothing was lost")
    if spent.intersection(UNREACHED):
        return None
    limit = world.space.cluster.timers.release_lease_ns
    if FaultKind.DELAY not in spent and (strict or world.space.scope.pulls or world.space.scope.hit_tokens == TOKENS):
        for i, (xid, product) in enumerate(zip(cluster.xids, shadow.products, strict=True)):
            asked = [
                j
                for j, stage in enumerate(shadow.stages)
                if cluster.product_of[j] == i and stage != RequestStage.UNREGISTERED
            ]
            if not asked or any(j in waiting or dead.intersection(cluster.ends_of(j)) for j in asked):
                continue
            if _landed_all_the_same(world, state, xid, spent):
                continue
            if product == PromptStage.HELD and _longest_lease(world, state, xid) > limit:
                return Broken("L2", f"no request needs {xid} any more, but P holds it for a full lease")
    return None


def _taken(world: Transitions, shadow: ShadowState, i: int) -> bool:
    """True if another attempt has been sent this one's prompt, which ends this one, wanted or not."""
    products = world.space.cluster.product_of
    return any(landed and j != i and products[j] == products[i] for j, landed in enumerate(shadow.landed))


def _waits_for_a_short_lease(world: Transitions, state: State, i: int, spent: set[FaultKind]) -> bool:
    """True if a request waits for what prompts have at P that P holds no longer than RELEASE leaves them. There is no
    RELEASE of a prompt that D has, though its WRITE ended badly, and none reaches a rank that has refused D."""
    cluster, product = world.space.cluster, world.space.cluster.product_of[i]
    role = world.space.body(state, cluster.roles[cluster.p_of[product].engine])
    blocking: Collection[str] = ()
    if world.space.shadow_of(state).products[product] == PromptStage.QUEUED:
        blocking = getattr(role, "awaited", ())
    elif (staging := getattr(role, "staging", None)) is not None and cluster.xids[product] in staging.waiting:
        blocking = [name for name, _ in staging.held.values()]
    leases = [
        0 if _landed_all_the_same(world, state, xid, spent) else _longest_lease(world, state, xid) for xid in blocking
    ]
    longest = max(leases, default=NEVER)
    return longest <= cluster.timers.release_lease_ns or (longest < NEVER and not spent.isdisjoint(UNREACHED))


def _landed_all_the_same(world: Transitions, state: State, xid: str, spent: set[FaultKind]) -> bool:
    """True if a prompt may have a WRITE that ended badly although it had landed: D has it, and P takes it for lost."""
    cluster, stages = world.space.cluster, world.space.shadow_of(state).stages
    product = cluster.xids.index(xid)
    asked = [stages[j] for j in range(len(stages)) if cluster.product_of[j] == product]
    return FaultKind.ERR in spent and any(stage in (world.space.over[0], RequestStage.LEFT) for stage in asked)


def _longest_lease(world: Transitions, state: State, xid: str) -> int:
    """Return the longest time for which P still leases a prompt. `now` is 0, so that a lease's end is its length."""
    leases = [
        cell.lease_until
        for rank in world.space.cluster.p_ranks
        for cell in world.space.body(state, rank).cells.values()
        if cell.xid == xid and cell.source is not None
    ]
    return max(leases, default=0)

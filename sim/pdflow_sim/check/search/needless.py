"""L9: after repairable faults a request is served; it neither fails nor waits for a last resort.

Elsewhere a failed request is an outcome like any other. Here only repairable faults happen (a frame or a notification
is lost, late, repeated or undecodable; a connection breaks), and neither a client nor a timer ends anything: LEASE,
REGISTRATION, DEADLINE and STALL do not fire. In every state that such a run reaches, a fair run must be possible,
without further faults, in which each request that waits is committed; and no request may have failed.

Not repairable, because the spec says how a request fails after them: a handshake that fails or is refused (spec 2.10),
an operation that fails (spec 2.5), an aborted prefill, an evicted prompt, a restart, and what a client gives up.
A second attempt at a prompt ends without KV when the first has taken it, so it is not judged from then on.

The states are those of the scope without its other budgets; their fair runs are followed beyond the budgets of SYNC and
CANCEL (fairness.py, at rest). A graph is enough: where every state leads to one that serves a request, every strongly
fair run serves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import MemoryKind
from pdflow.protocol.timers import TimerKind
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import FaultKind, Scope
from pdflow_sim.check.search.components import components
from pdflow_sim.check.search.fairness import Fairness, Repeats
from pdflow_sim.check.search.liveness import REPAIRS
from pdflow_sim.check.search.search import Counterexample, path_to
from pdflow_sim.check.state.shadow_state import Broken, ClientStage, RequestStage
from pdflow_sim.check.state.space import State

NEEDLESS = "needless"
"""In place of an assumption about repeating timers in a counterexample: its last state violates L9."""
REPAIRABLE = frozenset(
    {
        FaultKind.DROP,
        FaultKind.DUP,
        FaultKind.DELAY,
        FaultKind.LOSE,
        FaultKind.CORRUPT,
        FaultKind.SYNC,
        FaultKind.CANCEL,
    }
)
SERVED = frozenset({RequestStage.COMMITTED, RequestStage.PREEMPTED, RequestStage.DECODED})
FAILED = frozenset({RequestStage.RESOLVED, RequestStage.FREED, RequestStage.LEFT})
BEYOND = 4
"""Fair runs that lead to this many times the limit of states are given up."""


def supports(scope: Scope) -> bool:
    """True if L9 can be judged in a scope. vllm-compat ends requests by timers; with clocks, time ends leases too;
    without timers promptness.py judges how requests end; a P that evicts prompts fails their requests; and of two
    engines with one id either may be asked."""
    evicts = bool(scope.method and scope.p_pool) and METHODS[scope.method].p_memory is MemoryKind.STORE
    return scope.dialect.control_frames and scope.clocks and not (scope.horizon or scope.twin or evicts)


def repairable(scope: Scope) -> Scope:
    """Return the part of a scope that L9 judges: without the faults that are not repairable. Scopes of which it is
    equal need one judgement."""
    others: dict[str, Any] = {fault.name.lower(): 0 for fault in FaultKind if fault not in REPAIRABLE}
    return attrs.evolve(scope, **others, orphan=False, down=False, rank_dies=False)


def judged_in(scopes: Iterable[Named]) -> dict[str, str]:
    """Return, by the name of each scope that L9 supports, the name of the first whose repairable part is equal."""
    first: dict[Scope, str] = {}
    return {
        named.name: first.setdefault(repairable(named.scope), named.name) for named in scopes if supports(named.scope)
    }


class _GivenUpError(Exception):
    """The limit of states was reached."""


class NeedlessFailures:
    """The judgement of one world. `limit`: number of states beyond which it is given up."""

    def __init__(self, world: Transitions, limit: int) -> None:
        self.world = world
        self.space = world.space
        self.limit = limit
        self.given_up = False
        self.states = 0
        """Number of states in which L9 was judged, before the last fault."""
        self.fair = Fairness(world, Repeats.AT_REST, limit)
        self.routed = world.space.scope.attempts > 0
        # Where the router dispatches both legs at once, P asks for a prompt whose leg may be under way.
        self.timers = REPAIRS if self.routed else REPAIRS | {TimerKind.EXPECT}
        clients = world.space.scope.requests if self.routed else 0
        self.requests = len(world.space.cluster.requests)
        self.everyone = (1 << self.requests + clients) - 1
        self.closed: set[int] = set()
        self.whole: dict[int, State] = {}
        """States whose component is open, by their names."""
        self.edges: dict[int, list[int]] = {}
        self.reach: dict[int, int] = {}
        """By name of a closed state, a bit for each request that is served in a state that it leads to."""
        self._served: dict[int, int] = {}

    def search(self) -> Counterexample | None:
        """Return the shortest way to a request that fails without need; failing that, to a state from which one is not
        served; None if there is neither, or too many states."""
        budget = zip(FaultKind, self.space.scope.budget, strict=True)
        left = tuple(count if fault in REPAIRABLE else 0 for fault, count in budget)
        start = self.space.put(self.world.turns.start(), self.space.budget, self.space.budgets.of(left))
        parents: dict[State, tuple[State, Move] | None] = {start: None}
        try:
            found = self._expand(start, parents)
            for state in () if found is not None else parents:
                try:
                    self.check(state)
                except Broken as broken:
                    found = self._counterexample(parents, state, broken)
                    break
        except _GivenUpError:
            self.given_up = True
            self.whole.clear()
            return None
        self.states = len(parents)
        return found

    def _expand(self, start: State, parents: dict[State, tuple[State, Move] | None]) -> Counterexample | None:
        """Find every state of the scope's repairable part, breadth first, up to the first with a failed request."""
        level = [start]
        while level:
            following: list[State] = []
            for state in level:
                try:
                    self.check_outcome(state)
                    moves = (
                        []
                        if self.served(state) == self.everyone
                        else self._without_ends(state, self.world.moves(state))
                    )
                    for move in moves:
                        after = self.world.apply(state, move)
                        if after not in parents:
                            parents[after] = (state, move)
                            following.append(after)
                except Broken as broken:
                    return self._counterexample(parents, state, broken)
            if len(parents) > self.limit:
                raise _GivenUpError
            level = following
        return None

    def _counterexample(
        self, parents: dict[State, tuple[State, Move] | None], state: State, broken: Broken
    ) -> Counterexample:
        broken.state, broken.repeats = state, NEEDLESS
        return Counterexample(path_to(parents, state), broken, len(parents))

    def _without_ends(self, state: State, moves: Sequence[Move]) -> list[Move]:
        """Return the moves without those of timers that end something."""
        armed = self.space.armed
        return [m for m in moves if m[0] != "timer" or armed[state[m[1]]][m[2]].kind in self.timers]

    # What is judged.

    def served(self, state: State) -> int:
        """Return a bit for each request that is served, or that L9 does not judge any more; with the router, for each
        attempt that does not wait, and behind those for each client that has its answer."""
        shadow_id = state[self.space.shadow]
        found = self._served.get(shadow_id)
        if found is None:
            shadow, products = self.space.shadow_of(state), self.space.cluster.product_of
            taken = {products[i] for i, landed in enumerate(shadow.landed) if landed}
            found = 0
            for i, stage in enumerate(shadow.stages):
                undispatched = self.routed and stage == RequestStage.UNREGISTERED
                if stage in SERVED or undispatched or (not shadow.landed[i] and products[i] in taken):
                    found |= 1 << i
            for client, stage in enumerate(shadow.clients):
                found |= (stage == ClientStage.COMPLETED) << self.requests + client
            self._served[shadow_id] = found
        return found

    def check_outcome(self, state: State) -> None:
        """Check that no request has failed, in a state that only repairable faults have led to."""
        served = self.served(state)
        for i, stage in enumerate(self.space.shadow_of(state).stages):
            if stage in FAILED and not served >> i & 1:
                request = self.space.cluster.requests[i]
                raise Broken("L9", f"{request} has failed after faults that can be repaired, and no timer has ended it")

    def check(self, state: State) -> None:
        """Check one state: no request has failed, and from every state that its fair runs lead to, all others can be
        served. Raises Broken("L9", ...), or what else breaks on the way."""
        self.check_outcome(state)
        root = self.space.spent(state)
        name = self.fair.name(root)
        if name in self.closed:
            return
        self.whole[name] = root
        for component in components(name, self._after, self.closed):
            reach = 0
            for one in component:
                reach |= self.served(self.whole[one])
                for other in self.edges.pop(one):
                    reach |= self.reach.get(other, 0)
            if reach != self.everyone:
                raise Broken(
                    "L9", f"no further fault happens, but only a timer ends it: {self._unserved(component, reach)}"
                )
            for one in component:
                self.reach[one] = reach
                del self.whole[one]

    def _unserved(self, component: list[int], reach: int) -> str:
        shadow = self.space.shadow_of(self.whole[component[0]])
        stages = [RequestStage(stage).name for stage in shadow.stages]
        stages += [ClientStage(client).name for client in shadow.clients]
        names = [*self.space.cluster.requests, *(f"client {client}" for client in range(len(shadow.clients)))]
        return ", ".join(f"{names[i]} is {stage}" for i, stage in enumerate(stages) if not reach >> i & 1)

    def _after(self, name: int) -> list[int]:
        if len(self.closed) + len(self.whole) > BEYOND * self.limit:
            raise _GivenUpError
        state = self.whole[name]
        found = self.edges[name] = []
        if self.served(state) == self.everyone:
            return found
        for move in self._without_ends(state, self.fair.moves(state)):
            after = self.fair.apply(state, move)
            other = self.fair.name(after)
            if other not in self.closed:
                self.whole.setdefault(other, after)
            found.append(other)
        return found

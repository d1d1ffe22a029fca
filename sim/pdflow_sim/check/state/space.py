"""The states of the explored world: the slots of a state, the values behind its numbers, and changes of a single slot.

A state is a flat tuple of small numbers, one slot for each endpoint, each link, the late duplicates, the tasks, the
operations, the shadow state and the budgets, and behind these whatever a variant of the world adds; `Interned` knows
the values. The new value of a slot depends on its old one and on little else, so that the commonest changes are cached.
turns.py applies events to endpoints; relation.py lists the possible moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from pdflow.protocol.ids import engine_of
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Address
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import FIRST_INCARNATION, ScopeCluster
from pdflow_sim.check.state.invariant_checker import InvariantChecker
from pdflow_sim.check.state.shadow_state import ORPHAN, PIECE, Interned, PromptStage, ShadowState

State: TypeAlias = tuple[int, ...]
Draft: TypeAlias = list[int]
"""A state while a move changes it."""
EVERY_FAULT = "every fault of the budgets occurs"
"""The goal that is reached when a run has spent all of its budgets."""
FLAGS = (1 << PIECE) - 1
"""An operation's flags, without its pieces and its age."""


class RoutedClients(Protocol):
    """The clients of a router's endpoint, as a state has them."""

    def unanswered(self, state: State) -> list[str]:
        """Return a description of each request that the router has not ended."""

    def revoked_attempts(self, state: State) -> int:
        """Return how many attempts the router has revoked because of what their client had received."""


class StateSpace:
    """The states of one scope's world."""

    def __init__(self, cluster: ScopeCluster, checker: InvariantChecker) -> None:
        self.scope = cluster.scope
        self.cluster = cluster
        self.checker = checker
        self.endpoints = Interned()
        """(address, incarnation, fingerprint) of each endpoint; the endpoint itself is in `bodies`."""
        self.bodies: list[Any] = []
        self.armed: list[tuple[Timer, ...]] = []
        self.holding: list[bool] = []
        """By endpoint, whether it has cells."""
        self.frames = Interned()
        self.chans = Interned()
        self.bags = Interned()
        self.tasks = Interned()
        self.ops = Interned()
        self.shadows = Interned()
        self.budgets = Interned()

        count = len(cluster.nodes)
        self.first_link = count
        self.living = count - len(cluster.orphans)
        """The number of nodes whose cells must end; they come first. An orphan's need not."""
        self.bag = count + len(cluster.links)
        self.task, self.op, self.shadow, self.budget = (self.bag + i for i in range(1, 5))
        self.over: tuple[int, ...] = cluster.over
        self.chans.of(())
        self.bags.of(())
        self.tasks.of(())

        self.clients: RoutedClients | None = None
        """The router's clients, where there is a router; None: no request needs an answer."""
        self.at_rest: list[Callable[[State], Iterable[str]]] = []
        """Return what components have left in a state at rest, in words."""
        self._left: dict[int, tuple[str, ...]] = {}
        """By endpoint, what is left in it, in words."""
        self._further: list[int] = []
        self._by_value: list[Callable[[State], dict[str, Any]]] = []
        self._fault_free: list[tuple[int, int]] = []
        self._nothing_left: int | None = None
        self._resolved: dict[tuple[int, int], bool] = {}
        self._spent: dict[tuple[int, FaultKind], int] = {}
        self._put: dict[tuple[int, str, int, int], int] = {}
        self._flagged: dict[tuple[int, int, int], int] = {}

    # Slots.

    def claim(self, first: tuple[int, ...], by_value: Callable[[State], dict[str, Any]]) -> int:
        """Add slots behind those that every state has, and return the index of the first.

        Args:
            first: their values before the first move.
            by_value: returns the contents of these slots in a state by value, for its digest.
        """
        slot = self.budget + 1 + len(self._further)
        self._further += first
        self._by_value.append(by_value)
        return slot

    def with_faults_over(self, slot: int, value: int) -> None:
        """Set the value that an added slot has once faults are over."""
        self._fault_free.append((slot, value))

    def beginning(self) -> State:
        """Return the state before the first event."""
        cluster = self.cluster
        return (
            *(self.endpoint(node, body) for node, body in zip(cluster.nodes, cluster.endpoints(), strict=True)),
            *(0 for _ in cluster.links),
            self.bags.of(()),
            self.tasks.of(()),
            self.ops.of(()),
            self.shadows.of(cluster.first_shadow()),
            self.budgets.of(self.scope.budget),
            *self._further,
        )

    @staticmethod
    def put(state: State, slot: int, value: int) -> State:
        """Return the state with one slot changed."""
        return (*state[:slot], value, *state[slot + 1 :])

    def spent(self, state: State) -> State:
        """Return the same state with faults over: nothing is left of any budget."""
        if self._nothing_left is None:
            self._nothing_left = self.budgets.of((0,) * len(self.scope.budget))
        state = self.put(state, self.budget, self._nothing_left)
        for slot, value in self._fault_free:
            state = self.put(state, slot, value)
        return state

    def further(self, state: State) -> dict[str, Any]:
        """Return the contents of the slots behind the budgets by value, for a state's digest."""
        found: dict[str, Any] = {}
        for by_value in self._by_value:
            found |= by_value(state)
        return found

    # Values.

    def endpoint(self, node: Address, body: Any) -> int:
        found = self.endpoints.of((node, getattr(body, "incarnation", 0), body.fingerprint()))
        if found == len(self.bodies):
            self.bodies.append(body)
            self.armed.append(body.armed())
            self.holding.append(bool(getattr(body, "cells", None)))
        return found

    def body(self, state: State | Draft, node: Address) -> Any:
        return self.bodies[state[self.cluster.at[node]]]

    def shadow_of(self, state: State | Draft) -> ShadowState:
        shadow: ShadowState = self.shadows.values[state[self.shadow]]
        return shadow

    def ops_of(self, state: State | Draft) -> tuple[tuple[int, int], ...]:
        ops: tuple[tuple[int, int], ...] = self.ops.values[state[self.op]]
        return ops

    def tasks_of(self, state: State | Draft) -> tuple[tuple[str, int, int], ...]:
        tasks: tuple[tuple[str, int, int], ...] = self.tasks.values[state[self.task]]
        return tasks

    def left(self, state: State | Draft) -> tuple[int, ...]:
        """Return what is left of every budget, by FaultKind."""
        left: tuple[int, ...] = self.budgets.values[state[self.budget]]
        return left

    def operations(self, op: int) -> tuple[Address, int, Any]:
        """Return (node, restarts of its engine when it was posted, effect) of an operation."""
        found: tuple[Address, int, Any] = self.checker.operations.values[op]
        return found

    def incarnation(self, shadow: ShadowState, node: Address) -> int:
        if node in self.cluster.seconds:
            return FIRST_INCARNATION["P"] + 1
        engine = engine_of(node)
        return FIRST_INCARNATION[engine] + shadow.restarts[self.cluster.number[engine]]

    # Changes.

    def spend(self, draft: Draft, fault: FaultKind) -> None:
        key = (draft[self.budget], fault)
        found = self._spent.get(key)
        if found is None:
            left = list(self.left(draft))
            left[fault] -= 1
            if not any(left):
                self.checker.goal(EVERY_FAULT)
            found = self._spent[key] = self.budgets.of(tuple(left))
        draft[self.budget] = found

    def put_shadow(self, draft: Draft, field: str, i: int, value: int) -> None:
        """Change one entry of one of the shadow state's tuples."""
        key = (draft[self.shadow], field, i, value)
        found = self._put.get(key)
        if found is None:
            shadow = self.shadow_of(draft)
            found = self._put[key] = self.shadows.of(
                shadow._replace(**{field: _with(getattr(shadow, field), i, value)})
            )
        draft[self.shadow] = found

    def note_refusal(self, draft: Draft, engine: int) -> None:
        """Record that an engine has refused a handshake, though it lives."""
        shadow = self.shadow_of(draft)
        if not shadow.refused:
            shadow = shadow._replace(refused=(0,) * len(self.cluster.engines))
            draft[self.shadow] = self.shadows.of(shadow)
        self.put_shadow(draft, "refused", engine, 1)

    def put_ops(self, draft: Draft, ops: list[tuple[int, int]]) -> None:
        draft[self.op] = self.ops.of(tuple(sorted((op, flags) for op, flags in ops if flags & FLAGS & ~ORPHAN)))

    def put_flags(self, draft: Draft, i: int, flags: int) -> None:
        key = (draft[self.op], i, flags)
        found = self._flagged.get(key)
        if found is None:
            ops = list(self.ops_of(draft))
            ops[i] = (ops[i][0], flags)
            self.put_ops(draft, ops)
            found = self._flagged[key] = draft[self.op]
        draft[self.op] = found

    def take_task(self, draft: Draft, i: int) -> tuple[str, int, int]:
        """Remove a pending task, and return it."""
        tasks = self.tasks_of(draft)
        draft[self.task] = self.tasks.of(tasks[:i] + tasks[i + 1 :])
        return tasks[i]

    # Rest.

    def settled(self, state: State) -> bool:
        """True if every request has an outcome, and nothing is held or under way."""
        key = (state[self.shadow], state[self.op])
        resolved = self._resolved.get(key)
        if resolved is None:
            shadow = self.shadow_of(state)
            resolved = self._resolved[key] = (
                all(
                    product in (PromptStage.ABSENT, PromptStage.RELEASED, PromptStage.DEAD)
                    for product in shadow.products
                )
                and all(stage in self.over for stage in shadow.stages)
                and not self.ops_of(state)
            )
        if not resolved or any(self.holding[end] for end in state[: self.living]):
            return False
        return not self.unanswered(state)

    def is_quiet(self, state: State) -> bool:
        """True if no frame is under way, also none that is late, and no handshake, fence or flush: their slots have the
        number of an empty value, 0."""
        return not any(state[self.first_link : self.op])

    def leftovers(self, state: State) -> list[str]:
        """Return, in words, what a state at rest still has and must not have; an orphan may."""
        found: list[str] = []
        for node, end in zip(self.cluster.nodes, state[: self.living], strict=False):
            left = self._left.get(end)
            if left is None:
                body = self.bodies[end]
                sizes = body.leftovers() if hasattr(body, "leftovers") else leftovers(body)
                left = self._left[end] = tuple(f"{node} has {size} {name}" for name, size in sizes.items())
            found += left
        for component in self.at_rest:
            found += component(state)
        return found

    def unanswered(self, state: State) -> list[str]:
        """Return a description of each request that a router has not ended; none without a router."""
        return [] if self.clients is None else self.clients.unanswered(state)

    def revoked_attempts(self, state: State) -> int:
        """Return how many attempts a router has revoked because of what their client had received."""
        return 0 if self.clients is None else self.clients.revoked_attempts(state)


def _with(values: tuple[Any, ...], i: int, value: Any) -> Any:
    return (*values[:i], value, *values[i + 1 :])

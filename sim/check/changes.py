"""Changes of single slots of a state, from which every move is made. A move changes a draft: the state as a list.

The commonest are remembered, as turns are: what a slot becomes depends on what it was and on little else.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.values import Address
from sim.check.ghost import ORPHAN, PIECE
from sim.check.scope import Fault, Scope
from sim.check.world import Draft, State, World

FLAGS = (1 << PIECE) - 1
"""An operation's flags, without its pieces and its age."""


class Changes(World):
    """A World whose slots can be changed one by one."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._spent: dict[tuple[int, Fault], int] = {}
        self._put: dict[tuple[int, str, int, int], int] = {}
        self._flagged: dict[tuple[int, int, int], int] = {}

    def left(self, state: State | Draft) -> tuple[int, ...]:
        """What is left of every budget, by Fault."""
        left: tuple[int, ...] = self.budgets.values[state[self.budget]]
        return left

    def operations(self, op: int) -> tuple[Address, int, Any]:
        """(node, its life, effect)"""
        found: tuple[Address, int, Any] = self.judge.operations.values[op]
        return found

    def spend(self, draft: Draft, fault: Fault) -> None:
        key = (draft[self.budget], fault)
        found = self._spent.get(key)
        if found is None:
            left = list(self.left(draft))
            left[fault] -= 1
            found = self._spent[key] = self.budgets.of(tuple(left))
        draft[self.budget] = found

    def put_ghost(self, draft: Draft, field: str, i: int, value: int) -> None:
        """Change one entry of one of the ghosts' tuples."""
        key = (draft[self.ghost], field, i, value)
        found = self._put.get(key)
        if found is None:
            ghost = self.ghost_of(draft)
            found = self._put[key] = self.ghosts.of(ghost._replace(**{field: _with(getattr(ghost, field), i, value)}))
        draft[self.ghost] = found

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
        """A task, taken from those that wait."""
        tasks = self.tasks_of(draft)
        draft[self.task] = self.tasks.of(tasks[:i] + tasks[i + 1 :])
        return tasks[i]


def _with(values: tuple[Any, ...], i: int, value: Any) -> Any:
    return (*values[:i], value, *values[i + 1 :])

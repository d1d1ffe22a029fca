"""Types of moves, and of the functions that a relation's components provide: possible moves in a state, and acts.

A move is a verb and small numbers. It is data: ordered, hashed, and given to the function that its verb names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from pdflow_sim.check.state.space import Draft, State

Move: TypeAlias = tuple[Any, ...]
"""(verb, numbers...)"""
Act: TypeAlias = Callable[[Draft, Move], None]
"""Applies a move to the draft of a state. Raises Broken."""
Acts: TypeAlias = dict[str, Act]
"""The act of each verb."""
Possible: TypeAlias = Callable[[State], Iterable[Move]]
"""Returns the moves of one kind that are possible in a state, in one fixed order."""
ON_TASK = frozenset({"task", "unreachable", "refused", "falsely refused", "flush fails", "flush refused", "second"})
"""Verbs of moves by which a transport's task ends."""
LostLinks: TypeAlias = Callable[[State, Move], list[int]]
"""Returns the links whose frames are lost with a move."""


class Reads(IntEnum):
    """The part of a state that decides, beside the budgets, which moves of a kind are possible."""

    SHADOW = 0
    LATE = 1
    TASKS = 2
    """With operations; and with the shadow state, where engines may be down."""
    OPERATIONS = 3


class MoveSource(NamedTuple):
    """A source of moves that neither endpoints nor links decide."""

    reads: Reads
    possible: Possible

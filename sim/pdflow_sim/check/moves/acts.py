"""What a move is, and what the parts of a relation give: moves that are possible in a state, and what each kind does.

A move is a word and small numbers. It is data: ordered, hashed, and given to the function that its word names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from pdflow_sim.check.state.space import Draft, State

Move: TypeAlias = tuple[Any, ...]
"""(verb, numbers...)"""
Act: TypeAlias = Callable[[Draft, Move], None]
"""Changes the draft of a state by what a move does. Raises Broken."""
Acts: TypeAlias = dict[str, Act]
"""By verb."""
Possible: TypeAlias = Callable[[State], Iterable[Move]]
"""Moves of one kind that are possible in a state, in one fixed order."""
LostLinks: TypeAlias = Callable[[State, Move], list[int]]
"""Links whose frames are lost with a move."""


class Reads(IntEnum):
    """What of a state decides which moves of a kind are possible, beside the budgets."""

    SHADOW = 0
    LATE = 1
    TASKS = 2
    OPERATIONS = 3


class MoveSource(NamedTuple):
    """Moves that neither endpoints nor links decide."""

    reads: Reads
    possible: Possible

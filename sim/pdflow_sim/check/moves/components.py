"""What a relation is composed of: the states, the turns, and the parts that own the moves of one kind each.

A variant of the world is the same value with other parts, more acts, or more moves in it (compose.py).
"""

from __future__ import annotations

from typing import Protocol

import attrs

from pdflow_sim.check.moves.acts import Acts, LostLinks, Move, MoveSource, Possible
from pdflow_sim.check.moves.clocks import Clocks
from pdflow_sim.check.moves.deaths import Deaths
from pdflow_sim.check.moves.engines import Engines
from pdflow_sim.check.moves.frames import Frames
from pdflow_sim.check.moves.onesided import Operations
from pdflow_sim.check.moves.tasks import Tasks
from pdflow_sim.check.state.space import State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner


class TimerMoves(Protocol):
    """The part that says which timers may fire."""

    def acts(self) -> Acts: ...

    def moves(self, state: State) -> list[Move]: ...


@attrs.frozen(kw_only=True)
class Components:
    space: StateSpace
    turns: TurnRunner
    engines: Engines
    frames: Frames
    tasks: Tasks
    operations: Operations
    timers: TimerMoves
    deaths: Deaths
    clocks: Clocks | None = None
    """Where engines have clocks."""
    acts: Acts
    """What every move does, by its verb."""
    sources: tuple[MoveSource, ...]
    """Moves that neither endpoints, links nor timers decide, in their order."""
    further: tuple[Possible, ...] = ()
    """Moves behind all others."""
    lost_by: dict[str, LostLinks]
    """By verb, which links lose what is on them."""

"""Components of a relation: the states, the turns, and the components that own the moves of one kind each.

A variant of the world is the same value with other components, more acts, or more moves in it (compose.py).
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
    """The component that decides which timers may fire."""

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
    """The moves of clocks; None where engines have no clocks."""
    acts: Acts
    """The act of every move, by its verb."""
    sources: tuple[MoveSource, ...]
    """Moves that neither endpoints, links nor timers decide, in their order."""
    further: tuple[Possible, ...] = ()
    """Moves behind all others."""
    lost_by: dict[str, LostLinks]
    """By verb, the links that lose their frames."""

"""The transition relation: the possible moves in a state, and the states that they lead to.

`moves(state)` and `apply(state, move)` serve the exhaustive search, random walks, Hypothesis, replay and shrinking. A
move is a verb and small numbers, in one fixed order; `names.py` gives it a name that survives a change of the numbers.
The component of a kind decides which moves there are and what each does: engines (engines.py), frames, tasks,
operations, timers, deaths.
"""

from __future__ import annotations

from typing import Protocol

from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.state.space import State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner


class Transitions(Protocol):
    """Interface of a relation for searches, walks and replays: `Relation`, or one that wraps it."""

    components: Components
    space: StateSpace
    turns: TurnRunner

    def moves(self, state: State) -> list[Move]:
        """Return the possible moves in a state, in one fixed order."""

    def apply(self, state: State, move: Move) -> State:
        """Return the state that a move leads to. Raises Broken if an invariant does not hold."""


class Relation:
    """The relation of one world, from its components."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.space = components.space
        self.turns = components.turns
        self._bag = self.space.bag
        self._acts = components.acts
        self._frames = components.frames
        self._timers = components.timers
        self._known: dict[State, tuple[Move, ...]] = {}
        """Cached moves, by the slots behind those of endpoints and links, which decide them."""

    def moves(self, state: State) -> list[Move]:
        tail = state[self._bag :]
        found = self._known.get(tail)
        if found is None:
            sources = self.components.sources
            found = self._known[tail] = tuple(move for source in sources for move in source.possible(state))
        moves = [*found, *self._frames.moves(state), *self._timers.moves(state)]
        for possible in self.components.further:
            moves += possible(state)
        return moves

    def apply(self, state: State, move: Move) -> State:
        draft = list(state)
        self._acts[move[0]](draft, move)
        return tuple(draft)

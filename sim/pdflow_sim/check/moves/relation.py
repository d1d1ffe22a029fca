"""The one relation: what may happen in a state, and what it leads to.

`moves(state)` and `apply(state, move)` serve the exhaustive search, random walks, Hypothesis, replay and shrinking. A
move is a word and small numbers, in one fixed order; `names.py` says it in words that survive a change of the numbers.
Which moves of a kind there are, and what each does, its part says: engines (engines.py), frames, tasks, operations,
timers, deaths.
"""

from __future__ import annotations

from typing import Protocol

from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.state.space import State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner


class Transitions(Protocol):
    """What searches, walks and replays need of a relation: this one, or one that wraps it."""

    components: Components
    space: StateSpace
    turns: TurnRunner

    def moves(self, state: State) -> list[Move]:
        """What may happen in a state, in one fixed order."""

    def apply(self, state: State, move: Move) -> State:
        """The state that a move leads to. Raises Broken if an invariant does not hold."""


class Relation:
    """`moves` and `apply` by the parts of one world."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.space = components.space
        self.turns = components.turns
        self._bag = self.space.bag
        self._acts = components.acts
        self._frames = components.frames
        self._timers = components.timers
        self._known: dict[State, tuple[Move, ...]] = {}
        """By the slots behind those of endpoints and links: what these decide."""

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

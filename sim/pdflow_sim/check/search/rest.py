"""L8: at rest nothing is left, in any endpoint, core or rank.

A state is at rest if every request has its outcome, nothing is held, and no frame, handshake, fence, flush or operation
is under way. What must be empty then, and what is kept on purpose within which bound, is said by `leftovers`
(`pdflow/protocol/invariants/rest.py`), each engine's role and the lanes. This is more than settling, which asks for
cells alone.
"""

from __future__ import annotations

from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

STEPS = 500
"""Limit of moves until nothing is under way any more."""
TIMELY = frozenset({"timer", "tick"})
"""Moves that nothing at rest waits for."""


def check_rest(world: Transitions, state: State) -> None:
    """Check a state that may be at rest. Raises Broken("L8", ...), whose `state` it is."""
    space = world.space
    if not space.is_quiet(state) or not space.settled(state):
        return
    left = space.leftovers(state)
    if left:
        broken = Broken("L8", f"at rest {', '.join(left)}")
        broken.state = state
        raise broken


def come_to_rest(world: Transitions, state: State) -> State:
    """Return the state after all that is under way has arrived, without timers, faults over."""
    state = world.space.spent(state)
    for _ in range(STEPS):
        move = next((move for move in world.moves(state) if move[0] not in TIMELY), None)
        if move is None:
            break
        state = world.apply(state, move)
    return state

"""Shrinks counterexamples: only what the violation needs is left of a random run.

Delta debugging (Zeller and Hildebrandt, TSE 2002) over the names of moves: a candidate is replayed leniently, names
that cannot happen are skipped, and it counts if the same invariant breaks. Then whatever the counterexample can do
without is removed: requests, ranks, budgets (`simpler`). Last, breadth first search looks for a shorter one, among its
own moves and, if it is small enough, in the whole scope that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from pdflow_sim.check.counterexamples.names import name
from pdflow_sim.check.counterexamples.replay import named
from pdflow_sim.check.counterexamples.simpler import loosely, simpler
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.ordered import Ordered, ordered
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.liveness import quiet_schedule
from pdflow_sim.check.search.search import Counterexample, shortest
from pdflow_sim.check.search.walk import promptly, rest
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

LIVENESS = ("L", "L1", "L2", "L3")
"""Invariants that are checked where nothing more happens, or only a calm schedule goes on."""
REPAIRS = 20
"""Timers of each kind that a calm schedule fires at most."""
MOST = 200
"""Steps of simplification: more than any scope has particulars and budgets."""
SMALL = 200_000
"""States after which a search for the shortest counterexample gives up."""
OWN = 20_000
"""States after which a search among a counterexample's own moves gives up."""


@attrs.frozen
class Short:
    """A shrunk counterexample, and the smallest scope found in which it happens."""

    scope: Scope
    names: tuple[str, ...]
    broken: Broken
    shortest: bool = False
    """Whether breadth first search has found none shorter in this scope."""


@attrs.frozen
class Replay:
    """The result of replaying a list of names."""

    names: tuple[str, ...]
    """Names of the moves that were possible."""
    end: State
    """The last state reached."""
    broken: Broken | None
    settling: bool
    """Whether it broke, if it did, when faults were over and a calm schedule went on."""


def replay(world: Ordered, names: Iterable[str], settling: bool = True) -> Replay:
    """Apply these moves from the start, skipping those that cannot happen; `settling`: then everything must settle."""
    state = world.turns.start()
    done: list[str] = []
    for text in names:
        found = _find(world, state, text)
        if found is None:
            continue
        done.append(found[0])
        broken, after = _apply(world, state, found[1])
        if broken is not None:
            return Replay(tuple(done), state, broken, False)
        state = after
    return Replay(tuple(done), state, _unsettled(world, state) if settling else None, True)


def shrink(scope: Scope, names: Sequence[str], invariant: str, small: int = SMALL) -> Short:
    """Return the shortest counterexample found that violates this invariant. `names` must be one in this scope.

    Args:
        small: states after which the search of the whole scope gives up; 0: none is made.
    """
    counterexample = _broken(ordered(scope), names, invariant)
    if counterexample is None:
        raise ValueError(
            f"these {len(names)} moves do not break {invariant} in this scope; are they from another version?"
        )
    scope, counterexample = _simplest(scope, counterexample, invariant)
    if counterexample.settling and invariant not in LIVENESS:
        scope = attrs.evolve(scope, sync=REPAIRS, cancel=REPAIRS, deadline=REPAIRS)
        spoken = _broken(ordered(scope), _spoken(ordered(scope), counterexample), invariant, False)
        assert spoken is not None, "a violation after a settling schedule is one with its moves written out"
        scope, counterexample = _simplest(scope, spoken, invariant)
    if invariant not in LIVENESS:
        own = _searched(Among(ordered(scope), counterexample.names), invariant, OWN)
        if own is not None and len(own.moves) < len(counterexample.names):
            shorter = _broken(ordered(scope), tuple(named(ordered(scope), own.moves)), invariant, False)
            assert shorter is not None, "a search among moves of a scope finds moves of that scope"
            scope, counterexample = _simplest(scope, shorter, invariant)
    found = _searched(ordered(scope), invariant, small) if small else None
    if found is not None:
        return Short(scope, tuple(named(ordered(scope), found.moves)), found.broken, True)
    assert counterexample.broken is not None
    return Short(scope, _to_rest(scope, counterexample), counterexample.broken)


def _to_rest(scope: Scope, counterexample: Replay) -> tuple[str, ...]:
    """Return the names of a counterexample, with the moves to the state at rest that is judged in a scope without
    timers. A settling schedule goes on by itself in any other scope (liveness.py)."""
    if scope.clocks or not counterexample.settling:
        return counterexample.names
    world = ordered(scope)
    names, state = list(counterexample.names), replay(world, counterexample.names, False).end
    for move in promptly(world, state)[0]:
        names.append(name(world, state, move))
        state = world.apply(state, move)
    return tuple(names)


def minimal(names: Sequence[str], breaks: Callable[[Sequence[str]], bool]) -> list[str]:
    """Reduce `names` with ddmin until no single one can be left out any more."""
    left, granularity = list(names), 2
    while len(left) >= 2:
        size = -(-len(left) // granularity)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if breaks(rest):
                left, granularity = rest, max(2, granularity - 1)
                break
        else:
            if size == 1:
                break
            granularity = min(len(left), 2 * granularity)
    return left


class Among:
    """A world restricted to the moves that a counterexample names."""

    def __init__(self, world: Ordered, names: Iterable[str]) -> None:
        self.world = world
        self.components, self.space, self.turns = world.components, world.space, world.turns
        self.named = frozenset(map(loosely, names))

    def moves(self, state: State) -> list[Move]:
        return [move for move in self.world.moves(state) if loosely(name(self.world, state, move)) in self.named]

    def apply(self, state: State, move: Move) -> State:
        return self.world.apply(state, move)


def _simplest(scope: Scope, counterexample: Replay, invariant: str) -> tuple[Scope, Replay]:
    """Return the smallest scope in which the reduced counterexample still breaks the invariant, and its replay."""
    counterexample = _least(scope, counterexample, invariant)
    for _ in range(MOST):
        for smaller, names in simpler(scope, counterexample.names):
            try:
                world = ordered(smaller)
            except ValueError:
                continue  # What is left does not go together, such as a pool of a method without the method.
            found = _broken(world, names, invariant, counterexample.settling)
            if found is not None:
                scope, counterexample = smaller, _least(smaller, found, invariant)
                break
        else:
            break
    return scope, counterexample


def _least(scope: Scope, counterexample: Replay, invariant: str) -> Replay:
    world = ordered(scope)
    least = minimal(
        counterexample.names, lambda names: _broken(world, names, invariant, counterexample.settling) is not None
    )
    found = _broken(world, least, invariant, counterexample.settling)
    assert found is not None, "a counterexample violates its invariant again"
    return found


def _broken(world: Ordered, names: Sequence[str], invariant: str, settling: bool = True) -> Replay | None:
    """Return the replay if it breaks that invariant; `settling`: also when a calm schedule goes on after it."""
    counterexample = replay(world, names, settling)
    return counterexample if counterexample.broken is not None and counterexample.broken.name == invariant else None


def _spoken(world: Ordered, counterexample: Replay) -> list[str]:
    """Return the counterexample's moves, and those of the calm schedule after it, up to the violation."""
    state = replay(world, counterexample.names, False).end
    names = list(counterexample.names)
    for after in _until_broken(quiet_schedule(world, state)):
        for move in world.moves(state):
            broken, reached = _apply(world, state, move)
            if (broken is not None) if after is None else (broken is None and world.space.spent(reached) == after):
                names.append(name(world, state, move))
                state = reached
                break
    return names


def _until_broken(states: Iterator[State]) -> Iterator[State | None]:
    """Yield the states, and None for the step that breaks an invariant."""
    try:
        yield from states
    except Broken:
        yield None


def _searched(world: Transitions, invariant: str, limit: int) -> Counterexample | None:
    """Return the shortest counterexample of this world, if it is small enough."""
    try:
        found = shortest(world, limit, lively=invariant in LIVENESS)
    except Broken:
        return None  # Before the first move: there is no story to tell.
    return found if found is not None and found.broken.name == invariant else None


def _find(world: Ordered, state: State, text: str) -> tuple[str, Move] | None:
    """Return the move of this name, or failing that one of the same kind on the same link, and its name."""
    possible = [(name(world, state, move), move) for move in world.moves(state)]
    loose = loosely(text)
    alike = None
    for found in possible:
        if found[0] == text:
            return found
        if alike is None and loosely(found[0]) == loose:
            alike = found
    return alike


def _apply(world: Ordered, state: State, move: Move) -> tuple[Broken | None, State]:
    try:
        return None, world.apply(state, move)
    except Broken as broken:
        return broken.with_traceback(None), state


def _unsettled(world: Ordered, state: State) -> Broken | None:
    try:
        rest(world, state, world.space.scope.budget)
    except Broken as broken:
        return broken.with_traceback(None)
    return None

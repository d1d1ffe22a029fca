"""The search for mutants: the invariant that catches each, the number of states until then, and the counterexample.

The search is breadth first, so that the counterexample is a shortest one. A hunt is fair only if the machine without
the mutant passes the same scope: `alarm` checks that.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information
from pdflow_sim.check.counterexamples.replay import named, record
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.search.fairness import Fairness
from pdflow_sim.check.search.needless import NEEDLESS, NeedlessFailures
from pdflow_sim.check.search.search import Coverage, shortest

LIMIT = 2_000_000
"""Limit of states; the largest scope of a mutant has half a million."""


@attrs.frozen(kw_only=True)
class Kill:
    """The result of the search for one mutant. `invariant` is empty if it was not caught."""

    mutant: str
    invariant: str = ""
    what: str = ""
    search: str = ""
    states: int = 0
    """Number of states seen until then."""
    seconds: float = 0.0
    stopped: bool = False
    """Whether the budget ran out first, so that an empty `invariant` proves nothing."""
    moves: tuple[str, ...] = ()
    """The shortest counterexample. Empty for a caught mutant: the first state cannot settle, without a single fault."""

    @property
    def steps(self) -> int:
        return len(self.moves)


def hunt(mutant: Mutant, clock: Callable[[], float], budget_s: float = 60.0) -> Kill:
    """Search a mutant's scope for a violated invariant. Raises CannotMutate where pdflow is compiled."""
    began = clock()
    stopped = False

    def tick(_: Coverage) -> bool:
        nonlocal stopped
        stopped = clock() - began > budget_s
        return stopped

    with mutant.applied():
        world = mutant.world()
        fairness = _fairness(mutant, world)
        needless = NeedlessFailures(world, LIMIT)
        found = shortest(world, LIMIT, tick=tick, fairness=fairness)
        if mutant.needless and found is None:
            found = needless.search()
        stopped = stopped or needless.given_up or any(check.given_up for check in fairness)
        seconds = clock() - began
        if found is None:
            return Kill(mutant=mutant.name, search=searched(mutant), seconds=seconds, stopped=stopped)
        return Kill(
            mutant=mutant.name,
            invariant=found.broken.name,
            what=found.broken.what,
            search=searched(mutant),
            states=found.states,
            seconds=seconds,
            moves=tuple(named(world, found.moves)),
        )


def _fairness(mutant: Mutant, world: Relation) -> tuple[Fairness, ...]:
    return () if mutant.repeats is None else (Fairness(world, mutant.repeats, LIMIT),)


def searched(mutant: Mutant) -> str:
    scope = mutant.scope
    return "exhaustive, with clocks" if scope.horizon else "exhaustive" if scope.clocks else "exhaustive, no clocks"


def counterexample(mutant: Mutant, kill: Kill) -> CounterexampleFile:
    """Return the result of a hunt as a counterexample file that replays with this mutant in place."""
    with mutant.applied():
        return record(
            mutant.world(),
            kill.moves,
            mutant=mutant.name,
            repeats=NEEDLESS if mutant.needless else "" if mutant.repeats is None else mutant.repeats.value,
            information=Information(note=mutant.drops),
        )


def alarm(mutant: Mutant) -> str:
    """Return what the machine without the mutant violates in the mutant's scope; must be empty, or catching the mutant
    proves nothing."""
    world = relation(mutant.scope)
    fairness = _fairness(mutant, world)
    needless = NeedlessFailures(world, LIMIT)
    found = shortest(world, LIMIT, fairness=fairness) or (needless.search() if mutant.needless else None)
    if needless.given_up or any(check.given_up for check in fairness):
        return "the fair runs of the scope are too many"
    return "" if found is None else str(found.broken)


def as_expected(mutant: Mutant, kill: Kill) -> bool:
    return kill.invariant == mutant.breaks and not kill.stopped

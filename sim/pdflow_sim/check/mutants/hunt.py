"""Hunting mutants: which invariant names each, after how many states, and by how short a story.

The search is breadth first, so the story is a shortest one. A hunt is fair only if the machine without the mutant
passes the same scope: `alarm` asks that.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information
from pdflow_sim.check.counterexamples.replay import named, record
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.search.search import Coverage, shortest

LIMIT = 2_000_000
"""States; the largest scope of a mutant has half a million."""


@attrs.frozen(kw_only=True)
class Kill:
    """How one mutant was found; or, where `invariant` is empty, that it was not."""

    mutant: str
    invariant: str = ""
    what: str = ""
    search: str = ""
    states: int = 0
    """Seen until then."""
    seconds: float = 0.0
    stopped: bool = False
    """The budget ran out first, so that nothing was found means nothing."""
    moves: tuple[str, ...] = ()
    """The shortest story. None: it goes wrong without a single fault, whatever is done."""

    @property
    def steps(self) -> int:
        return len(self.moves)


def hunt(mutant: Mutant, clock: Callable[[], float], budget_s: float = 60.0) -> Kill:
    """Raises CannotMutate where pdflow is compiled."""
    began = clock()
    stopped = False

    def tick(_: Coverage) -> bool:
        nonlocal stopped
        stopped = clock() - began > budget_s
        return stopped

    with mutant.applied():
        world = mutant.world()
        found = shortest(world, LIMIT, tick=tick)
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


def searched(mutant: Mutant) -> str:
    scope = mutant.scope
    return "exhaustive, with clocks" if scope.horizon else "exhaustive" if scope.clocks else "exhaustive, no clocks"


def counterexample(mutant: Mutant, kill: Kill) -> CounterexampleFile:
    """What a hunt has found, as a file that replays with this mutant in place."""
    with mutant.applied():
        return record(mutant.world(), kill.moves, mutant=mutant.name, information=Information(note=mutant.drops))


def alarm(mutant: Mutant) -> str:
    """What the machine as it is violates in this mutant's scope; empty, or the mutant proves nothing."""
    found = shortest(relation(mutant.scope), LIMIT)
    return "" if found is None else str(found.broken)


def as_expected(mutant: Mutant, kill: Kill) -> bool:
    return kill.invariant == mutant.breaks and not kill.stopped

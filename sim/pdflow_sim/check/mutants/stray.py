"""Random walks with mutants: the number of runs until one violates an invariant that it keeps without the mutant.

A run is a function of its seed and of the machine, so the same seed is walked without the mutant too: a run that fails
there as well does not count.
"""

from __future__ import annotations

from collections.abc import Callable

from pdflow_sim.check.moves.ordered import RelationCache
from pdflow_sim.check.mutants.hunt import Kill
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.search.walk import walk

RUNS = 10_000


def stray(mutant: Mutant, clock: Callable[[], float], seeds: range = range(RUNS), budget_s: float = 60.0) -> Kill:
    """Walk these seeds, with clusters drawn from them, in the mutant's dialect; `states` counts runs here.

    Raises CannotMutate where pdflow is compiled.
    """
    began = clock()
    dialect = mutant.scope.dialect
    cache = RelationCache()
    for run, seed in enumerate(seeds, 1):
        if clock() - began > budget_s:
            return Kill(mutant=mutant.name, search="walk", seconds=clock() - began, stopped=True)
        with mutant.applied():
            try:
                record = walk(cache, seed, dialect)
            except ValueError:
                continue  # Without this guard there are no such clusters.
            names = () if record.broken is None else tuple(record.names(cache.of(record.cluster)))
        if record.broken is not None and walk(RelationCache(), seed, dialect).broken is None:
            return Kill(
                mutant=mutant.name,
                invariant=record.broken.name,
                what=record.broken.what,
                search="walk",
                states=run,
                seconds=clock() - began,
                moves=names,
            )
    return Kill(mutant=mutant.name, search="walk", seconds=clock() - began)

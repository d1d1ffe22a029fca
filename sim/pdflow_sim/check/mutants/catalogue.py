"""All mutants, by name."""

from __future__ import annotations

from sim.check.mutants.answers import ANSWERS
from sim.check.mutants.beside import BESIDE
from sim.check.mutants.blocks import BLOCKS
from sim.check.mutants.compat import COMPAT
from sim.check.mutants.completion import COMPLETION
from sim.check.mutants.cores import CORES
from sim.check.mutants.identity import IDENTITY
from sim.check.mutants.leases import LEASES
from sim.check.mutants.mutant import Mutant
from sim.check.mutants.pieces import PIECES
from sim.check.mutants.repair import REPAIR
from sim.check.mutants.timing import TIMING

GROUPS: dict[str, tuple[Mutant, ...]] = {
    "The life of P's blocks": LEASES,
    "The life of D's blocks": BLOCKS,
    "When a transfer is complete": COMPLETION,
    "Who is meant": IDENTITY,
    "What is said, and said again": REPAIR,
    "What rests on clocks": TIMING,
    "What goes in pieces": PIECES,
    "What an engine does with a request": CORES,
    "What an engine sends early, or from beside its blocks": BESIDE,
    "What reaches a client": ANSWERS,
    "vllm-compat": COMPAT,
}
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for group in GROUPS.values() for mutant in group}

assert len(MUTANTS) == sum(map(len, GROUPS.values())), "two mutants of one name"

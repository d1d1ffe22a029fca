"""All mutants, by name."""

from __future__ import annotations

from pdflow_sim.check.mutants.answers import ANSWERS
from pdflow_sim.check.mutants.blocks import BLOCKS
from pdflow_sim.check.mutants.compat import COMPAT
from pdflow_sim.check.mutants.completion import COMPLETION
from pdflow_sim.check.mutants.cores import CORES
from pdflow_sim.check.mutants.identity import IDENTITY
from pdflow_sim.check.mutants.leases import LEASES
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.mutants.pieces import PIECES
from pdflow_sim.check.mutants.refusals import REFUSALS
from pdflow_sim.check.mutants.repair import REPAIR
from pdflow_sim.check.mutants.staging import STAGING
from pdflow_sim.check.mutants.timing import TIMING

GROUPS: dict[str, tuple[Mutant, ...]] = {
    "The life of P's blocks": LEASES,
    "The life of D's blocks": BLOCKS,
    "When a transfer is complete": COMPLETION,
    "Who is meant": IDENTITY,
    "What is said, and said again": REPAIR,
    "What rests on clocks": TIMING,
    "When a connection is lost": REFUSALS,
    "What goes in pieces": PIECES,
    "What an engine does with a request": CORES,
    "What an engine sends early, or from beside its blocks": STAGING,
    "What reaches a client": ANSWERS,
    "vllm-compat": COMPAT,
}
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for group in GROUPS.values() for mutant in group}

assert len(MUTANTS) == sum(map(len, GROUPS.values())), "two mutants of one name"

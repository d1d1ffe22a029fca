"""All mutants, by name."""

from __future__ import annotations

from pdflow_sim.check.mutants.answers import ANSWERS
from pdflow_sim.check.mutants.blocks import BLOCKS
from pdflow_sim.check.mutants.bookkeeping import BOOKKEEPING
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
    "Release of P's blocks": LEASES,
    "Release of D's blocks": BLOCKS,
    "Completion of a transfer": COMPLETION,
    "Identity": IDENTITY,
    "Reports to a waiting peer": REPAIR,
    "Clocks": TIMING,
    "Lost connections": REFUSALS,
    "Transfers in pieces": PIECES,
    "Requests in an engine": CORES,
    "Early sending and staging memory": STAGING,
    "The answer to a client": ANSWERS,
    "Timers, counts and memory": BOOKKEEPING,
    "vllm-compat": COMPAT,
}
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for group in GROUPS.values() for mutant in group}

assert len(MUTANTS) == sum(map(len, GROUPS.values())), "two mutants of one name"

"""Checks, after each callback of the clock, that the nodes that had a turn in it have carried out their cores' effects
(S12).

Not within a callback: an engine's wake-up has a turn for each outcome, and its timer is set behind all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.protocol.invariants.oracle import Oracle
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimNode

if TYPE_CHECKING:
    from pdflow_sim.world import World


class ObligationChecker:
    """Checks the engines and stores of a world. Restarted engines take it over from their former incarnations."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self.oracle = oracle
        self.turned: list[SimNode] = []
        """The nodes of this callback's turns."""
        for node in world.nodes.peers():
            node.on_turn = self.turned.append
        world.clock.after_each = self.check

    def check(self) -> None:
        """Check the nodes that had turns. Raises InvariantViolated("S12"). Of a node that is paused or dead nothing is
        asked."""
        turned = self.turned
        while turned:
            node = turned.pop()
            if node.core.busy or node in turned:
                continue
            wrong = node.unfulfilled()
            if wrong:
                name = node.name if isinstance(node, SimEngineNode) else ""
                raise self.oracle.broken("S12", wrong, name)

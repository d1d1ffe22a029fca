"""S12 and L8 at live nodes: what their endpoints' effects say is done, and at rest their endpoints keep nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import trio

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.invariants.accounting import miscounted
from pdflow.protocol.invariants.obligations import outlived, unexposed, wrong_quarantine
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.invariants.timers import too_late, unscheduled
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.serving.decode import DecodeCore
from pdflow.serving.store import StoreCore
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.ranked_node import RankedNode
from pdflow_runtime.nodes.ranks import Rank


def exposed_words(rank: Rank) -> Mapping[int, int]:
    """The lease words that readers find, by slot."""
    words = np.frombuffer(rank.held.words, "<u8")
    (slots,) = words.nonzero()
    return {int(slot): int(words[slot]) for slot in slots}


def unfulfilled(node: RankedNode) -> str:
    """Which effect this node has not carried out (S12); "" if none. To be called between turns."""
    wrong = misplaced(node)
    if wrong or not isinstance(node, LiveEngineNode):
        return wrong
    missed = node.engine.missed_wake_up()
    return f"at {node.name}, {missed}" if missed else ""


def misplaced(node: RankedNode) -> str:
    """Which effect on its memory it has not carried out; "" if none."""
    for address, port in node.ports.items():
        endpoint, wrong = port.endpoint, ""
        if isinstance(endpoint, ProducerRank):
            rank = node.ranks[address]
            exposed = exposed_words(rank)
            wrong = unexposed(endpoint, exposed, rank.slots) or outlived(endpoint, exposed)
        elif isinstance(endpoint, ConsumerScheduler):
            wrong = _wrong_quarantine(node, endpoint)
        if wrong:
            return f"at {address}, {wrong}"
    return ""


def _wrong_quarantine(node: RankedNode, scheduler: ConsumerScheduler) -> str:
    core = node.core
    if isinstance(core, StoreCore):
        return wrong_quarantine(scheduler, core.memory.pool, core.memory.held)
    assert isinstance(node, LiveEngineNode)
    return wrong_quarantine(scheduler, node.pool, core.landing.staged() if isinstance(core, DecodeCore) else None)


def kept_at_rest(node: RankedNode) -> str:
    """What is left at an endpoint (L8), or is wrong with its counts and deadlines (S10, S11, L12); "" if nothing."""
    for address, port in node.ports.items():
        left = leftovers(port.endpoint)
        wrong = f"{left} is left" if left else unscheduled(port.endpoint) or miscounted(port.endpoint)
        wrong = wrong or too_late(port.endpoint, now_ns())
        if wrong:
            return f"at {address}, {wrong}"
    return ""


class ObligationInstrument(trio.abc.Instrument):
    """Judges these nodes after every step of a task: no turn ends in the middle of one."""

    def __init__(self, nodes: Iterable[RankedNode]) -> None:
        self.nodes: Final = tuple(nodes)
        self.found = ""
        """The first thing that was wrong."""

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.found:
            return
        for node in self.nodes:
            if not node.core.busy:
                self.found = self.found or unfulfilled(node)

"""The faults of a plan that act now on what passes between engines, and which messages and operations they hit.

`faulty_fabric` has what a fault does to what it hits, and `faults` when each begins and ends.
"""

from __future__ import annotations

from typing import TypeVar

from pdflow.faults.draw import Numbers, Streams
from pdflow.faults.plan import (
    ROUTER,
    DropMessages,
    Fault,
    FaultPlan,
    HandshakeError,
    MessageFault,
    Partition,
    TransferError,
)
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address, EngineId
from pdflow.wiring.stores import LOADS
from pdflow_sim.engine_slot import EngineSlots
from pdflow_sim.observe.run_metrics import RunMetrics

F = TypeVar("F", MessageFault, TransferError, HandshakeError)


class ActiveFaults:
    """The faults of a plan that act now. Engines are named by their slots, as in the plan. Args: `streams` gives a
    name's stream of random numbers.
    """

    def __init__(self, plan: FaultPlan, streams: Streams, slots: EngineSlots, metrics: RunMetrics) -> None:
        self.plan = plan
        self.slots = slots
        self.metrics = metrics
        self.numbers: dict[str, Numbers] = {fault.name: streams(f"faults/{fault.name}/hits") for fault in plan.faults}
        self.windows: dict[str, int] = {}
        """How many windows of each fault are open, by its name."""
        self.on_messages: list[MessageFault] = []
        self.on_transfers: list[TransferError] = []
        self.on_handshakes: list[HandshakeError] = []
        self.partitions: list[Partition] = []

    def begin(self, fault: Fault) -> None:
        """Open a window of this fault."""
        self._open(fault, 1)

    def end(self, fault: Fault) -> None:
        """Close one window of this fault."""
        self._open(fault, -1)

    def _open(self, fault: Fault, windows: int) -> None:
        self.windows[fault.name] = self.windows.get(fault.name, 0) + windows
        acting = [fault for fault in self.plan.faults if self.windows.get(fault.name)]
        self.on_messages = [fault for fault in acting if isinstance(fault, MessageFault)]
        self.on_transfers = [fault for fault in acting if isinstance(fault, TransferError)]
        self.on_handshakes = [fault for fault in acting if isinstance(fault, HandshakeError)]
        self.partitions = [fault for fault in acting if isinstance(fault, Partition)]

    def slot_of(self, address: Address) -> EngineId:
        """Return the name of the slot of an endpoint's engine, or of the engine that loads under another id."""
        return self.slots.name_of(engine_of(address).removesuffix(LOADS))

    def is_partitioned(self, sender: EngineId, receiver: EngineId) -> bool:
        """True if nothing gets through in this direction."""
        return any(partition.links.hold(sender, receiver) for partition in self.partitions)

    def hits(self, fault: F) -> bool:
        """True if the fault hits; drawn once for each message or operation that it may hit."""
        if fault.probability < 1.0 and self.numbers[fault.name].uniform() >= fault.probability:
            return False
        self.count(fault)
        return True

    def count(self, fault: Fault) -> None:
        """Count a fault by its kind, for the result."""
        self.metrics.count("fault: " + fault.name.partition("/")[0])

    def loses_report(self, engine: EngineId) -> bool:
        """True if a heartbeat of this engine does not get to the router."""
        drops = [
            fault for fault in self.on_messages if isinstance(fault, DropMessages) and fault.links.hold(engine, ROUTER)
        ]
        return self.is_partitioned(engine, ROUTER) or any(self.hits(drop) for drop in drops)

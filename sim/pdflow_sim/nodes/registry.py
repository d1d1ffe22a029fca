"""Which node stands where: the current incarnation of each engine, by the legs that it gets, and the store's nodes."""

from __future__ import annotations

from pdflow.protocol.values import EngineId
from pdflow_sim.engine_slot import EngineSlot, EngineSlots
from pdflow_sim.nodes.aggregated_node import AggregatedNode
from pdflow_sim.nodes.decode_node import DecodeNode
from pdflow_sim.nodes.engine_node import EngineNode
from pdflow_sim.nodes.node import Node
from pdflow_sim.nodes.prefill_node import PrefillNode
from pdflow_sim.nodes.store_node import StoreNode


class NodeRegistry:
    """All nodes but the router's. The lists are by position, and stay the same lists as engines restart."""

    def __init__(self, slots: EngineSlots) -> None:
        self.slots = slots
        self.prefills: list[PrefillNode | AggregatedNode] = []
        """Whoever the router may send a prompt to."""
        self.decodes: list[DecodeNode] = []
        self.stores: list[StoreNode] = []
        """Between the two, where the method has a store."""

    def at(self, slot: EngineSlot) -> EngineNode:
        """The incarnation that stands there."""
        return self.decodes[slot.position] if slot.leg == "decode" else self.prefills[slot.position]

    def named(self, name: EngineId) -> EngineNode:
        """The incarnation that stands in the slot of this name."""
        return self.at(self.slots.by_name[name])

    def engines(self) -> list[EngineNode]:
        """In the scenario's order: first those that prompts are sent to."""
        return [*self.prefills, *self.decodes]

    def peers(self) -> list[Node]:
        """Everything that KV passes between."""
        return [*self.prefills, *self.stores, *self.decodes]

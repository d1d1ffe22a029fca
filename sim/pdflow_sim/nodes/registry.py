"""The nodes of a run: the current incarnation of each engine, by the legs that it gets, and the store's nodes."""

from __future__ import annotations

from pdflow.protocol.values import EngineId
from pdflow_sim.engine_slot import EngineSlot, EngineSlots
from pdflow_sim.nodes.aggregated_node import AggregatedNode
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimNode
from pdflow_sim.nodes.prefill_node import SimPrefillNode
from pdflow_sim.nodes.store_node import SimStoreNode


class NodeRegistry:
    """All nodes but the router's. The lists are by position, and stay the same lists as engines restart."""

    def __init__(self, slots: EngineSlots) -> None:
        self.slots = slots
        self.prefills: list[SimPrefillNode | AggregatedNode] = []
        """The engines to which the router may send a prompt."""
        self.decodes: list[SimDecodeNode] = []
        self.stores: list[SimStoreNode] = []
        """The nodes of the store, where the method has one."""

    def at(self, slot: EngineSlot) -> SimEngineNode:
        """Return the current incarnation of this slot's engine."""
        return self.decodes[slot.position] if slot.leg == "decode" else self.prefills[slot.position]

    def named(self, name: EngineId) -> SimEngineNode:
        """Return the current incarnation of the engine in the slot of this name."""
        return self.at(self.slots.by_name[name])

    def engines(self) -> list[SimEngineNode]:
        """Return the engines in the scenario's order: first those to which prompts are sent."""
        return [*self.prefills, *self.decodes]

    def peers(self) -> list[SimNode]:
        """Return all nodes between which KV is moved."""
        return [*self.prefills, *self.stores, *self.decodes]

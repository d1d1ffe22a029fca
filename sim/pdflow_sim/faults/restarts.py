"""Engines that crash, and restart empty: a new node in the slot of the old one.

The memory of a dead process is gone, and so is everything that it had yet to send to its peers. What its NICs had been
given may land all the same. No protocol endpoint is notified of a death: peers find out by their own timers. The
router's connections break, which it sees one hop later; so it sees, by its health check or a heartbeat, that the engine
is up again. Where engines send heartbeats, it goes on sending legs to a dead one until it misses them, and each is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from pdflow.faults.plan import Crash
from pdflow.protocol.ids import EngineInfo, engine_of, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill
from pdflow.routing.events import DecodeEnded, EngineChanged, PrefillAnswered
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.environment import ClockEnvironment, ProcessSteps
from pdflow_sim.faults.faulty_fabric import FaultyFabric
from pdflow_sim.membership.heartbeats import Heartbeats
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.router_node import SimRouterNode
from pdflow_sim.observe.recording import Recorder

MakeEngine: TypeAlias = Callable[[EngineSlot, EngineInfo, int, int], SimEngineNode]
"""Makes one incarnation of the engine of a slot, and registers its node there: (the slot, its id and shards, its
incarnation, the last generation of the one before).
"""


class EngineLifecycle:
    """Crashes and restarts engines, which are named by the id of their first incarnation.

    Args: `heartbeats`: sends the engines' heartbeats to the router, if engines report.
    """

    def __init__(
        self,
        env: ClockEnvironment,
        ports: NodePorts,
        nodes: NodeRegistry,
        router: SimRouterNode,
        heartbeats: Heartbeats | None,
        recorder: Recorder | None,
        fabric: FaultyFabric,
        make: MakeEngine,
    ) -> None:
        self.env = env
        self.clock = ports.clock
        self.fabric = fabric
        self.shipping = ports.shipping
        self.metrics = ports.metrics
        self.nodes = nodes
        self.router = router
        self.heartbeats = heartbeats
        self.recorder = recorder
        self.make = make
        self.restarts: dict[EngineId, int] = {}
        """How many restarts each slot has had so far."""
        self.down: dict[EngineId, Crash] = {}

    def node(self, name: EngineId) -> SimEngineNode:
        """Return the current incarnation of this engine."""
        return self.nodes.named(name)

    def crash(self, fault: Crash, name: EngineId) -> bool:
        """Kill all processes of an engine now. False if it was down already."""
        node = self.node(name)
        if not node.alive:
            return False
        node.die()
        if self.recorder is not None:
            self.recorder.died(node.name, self.clock.now)
        node.ingress = self.refuse
        self.down[name] = fault
        word_values = self.fabric.word_values
        for rank in [rank for rank in word_values if engine_of(rank) == node.name]:
            del word_values[rank]
        self.fabric.invalidate(node)
        if self.shipping is not None:
            self.shipping.died(node)
        if not fault.lands:
            self.fabric.unplug(node)
        self.fabric.witness.died(node, fault.lands)
        slot = self.nodes.slots.by_name[name]
        self.router.breaks(slot.leg, slot.position)
        if fault.restart_after_ns is not None:
            self.env.process(self.restart_after(name, fault.restart_after_ns))
        return True

    def restart_after(self, name: EngineId, wait_ns: int) -> ProcessSteps:
        yield self.env.timeout(wait_ns)
        self.restart(name)

    def restart(self, name: EngineId) -> None:
        """Bring an engine that is down up again, with empty memory."""
        fault = self.down.pop(name, None)
        if fault is None:
            return
        fabric, slots, old = self.fabric, self.nodes.slots, self.node(name)
        slot = slots.by_name[name]
        restarts = self.restarts[name] = self.restarts.get(name, 0) + 1
        info = EngineInfo(old.name, slot.info.shards)
        if fault.new_engine_id:
            info = EngineInfo(f"{name}+{restarts}", info.shards)
            slots.names[info.engine] = name
            self.keep_nics(old.name, info)
            fabric.paths.pool_of[info.engine] = slot.pool
        first_rank = fabric.ports.get(rank_address(old.name, 0))
        incarnation = 0 if first_rank is None else first_rank.incarnation
        if not fault.same_incarnation:
            incarnation += 1 << 32
        new = self.make(slot, info, incarnation, old.newest_generation())
        if slot.pool.role != "prefill":
            new.steps_before = sum(int(column[3].sum()) for column in self.metrics.steps[info.engine].folds())
        new.busy_before_ps, new.peak_blocks = old.busy_before_ps, old.peak_blocks
        new.prefix_cache_before = old.prefix_cache()
        new.watch(old.observer)
        new.on_turn = old.on_turn
        new.local_clock = old.local_clock
        if self.heartbeats is not None:
            self.heartbeats.begin(slot)
        else:
            self.router.link.later(EngineChanged(old.name, True, info if fault.new_engine_id else None))

    def keep_nics(self, before: EngineId, info: EngineInfo) -> None:
        """Keep an engine's hardware under its new id."""
        for rank in range(info.shards.ranks):
            self.fabric.paths.keep(rank_address(before, rank), rank_address(info.engine, rank))

    def refuse(self, effect: Any) -> None:
        """Refuse what comes for a dead engine: a new leg fails one hop later, and all else is ignored."""
        if type(effect) is DispatchPrefill:
            self.router.link.later(PrefillAnswered(effect.request_id, None, Code.PEER_DEAD))
        elif type(effect) in (DispatchDecode, DispatchAlone):
            self.router.link.later(DecodeEnded(effect.request_id, Code.PEER_DEAD))

"""Engines that die, and come back empty: a new node in the slot of the old one.

The memory of a dead process is gone, and so is everything that its peers were going to be told. What its NICs had been
given may land all the same. Nobody in the protocol is told of a death: peers find out by their own timers. The router's
connections break, which it sees one hop later; so it sees, by its health check or a heartbeat, that the engine is up
again. Where engines send heartbeats, it goes on sending legs to a dead one until it misses them, and each is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from pdflow.faults.plan import Crash
from pdflow.protocol.ids import EngineInfo, engine_of, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill
from pdflow.routing.events import DecodeEnded, EngineChanged, PrefillAnswered
from pdflow.wiring.stores import LOADS
from sim.engine_node import EngineNode

if TYPE_CHECKING:
    from sim.engine_slot import EngineSlot, EngineSlots
    from sim.faults import Faults
    from sim.world import World


MakeEngine: TypeAlias = Callable[["EngineSlot", EngineInfo, int, int], EngineNode]
"""Makes one incarnation of the engine of a slot, which stands there from then on: (the slot, its id and shards, its
incarnation, the last generation of the one before)."""


class Lives:
    """Which life each engine is in. Engines are named by the id of their first life."""

    def __init__(self, faults: Faults, world: World, slots: EngineSlots, make: MakeEngine) -> None:
        self.faults = faults
        self.world = world
        self.slots = slots
        self.make = make
        self.lives: dict[EngineId, int] = {}
        """By slot: how many restarts so far."""
        self.down: dict[EngineId, Crash] = {}

    def node(self, name: EngineId) -> EngineNode:
        """The life that this engine is in."""
        slot = self.slots.by_name[name]
        return self.world.node_at(slot.leg, slot.position)

    def place_of(self, engine: EngineId) -> EngineId:
        """How the plan calls the engine of that id, or of the one that it loads as."""
        return self.slots.name_of(engine.removesuffix(LOADS))

    def crash(self, fault: Crash, name: EngineId) -> bool:
        """All its processes die now. False if it was down already."""
        node = self.node(name)
        if not node.alive:
            return False
        world = self.world
        node.die()
        if world.recorder is not None:
            world.recorder.died(node.name, world.env.now)
        node.door = self.refuse
        self.down[name] = fault
        words = world.fabric.words
        for key in [key for key in words if engine_of(key[0]) == node.name]:
            del words[key]
        self.faults.hindrances.died(node, cut_off=not fault.lands)
        self.faults.witness.died(node, fault.lands)
        slot = self.slots.by_name[name]
        world.router.breaks(slot.leg, slot.position)
        if fault.restart_after_ns is not None:
            world.env.call(fault.restart_after_ns, self.restart, name)
        return True

    def restart(self, name: EngineId) -> None:
        """It is up again, and knows nothing."""
        fault = self.down.pop(name, None)
        if fault is None:
            return
        world, slot, old = self.world, self.slots.by_name[name], self.node(name)
        life = self.lives[name] = self.lives.get(name, 0) + 1
        info = EngineInfo(old.name, slot.info.shards)
        if fault.new_engine_id:
            info = EngineInfo(f"{name}+{life}", info.shards)
            self.slots.names[info.engine] = name
            self.keep_nics(old.name, info)
            world.fabric.paths.pool_of[info.engine] = slot.pool
        first_rank = world.fabric.ports.get(rank_address(old.name, 0))
        incarnation = 0 if first_rank is None else first_rank.incarnation
        if not fault.same_incarnation:
            incarnation += 1 << 32
        new = self.make(slot, info, incarnation, old.newest_generation())
        if slot.pool.role != "prefill":
            new.steps_before = sum(int(column[3].sum()) for column in world.steps[info.engine].folds())
        new.busy_before_ps, new.peak_blocks = old.busy_before_ps, old.peak_blocks
        new.prefix_cache_before = old.prefix_cache()
        new.watch(world.observe)
        new.clock = old.clock
        self.faults.hindrances.attach(new)
        if world.heartbeats is not None:
            world.heartbeats.begin(slot)
        else:
            world.router.later(EngineChanged(old.name, True, info if fault.new_engine_id else None))

    def keep_nics(self, before: EngineId, info: EngineInfo) -> None:
        """Another id, the same hardware."""
        for rank in range(info.shards.ranks):
            self.world.fabric.paths.keep(rank_address(before, rank), rank_address(info.engine, rank))

    def refuse(self, effect: Any) -> None:
        """Nobody listens at that port: a new leg fails one hop later, and nothing else is there to be told."""
        if type(effect) is DispatchPrefill:
            self.world.router.later(PrefillAnswered(effect.request_id, None, Code.PEER_DEAD))
        elif type(effect) in (DispatchDecode, DispatchAlone):
            self.world.router.later(DecodeEnded(effect.request_id, Code.PEER_DEAD))

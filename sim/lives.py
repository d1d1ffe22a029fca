"""Engines that die, and come back empty: a new node in the place of the old one.

The memory of a dead process is gone, and so is everything that its peers were going to be told. What its NICs had been
given may land all the same. Nobody in the protocol is told of a death: peers find out by their own timers. The router's
connections break, which it sees one hop later; so it sees, by its health check or a heartbeat, that the engine is up
again. Where engines send heartbeats, it goes on sending legs to a dead one until it misses them, and each is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdflow.faults.plan import Crash
from pdflow.protocol.ids import EngineInfo, engine_of, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill
from pdflow.routing.events import DecodeEnded, EngineChanged, PrefillAnswered
from pdflow.wiring.stores import LOADS
from sim.aggregated_node import AggregatedNode
from sim.decode_node import DecodeNode
from sim.engine_node import EngineNode

if TYPE_CHECKING:
    from sim.build import Builder, Place
    from sim.faults import Faults


class Lives:
    """Which life each engine is in. Engines are named by the id of their first life."""

    def __init__(self, faults: Faults, builder: Builder) -> None:
        self.faults = faults
        self.world = builder.world
        self.builder = builder
        self.lives: dict[EngineId, int] = {}
        """By place: how many restarts so far."""
        self.names: dict[EngineId, EngineId] = {}
        """The place of an engine that came back under another id."""
        self.down: dict[EngineId, Crash] = {}

    def node(self, name: EngineId) -> EngineNode:
        """The life that this engine is in."""
        place = self.builder.places[name]
        return self.world.node_at(place.pool.leg, place.position)

    def place_of(self, engine: EngineId) -> EngineId:
        """How the plan calls the engine of that id, or of the one that it loads as."""
        engine = engine.removesuffix(LOADS)
        return self.names.get(engine, engine)

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
        place = self.builder.places[name]
        world.router.breaks(place.pool.leg, place.position)
        if fault.restart_after_ns is not None:
            world.env.call(fault.restart_after_ns, self.restart, name)
        return True

    def restart(self, name: EngineId) -> None:
        """It is up again, and knows nothing."""
        fault = self.down.pop(name, None)
        if fault is None:
            return
        world, place, old = self.world, self.builder.places[name], self.node(name)
        life = self.lives[name] = self.lives.get(name, 0) + 1
        info = EngineInfo(old.name, self.builder.infos[place.pool.leg][place.position].shards)
        if fault.new_engine_id:
            info = EngineInfo(f"{name}+{life}", info.shards)
            self.names[info.engine] = name
            self.keep_nics(old.name, info)
            world.fabric.paths.pool_of[info.engine] = place.pool
        first_rank = world.fabric.ports.get(rank_address(old.name, 0))
        incarnation = 0 if first_rank is None else first_rank.incarnation
        if not fault.same_incarnation:
            incarnation += 1 << 32
        new = self.enter(place, old, info, incarnation)
        new.busy_before_ps, new.peak_blocks = old.busy_before_ps, old.peak_blocks
        new.prefix_cache_before = old.prefix_cache()
        new.watch(world.observe)
        new.clock = old.clock
        self.faults.hindrances.attach(new)
        if world.heartbeats is not None:
            world.heartbeats.begin(place)
        else:
            world.router.later(EngineChanged(old.name, True, info if fault.new_engine_id else None))

    def keep_nics(self, before: EngineId, info: EngineInfo) -> None:
        """Another id, the same hardware."""
        for rank in range(info.shards.ranks):
            self.world.fabric.paths.keep(rank_address(before, rank), rank_address(info.engine, rank))

    def enter(self, place: Place, old: EngineNode, info: EngineInfo, incarnation: int) -> EngineNode:
        generation, builder, world = old.newest_generation(), self.builder, self.world
        if place.pool.role == "prefill":
            prefill = builder.prefill(place, info, incarnation, generation)
            world.prefills[place.position] = prefill
            return prefill
        new: AggregatedNode | DecodeNode
        if place.pool.role == "decode":
            new = world.decodes[place.position] = builder.decode(place, info, incarnation, generation)
        else:
            new = world.prefills[place.position] = builder.aggregated(place, info, generation)
        new.steps_before = sum(int(column[3].sum()) for column in world.steps[info.engine].folds())
        return new

    def refuse(self, effect: Any) -> None:
        """Nobody listens at that port: a new leg fails one hop later, and nothing else is there to be told."""
        if type(effect) is DispatchPrefill:
            self.world.router.later(PrefillAnswered(effect.request_id, None, Code.PEER_DEAD))
        elif type(effect) in (DispatchDecode, DispatchAlone):
            self.world.router.later(DecodeEnded(effect.request_id, Code.PEER_DEAD))

"""Engines that report to the router, again and again: how it knows who is there, where [router] says so.

All engines of a world's beginning have just reported, and their next reports are spread evenly over the time between
two. One that comes up reports at once. A dead one says nothing, nor one that is scaled down or stands still; the latter
reports as soon as it goes on. A report takes one hop, unless a fault of the way to the router loses it.

Who is a member for it is decided in `pdflow.routing.heartbeats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId
from pdflow.routing.events import EngineReported

if TYPE_CHECKING:
    from sim.engine_node import EngineNode
    from sim.engine_slot import EngineSlot, EngineSlots
    from sim.world import World


class Heartbeats:
    """Args: `every_ns`: between two reports of an engine."""

    def __init__(self, world: World, slots: EngineSlots, every_ns: int) -> None:
        self.world = world
        self.env = world.env
        self.every_ns = every_ns
        self.turns: dict[EngineId, int] = dict.fromkeys(slots.by_name, 0)
        """By slot: so that a report that was due is not sent beside those of a new beginning."""
        router = self.world.router
        for number, slot in enumerate(slots.by_name.values(), 1):
            if self.is_up(slot):
                router.feed(router.port, self.report(slot))
            self.later(slot, every_ns * number // len(slots.by_name))

    def begin(self, slot: EngineSlot) -> None:
        """Its engine has come up."""
        self.turns[slot.name] += 1
        self.send(slot)
        self.later(slot, self.every_ns)

    def later(self, slot: EngineSlot, wait_ns: int) -> None:
        self.env.looks += 1
        self.env.call(wait_ns, self.due, (slot, self.turns[slot.name]))

    def due(self, about: tuple[EngineSlot, int]) -> None:
        self.env.looks -= 1
        slot, turn = about
        if turn != self.turns[slot.name] or self.world.done or not self.env.goes_on:
            return
        still_ns = self.node(slot).paused_until - self.env.now
        if still_ns > 0:
            self.later(slot, still_ns)
            return
        self.send(slot)
        self.later(slot, self.every_ns)

    def send(self, slot: EngineSlot) -> None:
        faults = self.world.faults
        if self.is_up(slot) and (faults is None or not faults.hindrances.loses_report(slot.name)):
            self.world.router.later(self.report(slot))

    def node(self, slot: EngineSlot) -> EngineNode:
        return self.world.node_at(slot.leg, slot.position)

    def is_up(self, slot: EngineSlot) -> bool:
        scaling = self.world.scaling
        return self.node(slot).alive and (scaling is None or scaling.runs(slot))

    def report(self, slot: EngineSlot) -> EngineReported:
        leg = slot.leg
        return EngineReported(leg, slot.position, EngineInfo(self.node(slot).name, slot.info.shards))

"""Engines that report to the router, again and again: how it knows who is there, where [router] says so.

All engines of a world's beginning have just reported, and their next reports are spread evenly over the time between
two. One that comes up reports at once. A dead one says nothing, nor one that is scaled down or stands still; the latter
reports as soon as it goes on. A report takes one hop, unless a fault of the way to the router loses it.

Who is a member for it is decided in `pdflow.routing.heartbeats`.
"""

from __future__ import annotations

from collections.abc import Callable

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId
from pdflow.routing.events import EngineReported
from pdflow_sim.clients.clients import Clients
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.membership.scaling import Scaling
from pdflow_sim.nodes.registry import NodeRegistry


class Heartbeats:
    """Args:
    every_ns: between two reports of an engine.
    scaling: who starts and stops engines, if anybody does.
    """

    def __init__(self, clients: Clients, nodes: NodeRegistry, scaling: Scaling | None, every_ns: int) -> None:
        self.clients = clients
        self.env = clients.env
        router = self.router = clients.router
        self.nodes = nodes
        self.scaling = scaling
        if scaling is not None:
            scaling.on_start = self.begin
        self.every_ns = every_ns
        self.is_lost: Callable[[EngineId], bool] | None = None
        """Whether a fault loses a report of the engine in the slot of this name."""
        slots = nodes.slots
        self.turns: dict[EngineId, int] = dict.fromkeys(slots.by_name, 0)
        """By slot: so that a report that was due is not sent beside those of a new beginning."""
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
        if turn != self.turns[slot.name] or self.clients.done or not self.env.goes_on:
            return
        still_ns = self.nodes.at(slot).paused_until - self.env.now
        if still_ns > 0:
            self.later(slot, still_ns)
            return
        self.send(slot)
        self.later(slot, self.every_ns)

    def send(self, slot: EngineSlot) -> None:
        if self.is_up(slot) and (self.is_lost is None or not self.is_lost(slot.name)):
            self.router.link.later(self.report(slot))

    def is_up(self, slot: EngineSlot) -> bool:
        return self.nodes.at(slot).alive and (self.scaling is None or self.scaling.runs(slot))

    def report(self, slot: EngineSlot) -> EngineReported:
        leg = slot.leg
        return EngineReported(leg, slot.position, EngineInfo(self.nodes.at(slot).name, slot.info.shards))

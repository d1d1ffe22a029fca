"""Heartbeats of engines to the router, by which it knows which engines are there, where [router] says so.

All engines that are up when a world begins have just reported, and their next reports are spread evenly over the time
between two. An engine that comes up reports at once. One that is dead, scaled down or paused does not report; a paused
one does as soon as it goes on. A report takes one hop, unless a fault of the way to the router loses it.

`pdflow.routing.heartbeats` decides which engines are members.
"""

from __future__ import annotations

from collections.abc import Callable

from simpy.events import Process

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId
from pdflow.routing.events import EngineReported
from pdflow_sim.clients.clients import Clients
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.environment import ClockEnvironment, ProcessSteps
from pdflow_sim.membership.scaling import Scaling
from pdflow_sim.nodes.registry import NodeRegistry


class Heartbeats:
    """Sends the heartbeats of engines, one simpy process per engine.

    Args:
    every_ns: between two reports of an engine.
    scaling: starts and stops engines; None if nothing does.
    """

    def __init__(
        self, env: ClockEnvironment, clients: Clients, nodes: NodeRegistry, scaling: Scaling | None, every_ns: int
    ) -> None:
        self.env = env
        self.clients = clients
        self.clock = clients.clock
        router = self.router = clients.router
        self.nodes = nodes
        self.scaling = scaling
        if scaling is not None:
            scaling.on_start = self.begin
        self.every_ns = every_ns
        self.is_lost: Callable[[EngineId], bool] | None = None
        """Returns True if a fault loses a report of the engine in the slot of this name."""
        self.reporting: dict[EngineId, Process] = {}
        """The process that reports for each engine, by slot. One that began before it ends at its next report."""
        slots = nodes.slots
        for number, slot in enumerate(slots.by_name.values(), 1):
            if self.is_up(slot):
                router.feed(router.port, self.report(slot))
            self.start(slot, every_ns * number // len(slots.by_name))

    def begin(self, slot: EngineSlot) -> None:
        """Report an engine that has come up, and go on from there."""
        self.send(slot)
        self.start(slot, self.every_ns)

    def start(self, slot: EngineSlot, wait_ns: int) -> None:
        self.reporting[slot.name] = self.env.process(self.reports(slot, wait_ns))

    def reports(self, slot: EngineSlot, wait_ns: int) -> ProcessSteps:
        """Report after `wait_ns`, and again every `every_ns`."""
        while True:
            yield self.env.background_timeout(wait_ns)
            if self.reporting[slot.name] is not self.env.active_process:
                return
            if self.clients.done or not self.clock.has_work:
                return
            wait_ns = self.nodes.at(slot).paused_until - self.clock.now
            if wait_ns <= 0:
                self.send(slot)
                wait_ns = self.every_ns

    def send(self, slot: EngineSlot) -> None:
        if self.is_up(slot) and (self.is_lost is None or not self.is_lost(slot.name)):
            self.router.link.later(self.report(slot))

    def is_up(self, slot: EngineSlot) -> bool:
        return self.nodes.at(slot).alive and (self.scaling is None or self.scaling.runs(slot))

    def report(self, slot: EngineSlot) -> EngineReported:
        leg = slot.leg
        return EngineReported(leg, slot.position, EngineInfo(self.nodes.at(slot).name, slot.info.shards))

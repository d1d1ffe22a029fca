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
    from sim.build import Builder, Place
    from sim.engine_node import EngineNode


class Heartbeats:
    """Args: `every_ns`: between two reports of an engine."""

    def __init__(self, builder: Builder, every_ns: int) -> None:
        self.builder = builder
        self.world = builder.world
        self.env = builder.world.env
        self.every_ns = every_ns
        self.turns: dict[EngineId, int] = dict.fromkeys(builder.places, 0)
        """By place: so that a report that was due is not sent beside those of a new beginning."""
        router = self.world.router
        for number, place in enumerate(builder.places.values(), 1):
            if self.is_up(place):
                router.feed(router.port, self.report(place))
            self.later(place, every_ns * number // len(builder.places))

    def begin(self, place: Place) -> None:
        """Its engine has come up."""
        self.turns[place.name] += 1
        self.send(place)
        self.later(place, self.every_ns)

    def later(self, place: Place, wait_ns: int) -> None:
        self.env.looks += 1
        self.env.call(wait_ns, self.due, (place, self.turns[place.name]))

    def due(self, about: tuple[Place, int]) -> None:
        self.env.looks -= 1
        place, turn = about
        if turn != self.turns[place.name] or self.world.done or not self.env.goes_on:
            return
        still_ns = self.node(place).paused_until - self.env.now
        if still_ns > 0:
            self.later(place, still_ns)
            return
        self.send(place)
        self.later(place, self.every_ns)

    def send(self, place: Place) -> None:
        faults = self.world.faults
        if self.is_up(place) and (faults is None or not faults.hindrances.loses_report(place.name)):
            self.world.router.later(self.report(place))

    def node(self, place: Place) -> EngineNode:
        return self.world.node_at(place.pool.leg, place.position)

    def is_up(self, place: Place) -> bool:
        scaling = self.world.scaling
        return self.node(place).alive and (scaling is None or scaling.runs(place))

    def report(self, place: Place) -> EngineReported:
        leg = place.pool.leg
        shards = self.builder.infos[leg][place.position].shards
        return EngineReported(leg, place.position, EngineInfo(self.node(place).name, shards))

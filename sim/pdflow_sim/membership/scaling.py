"""Engines that start and stop while requests come: on a schedule, or with the load.

All engines that there will ever be are in the world from the start; those that are down get no legs and compute
nothing. One that is to start gets legs after its lag, in which its handshakes take place if connections are warm. One
that is to stop drains: it ends the legs that it has, a prefill engine also holds its KV until the protocol has
released it, and then it is down. Its caches stay warm if it comes up again, which flatters it.

The scenario or `pdflow.routing.scaling` decides how many engines there should be.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from simpy.events import Process

from pdflow.protocol.values import MS, EngineId, Instant
from pdflow.routing.events import EngineJoins, EngineLeaves
from pdflow.routing.scaling import Autoscaler
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scale import Scale
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow_sim.clients.clients import Clients
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.environment import ClockEnvironment, ProcessSteps
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.registry import NodeRegistry

LOOK_NS: Final = 10 * MS
"""How often an engine that has no legs is asked whether it still holds KV."""


class State(IntEnum):
    DOWN = 0
    STARTING = 1
    SERVING = 2
    LEAVING = 3


class Member:
    """One engine of a pool that is scaled."""

    __slots__ = ("since", "slot", "spans", "starting", "state")

    def __init__(self, slot: EngineSlot, state: State) -> None:
        self.slot = slot
        self.state = state
        self.since: Instant = 0
        """When its GPUs were last taken."""
        self.spans: list[tuple[Instant, Instant]] = []
        """The earlier times for which its GPUs were taken: from when to when."""
        self.starting: Process | None = None
        """The process that brings it up, unless its start is called off."""


class Scaling:
    """Starts and stops the engines of all pools that have a [[scale]]."""

    def __init__(
        self, env: ClockEnvironment, clients: Clients, nodes: NodeRegistry, scenario: ResolvedScenario
    ) -> None:
        self.env = env
        self.clients = clients
        self.clock = clients.clock
        self.metrics = clients.metrics
        self.router = clients.router
        self.nodes = nodes
        self.on_start: Callable[[EngineSlot], None] | None = None
        """Called when an engine has come up."""
        self.pools: dict[str, list[Member]] = {}
        for scale in scenario.scales:
            if scale.pool not in self.pools:
                self.pools[scale.pool] = self.members(scenario.pool(scale.pool))
        for scale in scenario.scales:
            if scale.at_s is not None:
                env.process(self.scale_once(scale, seconds_to_ns(scale.at_s)))
            else:
                assert scale.target_queue is not None
                stabilization_ns = seconds_to_ns(scale.calm_s)
                scaler = Autoscaler(scale.target_queue, scale.min_replicas, scale.most, stabilization_ns)
                env.process(self.autoscale(scale, scaler))
        self.router.on_engine_left = self.left

    def members(self, pool: Pool) -> list[Member]:
        """Return the members of a pool. Those beyond its `replicas` are down, which the router is notified of."""
        there = self.nodes.slots.of_pool(pool.name)
        members = [Member(slot, State.SERVING if i < pool.replicas else State.DOWN) for i, slot in enumerate(there)]
        for member in members[pool.replicas :]:
            self.notify_router(EngineLeaves(member.slot.name))
        return members

    def notify_router(self, event: EngineLeaves | EngineJoins) -> None:
        self.router.feed(self.router.port, event)

    def node(self, member: Member) -> SimEngineNode:
        """Return the current incarnation of a member's engine."""
        return self.nodes.at(member.slot)

    def runs(self, slot: EngineSlot) -> bool:
        """True if the engine of this slot has been started, and not stopped."""
        members = self.pools.get(slot.pool.name, ())
        return not any(member.slot is slot and member.state < State.SERVING for member in members)

    # How many.

    def scale_once(self, scale: Scale, at_ns: Instant) -> ProcessSteps:
        """Set the number of engines that the scenario orders, at the time that it gives."""
        assert scale.replicas is not None
        yield self.env.timeout(at_ns)
        if not self.clients.done:
            self.set(scale, scale.replicas)

    def autoscale(self, scale: Scale, scaler: Autoscaler) -> ProcessSteps:
        """Set the number of engines by the load, again and again, for as long as it can change."""
        while True:
            yield self.env.background_timeout(seconds_to_ns(scale.every_s))
            if self.clients.done or not self.clock.has_work:
                return
            self.set(scale, scaler.desired_replicas(self.legs(scale.pool), self.clock.now))

    def legs(self, pool: str) -> int:
        """Return how many legs are open at the pool's engines, by the router's count."""
        router = self.router.endpoint
        members = self.pools[pool]
        choice = router.decode_choice if members[0].slot.leg == "decode" else router.prefill_choice
        return sum(choice.loads[member.slot.position] for member in members)

    def set(self, scale: Scale, desired: int) -> None:
        """Start or stop engines until `desired` serve. The lowest numbers serve, but an engine that is leaving comes
        back before another is started, and one that is starting goes before one that serves.
        """
        members = self.pools[scale.pool]
        there = [member for member in members if member.state in (State.STARTING, State.SERVING)]
        there.sort(key=lambda member: (member.state, -member.slot.position))
        for member in there[: max(0, len(there) - desired)]:
            self.stop(member)
        away = [member for member in members if member.state in (State.LEAVING, State.DOWN)]
        away.sort(key=lambda member: (-member.state, member.slot.position))
        for member in away[: max(0, desired - len(there))]:
            self.start(member, seconds_to_ns(scale.start_lag_s))

    # Starting and stopping.

    def start(self, member: Member, lag_ns: int) -> None:
        if member.state == State.LEAVING:
            member.state = State.SERVING
            self.notify_router(EngineJoins(self.node(member).name))
            return
        member.state = State.STARTING
        member.since = self.clock.now
        member.starting = self.env.process(self.come_up(member, lag_ns))

    def come_up(self, member: Member, lag_ns: int) -> ProcessSteps:
        """Bring an engine up after the lag, unless the start was called off meanwhile."""
        yield self.env.timeout(lag_ns)
        if member.starting is not self.env.active_process:
            return
        member.starting = None
        if not self.node(member).alive:
            self.close(member)
            return
        member.state = State.SERVING
        self.count("started")
        self.notify_router(EngineJoins(self.node(member).name))
        if self.on_start is not None:
            self.on_start(member.slot)

    def stop(self, member: Member) -> None:
        if member.state == State.STARTING:
            member.starting = None
            self.close(member)
            return
        member.state = State.LEAVING
        self.notify_router(EngineLeaves(self.node(member).name))

    def left(self, engine: EngineId) -> None:
        """Drain an engine at which no leg is left, nor KV that one needs, by the router's count."""
        for members in self.pools.values():
            for member in members:
                if member.state == State.LEAVING and self.node(member).name == engine:
                    self.env.process(self.drain(member))

    def drain(self, member: Member) -> ProcessSteps:
        """Stop a member when its engine holds no KV any more, unless it has been started again."""
        while member.state == State.LEAVING:
            node = self.node(member)
            if not (node.alive and node.left_over()):
                self.count("stopped")
                self.close(member)
                return
            yield self.env.timeout(LOOK_NS)

    def close(self, member: Member) -> None:
        """Mark a member as down: its GPUs are free."""
        member.state = State.DOWN
        member.spans.append((member.since, self.clock.now))

    def count(self, what: str) -> None:
        self.metrics.count(f"engine {what}")

    def up_ns(self, engine: EngineId) -> Instant | None:
        """Return how long the GPUs of an engine were taken up to the run's end; None if nothing scales its pool."""
        end = self.metrics.totals.duration_ns
        for members in self.pools.values():
            for member in members:
                if self.node(member).name == engine:
                    spans = [*member.spans] if member.state == State.DOWN else [*member.spans, (member.since, end)]
                    return sum(max(0, min(to, end) - since) for since, to in spans)
        return None

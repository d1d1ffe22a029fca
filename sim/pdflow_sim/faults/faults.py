"""Applies a plan of faults to a run: draws when each begins and ends, and executes it.

What faults do to messages and operations is in `faulty_fabric`, crashes and restarts in `faults.restarts`, wrong clocks
in `faults.clock_skew`. A run without faults has none of these. From `heal_ns` on no fault acts, nor after the end of
the last request: what is held then must come back, and a run comes to rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from pdflow.faults.draw import Numbers, Streams, Window, windows
from pdflow.faults.plan import Crash, Fault, HangUp, NicDown, Partition, PauseEngine, Skew, Slow
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import EngineId, Instant
from pdflow.results.totals import FaultTotals
from pdflow.workload.request import Request
from pdflow_sim.clients.clients import Clients
from pdflow_sim.clock import AFTER_ENGINES, INPUT
from pdflow_sim.environment import ClockEnvironment, ProcessSteps
from pdflow_sim.faults.clock_skew import SkewedClock
from pdflow_sim.faults.failover import Failover
from pdflow_sim.faults.faulty_fabric import FaultyFabric
from pdflow_sim.faults.restarts import EngineLifecycle
from pdflow_sim.network.paths import Nic
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import Observer
from pdflow_sim.nodes.registry import NodeRegistry

REPORTED = (Crash, NicDown, Partition, PauseEngine, Slow)
"""Faults whose consequences for requests a result reports one by one."""


class ActiveFault:
    """One fault with its windows, at one engine if it happens to engines."""

    __slots__ = ("engine", "fault", "windows")

    def __init__(self, fault: Fault, engine: EngineId | None, numbers: Numbers) -> None:
        self.fault = fault
        self.engine = engine
        self.windows: Iterator[Window] = windows(fault.when, numbers)


class FaultInjector:
    """Applies a plan of faults: one simpy process per fault, and one for each window, pause or client that ends later.

    Args: `streams` gives the stream of random numbers of a name.
    """

    def __init__(
        self,
        env: ClockEnvironment,
        streams: Streams,
        clients: Clients,
        nodes: NodeRegistry,
        fabric: FaultyFabric,
        lifecycle: EngineLifecycle,
    ) -> None:
        self.env = env
        self.clock = clients.clock
        self.clients = clients
        clients.on_arrival.append(self.arrived)
        self.router = clients.router
        self.nodes = nodes
        self.fabric = fabric
        self.active = fabric.faults
        plan = self.plan = fabric.faults.plan
        self.streams = streams
        self.healed = False
        self.lifecycle = lifecycle
        self.clocks: dict[EngineId, SkewedClock] = {}
        """The clocks of engines that have ever run wrong."""
        self.open: dict[int, ActiveFault] = {}
        """Windows that are open and will end, by a number of their own."""
        self.windows = 0
        self.acted: list[FaultTotals] = []
        """What has happened so far of the kinds that are reported, in order."""
        self.waiting: list[Any] = []
        self.slowed: dict[int, list[float]] = {}
        """The factors by which the bandwidth of each resource of the network is divided."""
        self.hang_ups: list[HangUp] = []
        self.failover = Failover(fabric)
        self.actions: dict[
            type, tuple[Callable[[ActiveFault, Instant | None], None], Callable[[ActiveFault], None] | None]
        ] = {
            Crash: (self.crash, None),
            PauseEngine: (self.pause, None),
            Skew: (self.skew, self.unskew),
            Slow: (self.slow, self.unslow),
            NicDown: (self.lose_nic, self.regain_nic),
            HangUp: (self.hang_up, self.stop_hanging_up),
        }
        for fault in plan.faults:
            engines: tuple[EngineId | None, ...] = (None,)
            if isinstance(fault, (Crash, NicDown, PauseEngine, Skew, Slow)):
                engines = fault.engines or (None,)
            for engine in engines:
                name = fault.name if engine is None else f"{fault.name}/{engine}"
                env.process(self.follow(ActiveFault(fault, engine, streams(f"faults/{name}/times"))))
        if plan.heal_ns is not None:
            env.process(self.heal(plan.heal_ns))

    def observer(self, oracle: Oracle) -> Observer:
        """Return the observer of all events, so that the oracle also sees what no endpoint reports."""
        return self.fabric.witness.before(oracle, self.fabric.stale)

    # When.

    def follow(self, course: ActiveFault) -> ProcessSteps:
        """Open the windows of one fault, one after the other."""
        # A pause begins between steps that end and steps that start.
        priority = AFTER_ENGINES if isinstance(course.fault, PauseEngine) else INPUT
        heal_ns = self.plan.heal_ns
        for begins, until in course.windows:
            if heal_ns is not None and begins >= heal_ns:
                return
            if begins > self.clock.now:
                yield self.env.timeout_at_priority(begins - self.clock.now, priority)
            if self.clients.done or self.healed:
                return
            self.begin(course, until)

    def begin(self, course: ActiveFault, until: Instant | None) -> None:
        fault = course.fault
        if isinstance(fault, REPORTED):
            self.record(fault, course.engine, until)
        action = self.actions.get(type(fault))
        if action is not None:
            action[0](course, until)
        else:
            self.fabric.begin_fault(fault)
        if action is None or action[1] is not None:
            self.windows += 1
            self.open[self.windows] = course
            if until is not None:
                self.env.process(self.end_at(self.windows, until))

    def record(self, fault: Fault, engine: EngineId | None, until: Instant | None) -> None:
        """Record that a fault acts, unless it happens to an engine that is down."""
        now = self.clock.now
        heal_ns = self.plan.heal_ns
        if isinstance(fault, Crash):
            until = None if fault.restart_after_ns is None else now + fault.restart_after_ns
        if heal_ns is not None:
            until = heal_ns if until is None else min(until, heal_ns)
        if engine is None or self.lifecycle.node(engine).alive:
            kind = fault.name.partition("/")[0]
            self.acted.append(FaultTotals(name=kind, engine=engine or "", begin_ns=now, end_ns=until))

    def end_at(self, window: int, at: Instant) -> ProcessSteps:
        yield self.env.timeout(at - self.clock.now)
        self.end(window)

    def end(self, window: int) -> None:
        course = self.open.pop(window, None)
        if course is None:
            return
        action = self.actions.get(type(course.fault))
        if action is None:
            self.fabric.end_fault(course.fault)
        elif action[1] is not None:
            action[1](course)

    def heal(self, at: Instant) -> ProcessSteps:
        """End all faults at this time, and bring every engine up."""
        yield self.env.timeout(at)
        self.end_faults()
        for name in list(self.lifecycle.down):
            self.lifecycle.restart(name)

    def end_faults(self) -> None:
        """End all faults: from now on none acts. An engine that is down without a time to come back stays down."""
        self.healed = True
        for window in list(self.open):
            self.end(window)
        for node in self.nodes.engines():
            if node.paused_until > self.clock.now:
                node.paused_until = self.clock.now
                self.resume(node)

    # What.

    def crash(self, course: ActiveFault, until: Instant | None) -> None:
        if self.lifecycle.crash(cast(Crash, course.fault), cast(EngineId, course.engine)):
            self.active.count(course.fault)

    def pause(self, course: ActiveFault, until: Instant | None) -> None:
        fault, node = cast(PauseEngine, course.fault), self.lifecycle.node(cast(EngineId, course.engine))
        if not node.alive or until is None:
            return
        if self.plan.heal_ns is not None:
            until = min(until, self.plan.heal_ns)
        self.active.count(fault)
        if fault.only_engine:
            node.stretch(until)
            return
        node.ingress = self.deferring(node)
        node.pause(until)
        self.env.process(self.resume_at(node, until))

    def deferring(self, node: SimEngineNode) -> Callable[[Any], None]:
        def wait(effect: Any) -> None:
            self.waiting.append((node, effect))

        return wait

    def resume_at(self, node: SimEngineNode, at: Instant) -> ProcessSteps:
        yield self.env.timeout(at - self.clock.now)
        self.resume(node)

    def resume(self, node: SimEngineNode) -> None:
        if not node.alive or node.ingress is None or node.paused_until > self.clock.now:
            return
        node.ingress = None
        node.resume()
        mine = [effect for at, effect in self.waiting if at is node]
        self.waiting = [item for item in self.waiting if item[0] is not node]
        for effect in mine:
            self.router.arrivals[type(effect)](effect)

    def skew(self, course: ActiveFault, until: Instant | None) -> None:
        fault = cast(Skew, course.fault)
        self.set_clock(cast(EngineId, course.engine), fault.speed, fault.offset_ns)
        self.active.count(fault)

    def unskew(self, course: ActiveFault) -> None:
        """Restore a clock's right speed; what it has gained it keeps, since no clock goes back."""
        self.set_clock(cast(EngineId, course.engine), 1.0, 0)

    def set_clock(self, name: EngineId, speed: float, ahead_ns: int) -> None:
        node = self.lifecycle.node(name)
        clock = self.clocks.get(name)
        if clock is None:
            clock = self.clocks[name] = node.local_clock = SkewedClock(self.clock)
        clock.set(speed, ahead_ns)
        now = clock.now
        for port in node.ports.values():
            if port.heap:
                node.arm(port, port.heap[0][0], now)

    def slow(self, course: ActiveFault, until: Instant | None) -> None:
        fault = cast(Slow, course.fault)
        self.active.count(fault)
        for resource, _ in self.resources(course):
            self.slowed.setdefault(resource, []).append(fault.factor)
        self.set_bandwidths(course)

    def unslow(self, course: ActiveFault) -> None:
        for resource, _ in self.resources(course):
            self.slowed[resource].remove(cast(Slow, course.fault).factor)
        self.set_bandwidths(course)

    def lose_nic(self, course: ActiveFault, until: Instant | None) -> None:
        self.active.count(course.fault)
        self.failover.lose(self.nics(course))

    def regain_nic(self, course: ActiveFault) -> None:
        self.failover.regain(self.nics(course))

    def nics(self, course: ActiveFault) -> list[Nic]:
        """Return the NICs that fail together: one of each GPU."""
        node, paths = self.lifecycle.node(cast(EngineId, course.engine)), self.fabric.paths
        first, each = cast(NicDown, course.fault).nic, paths.table.nics_per_rank
        ranks = [address for address in node.ports if address != node.name]
        return [(rank, first + each * gpu) for rank in ranks for gpu in range(paths.replicas_of(rank))]

    def set_bandwidths(self, course: ActiveFault) -> None:
        network = self.fabric.network
        for resource, capacity in self.resources(course):
            if capacity is not None:
                for factor in sorted(self.slowed[resource]):
                    capacity = max(1, int(capacity / factor))
                network.set_bandwidth(resource, capacity, self.clock.now)
        self.fabric.arm()

    def resources(self, course: ActiveFault) -> list[tuple[int, int | None]]:
        """Return the links that are slowed, with the bandwidth that they have when they are not."""
        paths = self.fabric.paths
        fault = cast(Slow, course.fault)
        if course.engine is None:
            return [
                (paths.links[link.name], link.bandwidth_bytes_per_s)
                for link in paths.table.links
                if link.name in fault.links
            ]
        node = self.lifecycle.node(course.engine)
        direction = "tx" if node in self.nodes.prefills else "rx"
        nics = [address for address in node.ports if address != node.name]
        rate = paths.table.bandwidth_bytes_per_s
        return [(paths.nic(nic, direction, number), rate) for nic in nics for number in range(paths.nics_of(nic))]

    def hang_up(self, course: ActiveFault, until: Instant | None) -> None:
        fault = cast(HangUp, course.fault)
        if fault.within_ns is not None:
            self.hang_ups.append(fault)
            return
        for request in list(self.router.by_request):
            if self.active.numbers[fault.name].uniform() < fault.probability:
                self.active.count(fault)
                self.router.hang_up(request)

    def stop_hanging_up(self, course: ActiveFault) -> None:
        if self.hang_ups:
            self.hang_ups = [fault for fault in self.hang_ups if fault is not course.fault]

    def arrived(self, request: int, _: Request) -> None:
        """Draw whether and when the client of a new request hangs up."""
        for fault in self.hang_ups:
            assert fault.within_ns is not None
            numbers = self.active.numbers[fault.name]
            leaves, after_ns = numbers.uniform() < fault.probability, 1 + numbers.below(fault.within_ns)
            if leaves:
                self.env.process(self.leave(fault, request, after_ns))

    def leave(self, fault: HangUp, request: int, after_ns: int) -> ProcessSteps:
        """Let the client hang up after that time, if it still waits then."""
        yield self.env.timeout(after_ns)
        if request in self.router.by_request and not self.healed:
            self.active.count(fault)
            self.router.hang_up(request)

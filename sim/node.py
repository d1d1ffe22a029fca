"""A node: the endpoints of one engine, fed in order, their effects executed in order, a timer for each one's deadlines.

What one endpoint tells another of the same engine goes through the node's queue, so that no endpoint is ever entered
while an effect of its last turn is still to be executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from pdflow.protocol.effects import Fence, Handshake, Note, Send, Tell
from pdflow.protocol.events import TimeReached
from pdflow.protocol.values import Address, Instant
from sim.clock import DEADLINE

if TYPE_CHECKING:
    from sim.world import Observer, World

TIME_REACHED = TimeReached()
FAR: Instant = 1 << 62


class Endpoint(Protocol):
    """The doors of an endpoint that a carrier uses. Events and effects are typed by each endpoint itself."""

    timed: bool
    """Whether it has `deadlines` at all."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]: ...
    def wake_at(self) -> Instant | None: ...


class Port:
    """One endpoint at its node: its address, its process's incarnation, and when its timer rings."""

    __slots__ = ("address", "armed", "endpoint", "heap", "incarnation", "lane_free", "node")

    def __init__(self, node: Node, address: Address, endpoint: Endpoint, incarnation: int) -> None:
        self.node = node
        self.address = address
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.armed: Instant = FAR
        self.heap: list[tuple[Instant, int, Any]] = cast(Any, endpoint).deadlines.heap if endpoint.timed else []
        """The endpoint's own heap of deadlines: `wake_at` without the call, after every event."""
        self.lane_free: Instant = 0
        """When this rank has posted all that it was asked to post so far."""


class Node:
    """Feeds its endpoints. Subclasses add what their effects do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.env = world.env
        self.ports: dict[Address, Port] = {}
        self.queue: deque[tuple[Port, Any]] = deque()
        self.busy = False
        self.receive: Callable[[Port, Any], None] = self.feed
        """What has come over the fabric, and deadlines, go in here: at once, unless a kind of node polls for them."""
        self.observe: Observer | None = None
        self.clock: Any = world.env
        """Where its endpoints see the time; not the world's, where a fault has it run wrong (`sim.skew`)."""
        self.do: dict[type, Callable[[Port, Any], None]] = {
            Send: world.fabric.send,
            Handshake: self.handshake,
            Fence: self.fence,
            Note: self.note,
        }

    def add(self, address: Address, endpoint: Endpoint, incarnation: int) -> Port:
        port = self.ports[address] = Port(self, address, endpoint, incarnation)
        self.world.fabric.ports[address] = port
        return port

    def newest_generation(self) -> int:
        """The last one of its pool so far, if it has blocks."""
        return 0

    def feed(self, port: Port, event: Any) -> None:
        """Hand an event to an endpoint, and do all that follows from it."""
        queue = self.queue
        if self.busy:
            queue.append((port, event))
            return
        self.busy = True
        do, ports, observe = self.do, self.ports, self.observe
        now: Instant = self.clock.now
        while True:
            effects = port.endpoint.handle(event, now)
            if observe is not None:
                observe(port.address, event, effects, self.env.now)
            for effect in effects:
                kind = type(effect)
                if kind is Tell:
                    queue.append((ports[effect.to], effect.event))
                else:
                    do[kind](port, effect)
            heap = port.heap
            if heap and heap[0][0] < port.armed:
                self.arm(port, heap[0][0], now)
            if not queue:
                break
            port, event = queue.popleft()
        self.busy = False

    def arm(self, port: Port, at: Instant, now: Instant) -> None:
        port.armed = at
        wait = max(0, at - now)
        if self.clock is not self.env:
            wait = self.clock.real(wait)
        self.env.call(wait, self.ring, (port, at), DEADLINE)

    def ring(self, about: tuple[Port, Instant]) -> None:
        port, at = about
        if port.armed != at:
            return
        port.armed = FAR
        self.receive(port, TIME_REACHED)

    # Effects that mean the same at every node.

    def handshake(self, port: Port, effect: Handshake) -> None:
        self.world.fabric.handshake(port, effect.peer)

    def fence(self, port: Port, effect: Fence) -> None:
        self.world.fabric.fence(port, effect.peer)

    def note(self, port: Port, effect: Note) -> None:
        notes = self.world.totals.notes
        notes[effect.name] = notes.get(effect.name, 0) + 1

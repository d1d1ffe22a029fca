"""A node: the core of one engine, handed its events in order, its effects executed in order, with a timer for each of
its endpoints.

What executing an effect leads to goes through the node's queue, so that the core is never entered while an effect of
its last turn is still to be executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from pdflow.protocol.effects import Fence, Handshake, Note, Send
from pdflow.protocol.events import TimeReached
from pdflow.protocol.values import NEVER, Address, Instant
from pdflow.serving.core import Core, Endpoint
from pdflow.serving.core import Port as CorePort
from sim.clock import DEADLINE, Clock
from sim.skew import SkewedClock

if TYPE_CHECKING:
    from sim.world import Observer, World

TIME_REACHED = TimeReached()
FAR: Instant = NEVER


class Port(CorePort):
    """One endpoint at its node, and when its timer rings."""

    __slots__ = ("lane_free", "node")

    def __init__(self, node: Node, address: Address, endpoint: Endpoint, incarnation: int) -> None:
        super().__init__(address, endpoint, incarnation)
        self.node = node
        self.armed = FAR
        self.lane_free: Instant = 0
        """When this rank has posted all that it was asked to post so far."""


class Node:
    """Feeds its core. Subclasses add what the effects do. Args: `core`: the rules of its role, if it has any."""

    def __init__(self, world: World, core: Core | None = None) -> None:
        self.world = world
        self.env = world.env
        self.core = core or Core()
        self.role = self.core.role
        self.ports: dict[Address, Port] = cast(Any, self.core.ports)
        self.receive: Callable[[Port, Any], None] = self.feed
        """What has come over the fabric, and deadlines, go in here: at once, unless a kind of node polls for them."""
        self.clock: Clock | SkewedClock = world.env
        """Where its endpoints see the time; not the world's, where a fault has it run wrong (`skew.py`)."""
        self.do: dict[type, Callable[[Any, Any], None]] = {
            Send: world.fabric.send,
            Handshake: self.handshake,
            Fence: self.fence,
            Note: self.note,
        }
        self.core.do = self.do
        self.perform: dict[type, Callable[[Any, Any], None]] = self.core.perform
        self.core.arm = self.arm

    def add(self, address: Address, endpoint: Endpoint, incarnation: int) -> Port:
        port = Port(self, address, endpoint, incarnation)
        self.core.add(port)
        self.world.fabric.ports[address] = port
        return port

    def watch(self, observe: Observer | None) -> None:
        """Show every event into and effect out of every endpoint to `observe(node, event, effects, now)`."""
        if observe is None:
            self.core.observe = None
            return

        def turned(port: Any, event: Any, effects: tuple[Any, ...], _: Instant) -> None:
            # By the world's clock, whatever this node's own says.
            observe(port.address, event, effects, self.env.now)

        self.core.observe = turned

    def newest_generation(self) -> int:
        """The last one of its pool so far, if it has blocks."""
        return 0

    def feed(self, port: CorePort, event: Any) -> None:
        """Hand an event to the core, and do all that follows from it."""
        self.core.feed(port, event, self.clock.now)

    def arm(self, port: Port, at: Instant, now: Instant) -> None:
        port.armed = at
        wait = max(0, at - now)
        clock = self.clock
        if isinstance(clock, SkewedClock):
            wait = clock.real(wait)
        self.env.call(wait, self.ring, (port, at), DEADLINE + port.order)

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

"""A node: it hands events to the core of one process in order, executes the core's effects in order, and has a timer
for each of its endpoints.

What executing an effect leads to goes through the node's queue, so that the core is never entered while an effect of
its last turn is still to be executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from pdflow.methods.shipment import Piece
from pdflow.methods.wire_profile import Side
from pdflow.protocol.effects import Note
from pdflow.protocol.events import TimeReached
from pdflow.protocol.invariants.accounting import miscounted
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.invariants.timers import too_late, unscheduled
from pdflow.protocol.values import NEVER, Address, Instant
from pdflow.serving.core import Core, Endpoint, Port
from pdflow_sim.clock import DEADLINE, Clock
from pdflow_sim.faults.clock_skew import SkewedClock
from pdflow_sim.observe.run_metrics import RunMetrics

Observer: TypeAlias = Callable[[Address, Any, tuple[Any, ...], Instant], None]
"""Shown every event into and effect out of an endpoint: (its address, the event, the effects, when)."""

TIME_REACHED = TimeReached()
FAR: Instant = NEVER


class SimPort(Port):
    """One endpoint at its node, with its timer."""

    __slots__ = ("lanes_free", "node", "side", "since")

    def __init__(
        self, node: SimNode, address: Address, endpoint: Endpoint, incarnation: int, side: Side = Side.P
    ) -> None:
        super().__init__(address, endpoint, incarnation)
        self.node = node
        self.side = side
        """The side of transfers on which the endpoint is."""
        self.since: Instant = node.clock.now
        """When its process started."""
        self.armed = FAR
        self.lanes_free: list[Instant] = [0] * node.lanes
        """When each of this rank's posting lanes has posted all that it was asked to post so far."""


class SimNode:
    """Feeds events to its core; subclasses add what the effects do. Args: `core`: the rules of its role, if any."""

    def __init__(self, clock: Clock, metrics: RunMetrics, core: Core | None = None) -> None:
        self.clock = clock
        self.metrics = metrics
        self.core = core or Core()
        self.role = self.core.role
        self.ports: dict[Address, SimPort] = cast(Any, self.core.ports)
        self.receive: Callable[[SimPort, Any], None] = self.feed
        """Takes what has come over the fabric, and deadlines: at once, unless a kind of node polls for them."""
        self.local_clock: Clock | SkewedClock = clock
        """The clock that its endpoints read: not the world's where a fault makes it run wrong (`clock_skew.py`)."""
        self.alive = True
        self.paused_until: Instant = 0
        self.makes_contact = True
        """True if its ranks make themselves known, where a method as published has words for that."""
        self.lanes = 1
        """The posting lanes of each rank: one for each replica of its attention."""
        self.posts_on_engine = False
        """True if the thread that launches its engine's steps posts its transfers."""
        self.in_host_memory = False
        """True if its blocks are in its host's memory, so that nothing is copied on the host."""
        self.observer: Observer | None = None
        self.on_turn: Callable[[SimNode], None] | None = None
        """Called after each turn, where a run is checked."""
        self.do: dict[type, Callable[[Any, Any], None]] = {Note: self.note}
        self.core.do = self.do
        self.perform: dict[type, Callable[[Any, Any], None]] = self.core.perform
        self.core.arm = self.arm

    def watch(self, observe: Observer | None) -> None:
        """Show every event into and effect out of every endpoint to `observe(node, event, effects, now)`."""
        self.observer = observe
        if observe is None:
            self.core.observe = None
            return

        def turned(port: Any, event: Any, effects: tuple[Any, ...], _: Instant) -> None:
            # By the world's clock, whatever this node's own says.
            observe(port.address, event, effects, self.clock.now)

        self.core.observe = turned

    # What the network asks.

    def newest_generation(self) -> int:
        """Return the newest generation of its pool so far; 0 if it has no blocks."""
        return 0

    def left_of_step(self) -> int:
        """Return the ns until the step that its GPUs compute is done; 0 if there is none."""
        return 0

    def post_until(self, until: Instant) -> None:
        """Keep the thread that launches steps busy with posting until then."""
        raise NotImplementedError

    @property
    def refuses_pieces(self) -> bool:
        """True if it takes in a piece of a transfer only if there is room for it; otherwise pieces wait in turn."""
        raise NotImplementedError

    def takes_piece(self, rank: Address, generation: int, piece: Piece) -> bool:
        """Take room for this piece. False if there is none."""
        raise NotImplementedError

    def await_room(self, rank: Address, generation: int, piece: Piece, then: Callable[[], None]) -> None:
        """Call `then` when there is room for this piece."""
        raise NotImplementedError

    def open_transfers(self) -> str:
        """Describe, in words, what its endpoints must not have at rest and have (L8), such as a transfer that is still
        open, or what is wrong with their counts and wake-ups (S10, S11, L12); "" if nothing."""
        for port in self.ports.values():
            left = leftovers(port.endpoint)
            if left:
                of = "" if port.endpoint is None else f", of {port.endpoint.unfinished()}"
                return f"{port.address} still has {left}{of}"
            wrong = unscheduled(port.endpoint) or miscounted(port.endpoint)
            wrong = wrong or too_late(port.endpoint, self.local_clock.now)
            if wrong:
                return f"at {port.address}, {wrong}"
        return ""

    def unfulfilled(self) -> str:
        """Describe, in words, which effect of its core the node has not carried out, in memory or by waking its engine
        (S12); "" if none. To be called between turns."""
        return ""

    # Its core.

    def feed(self, port: Port, event: Any) -> None:
        """Hand an event to the core, and execute all that follows from it."""
        self.core.feed(port, event, self.local_clock.now)
        if self.on_turn is not None:
            self.on_turn(self)

    def arm(self, port: SimPort, at: Instant, now: Instant) -> None:
        port.armed = at
        self.clock.call(self.local_clock.real(max(0, at - now)), self.ring, (port, at), DEADLINE + port.order)

    def ring(self, arg: tuple[SimPort, Instant]) -> None:
        port, at = arg
        if port.armed != at:
            return
        port.armed = FAR
        self.receive(port, TIME_REACHED)

    def note(self, port: SimPort, effect: Note) -> None:
        self.metrics.count(effect.name)

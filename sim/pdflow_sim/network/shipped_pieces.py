"""Operations that go in pieces, and their pieces in flight, as `pdflow_sim.network.shipping` keeps them."""

from __future__ import annotations

from collections import deque
from typing import Any

from pdflow.methods.lanes import Lanes
from pdflow.methods.method import Hop
from pdflow.methods.shipment import Piece
from pdflow.protocol.values import Xid
from pdflow_sim.clock import Clock
from pdflow_sim.network.flight import Flight
from pdflow_sim.network.paths import Route


class PieceCarrier:
    """The interface of a piece in flight to its carrier."""

    clock: Clock
    stages: tuple[Any, ...]
    """The stages of every piece, in order."""

    def turn(self, in_flight: PieceInFlight, stage: str) -> None:
        """Take a piece through a stage that is no hop."""
        raise NotImplementedError

    def hop(self, in_flight: PieceInFlight, hop: Hop) -> None:
        """Take a piece over one hop."""
        raise NotImplementedError

    def arrived(self, in_flight: PieceInFlight) -> None:
        """Handle a piece that has passed its last stage."""
        raise NotImplementedError

    def lost(self, in_flight: PieceInFlight) -> None:
        """Handle a piece that will not land."""
        raise NotImplementedError


class PieceQueue:
    """The pieces that a rank takes in, or serves: so many at a time; later ones wait in turn."""

    __slots__ = ("free", "waiting")

    def __init__(self, width: int) -> None:
        self.free = width
        self.waiting: deque[PieceInFlight] = deque()

    def enter(self, in_flight: PieceInFlight) -> None:
        if self.free:
            self.free -= 1
            in_flight.go_on()
        else:
            self.waiting.append(in_flight)

    def leave(self) -> None:
        if self.waiting:
            self.waiting.popleft().go_on()
        else:
            self.free += 1


class ShippedOperation:
    """One operation under way that goes in pieces."""

    __slots__ = ("flight", "lanes", "layers", "over", "parked", "route", "tokens", "xid")

    def __init__(
        self, flight: Flight, route: Route, xid: Xid, layers: int, tokens: int, lanes: Lanes[ShippedOperation]
    ) -> None:
        self.flight = flight
        """The operation as a whole, whose end is reported."""
        self.route = route
        self.xid = xid
        self.layers = layers
        self.tokens = tokens
        self.lanes = lanes
        """The lanes of the rank that posts it."""
        self.parked: list[PieceInFlight] = []
        """Pieces that stand still."""
        self.over = False
        """True if its request has ended: nothing of it is waited for."""


class PieceInFlight:
    """One piece that has been posted and has not ended."""

    __slots__ = ("carrier", "nbytes", "operation", "piece", "queue", "stages")

    def __init__(self, carrier: PieceCarrier, operation: ShippedOperation, piece: Piece, nbytes: int) -> None:
        self.carrier = carrier
        self.operation = operation
        self.piece = piece
        self.nbytes = nbytes
        self.stages: deque[Any] = deque(carrier.stages)
        """The stages that it still has to pass: PEER, ASK and the like, or a hop."""
        self.queue: PieceQueue | None = None
        """The queue in which it has, or waits for, its turn at the other rank."""

    def go_on(self, _: None = None) -> None:
        """Begin the next stage, or end behind the last one. A piece whose mover is dead is lost instead."""
        carrier, flight = self.carrier, self.operation.flight
        if not (flight.d_port if flight.reads else flight.p_port).node.alive:
            carrier.clock.call(0, carrier.lost, self)
            return
        if not self.stages:
            carrier.arrived(self)
            return
        stage = self.stages.popleft()
        if type(stage) is str:
            carrier.turn(self, stage)
        else:
            carrier.hop(self, stage)

    def ended(self, ok: bool) -> None:
        """Go on after a hop; lose the piece if the hop failed."""
        if ok:
            self.go_on()
        else:
            self.carrier.lost(self)


def describe_piece(piece: Piece, layers: int) -> str:
    """Describe a piece in words."""
    which = f"layer {piece.layer}" if layers > 1 else "all layers"
    return f"{which}, tokens {piece.start} to {piece.stop}"

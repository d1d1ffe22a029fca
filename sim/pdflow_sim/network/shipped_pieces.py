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
    """What a piece in flight asks of what carries it."""

    clock: Clock
    stages: tuple[Any, ...]
    """What every piece goes through, in order."""

    def turn(self, in_flight: PieceInFlight, stage: str) -> None:
        """Take it through a stage that is no hop."""
        raise NotImplementedError

    def hop(self, in_flight: PieceInFlight, hop: Hop) -> None:
        """Take it over one hop."""
        raise NotImplementedError

    def arrived(self, in_flight: PieceInFlight) -> None:
        """It has passed its last stage."""
        raise NotImplementedError

    def lost(self, in_flight: PieceInFlight) -> None:
        """It will not land."""
        raise NotImplementedError


class PieceQueue:
    """What a rank takes in, or serves: so many pieces at a time; what comes later waits in turn."""

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
    """One operation under way."""

    __slots__ = ("flight", "lanes", "layers", "over", "parked", "route", "tokens", "xid")

    def __init__(
        self, flight: Flight, route: Route, xid: Xid, layers: int, tokens: int, lanes: Lanes[ShippedOperation]
    ) -> None:
        self.flight = flight
        """The operation as a whole: what is told of its end."""
        self.route = route
        self.xid = xid
        self.layers = layers
        self.tokens = tokens
        self.lanes = lanes
        """Of the rank that posts it."""
        self.parked: list[PieceInFlight] = []
        """Pieces that stand still."""
        self.over = False
        """Its request has ended: nothing of it is waited for."""


class PieceInFlight:
    """One piece on its way: it has been posted."""

    __slots__ = ("nbytes", "operation", "piece", "queue", "shipping", "stages")

    def __init__(self, shipping: PieceCarrier, operation: ShippedOperation, piece: Piece, nbytes: int) -> None:
        self.shipping = shipping
        self.operation = operation
        self.piece = piece
        self.nbytes = nbytes
        self.stages: deque[Any] = deque(shipping.stages)
        """What it still has to go through: PEER, ASK and the like, or a hop."""
        self.queue: PieceQueue | None = None
        """In which it has, or waits for, its turn at the other rank."""

    def go_on(self, _: None = None) -> None:
        """Through the next stage, or to the end. The dead begin nothing."""
        shipping, flight = self.shipping, self.operation.flight
        if not (flight.d_port if flight.reads else flight.p_port).node.alive:
            shipping.clock.call(0, shipping.lost, self)
            return
        if not self.stages:
            shipping.arrived(self)
            return
        stage = self.stages.popleft()
        if type(stage) is str:
            shipping.turn(self, stage)
        else:
            shipping.hop(self, stage)

    def ended(self, ok: bool) -> None:
        """A hop is done."""
        if ok:
            self.go_on()
        else:
            self.shipping.lost(self)


def describe_piece(piece: Piece, layers: int) -> str:
    """A piece, as a person says it."""
    which = f"layer {piece.layer}" if layers > 1 else "all layers"
    return f"{which}, tokens {piece.start} to {piece.stop}"

"""The state of one explored request: the stage of each of its pieces, and the room that it has."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from pdflow.methods.shipment import Shipment
from pdflow.protocol.values import Allocation


class PieceStage(IntEnum):
    """The stage of a piece."""

    TO_COME = 0
    COMPUTED = 1
    READY = 2
    POSTED = 3
    """Waiting for D: its listener, or room."""
    TAKEN = 4
    """On its way into D's memory."""
    LANDED = 5
    LOST = 6


class RequestPhase(IntEnum):
    """The phase of a request."""

    UNASKED = 0
    ASKED = 1
    """D waits for room."""
    OPEN = 2
    HERE = 3
    """D has all, as far as it knows."""
    ADMITTED = 4
    LOADED = 5
    DONE = 6
    FAILED = 7
    """To be computed again."""


class ExploredRequest:
    __slots__ = ("known", "p", "phase", "shipment", "source", "stages", "target")

    def __init__(self, p: int, pieces: int) -> None:
        self.p = p
        self.phase = RequestPhase.UNASKED
        self.stages = [PieceStage.TO_COME] * pieces
        self.shipment: Shipment | None = None
        self.source: dict[str, Allocation] = {}
        """By name, its allocations in P's staging memory."""
        self.target: dict[str, Allocation] = {}
        self.known: Hashable = None
        """Cached fingerprint."""

    def fork(self) -> ExploredRequest:
        other = ExploredRequest(self.p, 0)
        other.phase = self.phase
        other.stages, other.source, other.target = self.stages.copy(), self.source.copy(), self.target.copy()
        other.shipment = None if self.shipment is None else self.shipment.fork()
        return other

    def fingerprint(self) -> Hashable:
        if self.known is None:
            shipment = None if self.shipment is None else self.shipment.fingerprint()
            self.known = self.phase, tuple(self.stages), shipment, tuple(self.source), tuple(self.target)
        return self.known

"""Landing in staging memory as published: each piece of a prompt gets room by itself, and none before it arrives.

A request registers at once, whatever is left of the memory. All ranks' memories are filled alike, so one stands for
all: a piece has room when the first of its ranks' shares arrives. A piece that finds none waits its turn (#18332, where
all memory may then be parts of prompts of which none is whole), or is refused by the listener that takes it in
(#18242). Only `as-published` lands so: it is simulated, and never served.
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import TypeAlias

from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging, TooLargeError
from pdflow.protocol.effects import Enqueue
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Port
from pdflow.serving.decode_request import DecodeRequest
from pdflow.serving.decode_requests import DecodeRequests
from pdflow.serving.effects import AcceptPiece, GiveBackRoom, TakePiece
from pdflow.serving.events import EntryDue, PieceArrived, RoomDue
from pdflow.serving.landing import Landing, StagedLanding

PieceKey: TypeAlias = tuple[int, int]
"""A piece, by the model's layer and its first token."""


class PieceLanding(StagedLanding):
    """Landing that gives each piece room of its own. Args: `staging` is that of one rank, in which each piece has a
    name of its own."""

    def __init__(self, staging: Staging, by_layer: bool = False) -> None:
        super().__init__(staging, by_layer)
        self.allocations: dict[int, dict[PieceKey, Allocation]] = {}
        """The room of each prompt's pieces, by the prompt's generation."""

    def begin(self, requests: DecodeRequests) -> None:
        super().begin(requests)
        requests.core.rules[EntryDue] = self.enter

    def enqueue(self, _: Port, effect: Enqueue) -> None:
        """Queue a request's admission behind all that the protocol does now, which may end the request at once."""
        core = self.requests.core
        core.send_local(core.role, EntryDue(effect.request_id))

    def enter(self, event: EntryDue) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is None:
            return
        self.staging.generation += 1
        staged = request.staged = Allocation(self.staging.generation, ())
        self.allocations[staged.generation] = {}
        self.admit(request, staged, 0)

    def has(self, generation: int, piece: Piece) -> bool:
        """Whether this piece has room, or needs none any more."""
        allocations = self.allocations.get(generation)
        return allocations is None or (piece.layer, piece.start) in allocations

    def put(self, generation: int, piece: Piece, allocation: Allocation) -> None:
        """Record the room that a piece has been given."""
        self.allocations[generation][piece.layer, piece.start] = allocation

    def layers_of(self, staged: Allocation) -> int:
        """Return how many of a prompt's layers have a piece there."""
        return len({layer for layer, _ in self.allocations[staged.generation]})

    def release(self, staged: Allocation) -> None:
        allocations = self.allocations.pop(staged.generation)
        self.requests.emit(GiveBackRoom(staged))
        for allocation in allocations.values():
            self.staging.release(allocation)

    def resolved(self, request: DecodeRequest) -> None:
        request.staged = None

    def staged(self) -> Container[int] | None:
        return self.allocations

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), tuple(
            [(key, tuple(allocations.items())) for key, allocations in self.allocations.items()]
        )

    def assert_empty(self, whose: str) -> None:
        super().assert_empty(whose)
        assert not self.allocations, f"{whose} still holds {self.allocations}"


class ListeningLanding(PieceLanding):
    """Landing in which a piece that finds no room does not wait. Whether it is refused, or ends the listener that has
    it, is decided elsewhere."""

    def takes(self, generation: int, piece: Piece) -> bool:
        """Give this piece room. False if there is none."""
        if self.has(generation, piece):
            return True
        name = name_of(generation, piece)
        try:
            self.staging.enqueue(name, piece.stop - piece.start)
        except TooLargeError:
            return False
        admission = self.staging.admit_next()
        if admission is None:
            self.staging.forget(name)
            return False
        self.put(generation, piece, admission[1])
        return True


class QueueingLanding(PieceLanding):
    """Landing in which a piece that finds no room waits in turn. Args: `layers` are those of a rank."""

    def __init__(self, staging: Staging, layers: int, by_layer: bool = False) -> None:
        super().__init__(staging, by_layer)
        self.layers = layers
        self.waiting: dict[str, PieceArrived] = {}
        """Pieces that wait for room, by their names in the memory."""

    def begin(self, requests: DecodeRequests) -> None:
        super().begin(requests)
        requests.core.rules[PieceArrived] = self.arrived

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        request = self.requests.by_handle[effect.request_id]
        if self.staging.fits_ever(self.layers * request.prompt_tokens):
            super().enqueue(port, effect)
        else:
            Landing.rejected(self, request)

    def arrived(self, event: PieceArrived) -> None:
        name, piece = name_of(event.generation, event.piece), event.piece
        if self.has(event.generation, piece):
            self.requests.emit(AcceptPiece(name))
        elif name not in self.waiting:
            self.waiting[name] = event
            self.staging.enqueue(name, piece.stop - piece.start)
            self.ask()

    def admit_next(self, _: RoomDue) -> None:
        self.asked = False
        requests = self.requests
        while (admission := self.staging.admit_next()) is not None:
            name, allocation = admission
            waiting = self.waiting.pop(name)
            self.put(waiting.generation, waiting.piece, allocation)
            requests.emit(TakePiece(waiting.rank, waiting.piece))
            requests.emit(AcceptPiece(name))

    def release(self, staged: Allocation) -> None:
        super().release(staged)
        for name in [name for name, waits in self.waiting.items() if waits.generation == staged.generation]:
            del self.waiting[name]
            self.staging.forget(name)
            self.requests.emit(AcceptPiece(name))
        self.ask()

    def assert_empty(self, whose: str) -> None:
        super().assert_empty(whose)
        assert not self.waiting, f"{whose} still waits for {list(self.waiting)}"


def name_of(generation: int, piece: Piece) -> str:
    """Return the name under which a piece asks for room."""
    return f"{generation}.{piece.layer}.{piece.start}"

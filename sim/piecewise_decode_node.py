"""A decode engine that has room for each piece of a prompt by itself, and for nothing before: as the originals do.

It registers a prompt at once, whatever there is left of its memory. All ranks' memories are filled alike, so one stands
for all: a piece has room when the first of its ranks' shares comes. What becomes of one that finds none is each
original's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pdflow.engine.engine import Engine
from pdflow.methods.method import Hop, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import Enqueue
from pdflow.protocol.events import DecodeAdmitted
from pdflow.protocol.values import Address, Allocation
from pdflow.results.records import D_ADMIT
from sim.node import Port
from sim.prefill_node import WEIGHTS
from sim.staged_decode_node import StagedDecodeNode

if TYPE_CHECKING:
    from sim.world import World

Part: TypeAlias = tuple[int, int]
"""A piece, by the model's layer and its first token."""


class PiecewiseDecodeNode(StagedDecodeNode):
    """Args: staging is that of one rank, in which each piece has a name of its own."""

    def __init__(
        self,
        world: World,
        index: int,
        name: str,
        engine: Engine,
        block_bytes: int,
        method: Method,
        staging: Staging,
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes, method, staging)
        self.parts: dict[int, dict[Part, Allocation]] = {}
        """By a prompt's generation: where its pieces lie."""

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg, records = self.legs[effect.request_id], self.world.records
        self.staging.generation += 1
        place = self.places[leg.request_id] = Allocation(self.staging.generation, ())
        self.parts[place.generation] = {}
        records.ends[D_ADMIT][leg.request] = self.env.now
        tokens, digest = records.input_tokens[leg.request], self.world.digest(leg.request)
        self.feed(self.scheduler, DecodeAdmitted(leg.request_id, place, 0, tokens, digest, WEIGHTS))

    def has(self, generation: int, piece: Piece) -> bool:
        """Whether this piece has room, or needs none any more."""
        parts = self.parts.get(generation)
        return parts is None or (piece.layer, piece.start) in parts

    def put(self, rank: Address, generation: int, piece: Piece, part: Allocation) -> None:
        """It has room from now on."""
        self.parts[generation][piece.layer, piece.start] = part
        if self.world.tell is not None:
            self.world.tell(rank, f"takes room for {words(piece)} in {self.method.d_memory.value}")

    def vacate(self, allocation: Allocation) -> None:
        parts = self.parts.pop(allocation.generation)
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.d_memory.value}")
        for part in parts.values():
            self.staging.release(part)

    def ways(self, place: Allocation) -> list[tuple[Hop, int]]:
        assert self.method.loading is not None
        return [(self.method.loading, len({layer for layer, _ in self.parts[place.generation]}))]

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.parts, f"{self.name} still keeps {self.parts}"


def name_of(generation: int, piece: Piece) -> str:
    """As what a piece asks for room."""
    return f"{generation}.{piece.layer}.{piece.start}"


def words(piece: Piece) -> str:
    return f"layer {piece.layer}, tokens {piece.start} to {piece.stop},"

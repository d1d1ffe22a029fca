"""A decode engine that has room for a piece when it comes, and for nothing before: as PR #18242 was published.

It registers a prompt at once, whatever there is left of its memory; each piece asks for room of its own. Whether one
that finds none is refused, or ends the listener that has it, is `sim.shipping`'s to carry out. All ranks' memories are
filled alike, so one of them stands for all: a layer has room when the first of its ranks' pieces comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.methods.method import Hop, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import BufferStaging, TooLargeError
from pdflow.protocol.effects import Enqueue
from pdflow.protocol.events import DecodeAdmitted
from pdflow.protocol.values import Address, Allocation
from pdflow.results.records import D_ADMIT
from sim.node import Port
from sim.prefill_node import WEIGHTS
from sim.staged_decode_node import StagedDecodeNode

if TYPE_CHECKING:
    from sim.world import World


class ListeningDecodeNode(StagedDecodeNode):
    """Args: staging is that of one rank, in which each piece has a name of its own."""

    def __init__(
        self,
        world: World,
        index: int,
        name: str,
        engine: Engine,
        block_bytes: int,
        method: Method,
        staging: BufferStaging,
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes, method, staging)
        self.buffer = staging
        self.parts: dict[int, dict[int, Allocation]] = {}
        """By a prompt's generation: where its layers lie."""

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg, records = self.legs[effect.request_id], self.world.records
        self.buffer.generation += 1
        place = self.places[leg.request_id] = Allocation(self.buffer.generation, ())
        self.parts[place.generation] = {}
        records.ends[D_ADMIT][leg.request] = self.env.now
        tokens, digest = records.input_tokens[leg.request], self.world.digest(leg.request)
        self.feed(self.scheduler, DecodeAdmitted(leg.request_id, place, 0, tokens, digest, WEIGHTS))

    def takes(self, rank: Address, generation: int, piece: Piece) -> bool:
        """Whether there is room for this piece, which it then has."""
        parts = self.parts.get(generation)
        if parts is None or piece.layer in parts:
            return True
        name = f"{generation}.{piece.layer}"
        try:
            self.buffer.want(name, piece.stop - piece.start)
        except TooLargeError:
            return False
        served = self.buffer.serve()
        if served is None:
            self.buffer.forget(name)
            return False
        parts[piece.layer] = served[1]
        if self.world.tell is not None:
            self.world.tell(rank, f"takes room for layer {piece.layer} in {self.method.d_memory.value}")
        return True

    def vacate(self, allocation: Allocation) -> None:
        parts = self.parts.pop(allocation.generation)
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.d_memory.value}")
        for part in parts.values():
            self.buffer.release(part)

    def ways(self, place: Allocation) -> list[tuple[Hop, int]]:
        parts = self.parts[place.generation]
        spilled = sum(self.buffer.spilled(part) for part in parts.values())
        assert self.method.loading is not None
        return [(self.method.loading, len(parts) - spilled), (Hop.H2D, spilled)]

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.parts, f"{self.name} still keeps {self.parts}"

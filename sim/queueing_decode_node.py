"""A decode engine at which each piece waits in turn for room, as PR #18332 was published.

All its memory may then be parts of prompts of which none is whole, and each waits for what another one holds: nothing
comes free until the deadline of a request does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.methods.method import Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import Enqueue
from pdflow.protocol.events import DecodeAborted
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Allocation
from sim.node import Port
from sim.piecewise_decode_node import PiecewiseDecodeNode, name_of

if TYPE_CHECKING:
    from sim.world import World


class Asking:
    """A piece that waits for room."""

    __slots__ = ("generation", "piece", "rank", "then")

    def __init__(self, rank: Address, generation: int, piece: Piece) -> None:
        self.rank = rank
        self.generation = generation
        self.piece = piece
        self.then: list[Callable[[], None]] = []
        """What goes on with it."""


class QueueingDecodeNode(PiecewiseDecodeNode):
    """Args: layers are those of a rank."""

    def __init__(
        self,
        world: World,
        index: int,
        name: str,
        engine: Engine,
        block_bytes: int,
        method: Method,
        staging: Staging,
        layers: int,
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes, method, staging)
        self.layers = layers
        self.asking: dict[str, Asking] = {}

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        tokens = self.world.records.input_tokens[self.legs[effect.request_id].request]
        if self.staging.fits_ever(self.layers * tokens):
            super().enqueue(port, effect)
        else:
            self.feed(self.scheduler, DecodeAborted(effect.request_id, Code.REJECTED))

    def ask(self, rank: Address, generation: int, piece: Piece, then: Callable[[], None]) -> None:
        """Go on when there is room for this piece."""
        if self.has(generation, piece):
            then()
            return
        name = name_of(generation, piece)
        if name not in self.asking:
            self.asking[name] = Asking(rank, generation, piece)
            self.staging.want(name, piece.stop - piece.start)
            self.grant()
        self.asking[name].then.append(then)

    def grant_all(self, _: None) -> None:
        self.granting = False
        while self.alive and (served := self.staging.serve()) is not None:
            name, part = served
            asking = self.asking.pop(name)
            self.put(asking.rank, asking.generation, asking.piece, part)
            for then in asking.then:
                then()

    def vacate(self, allocation: Allocation) -> None:
        gone = [name for name, asking in self.asking.items() if asking.generation == allocation.generation]
        super().vacate(allocation)
        for name in gone:
            self.staging.forget(name)
            for then in self.asking.pop(name).then:
                then()
        self.grant()

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.asking, f"{self.name} still waits for {list(self.asking)}"

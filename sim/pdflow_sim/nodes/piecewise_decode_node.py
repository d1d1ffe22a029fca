"""A decode engine at which each piece of a prompt has room by itself (`pdflow/serving/pieces.py`), as `as-published`
methods have it: how pieces get room, and how they get into blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from pdflow.methods.method import Hop, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import BufferStaging
from pdflow.protocol.values import Address, Allocation
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import AcceptPiece, TakePiece
from pdflow.serving.events import PieceArrived
from pdflow.serving.pieces import ListeningLanding, PieceLanding, QueueingLanding, name_of
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.nodes.staged_decode_node import SimStagedDecodeNode


class PiecewiseDecodeNode(SimStagedDecodeNode):
    def __init__(
        self,
        components: EngineComponents,
        core: DecodeCore,
        method: Method,
        landing: PieceLanding,
    ) -> None:
        super().__init__(components, core, method, landing.staging)
        self.landing = landing
        self.then: dict[str, list[Callable[[], None]]] = {}
        """Continuations of pieces that wait for room, by the piece's name."""
        self.perform[TakePiece] = self.take_piece
        self.perform[AcceptPiece] = self.accept_piece

    @property
    def refuses_pieces(self) -> bool:
        """True if its listener takes in a piece only if there is room for it; otherwise pieces wait in turn."""
        return isinstance(self.landing, ListeningLanding)

    def takes_piece(self, rank: Address, generation: int, piece: Piece) -> bool:
        """Take room for this piece at the listener. False if there is none."""
        landing = self.landing
        assert isinstance(landing, ListeningLanding)
        had = landing.has(generation, piece)
        takes = landing.takes(generation, piece)
        if takes and not had:
            self.trace_admission(rank, piece)
        return takes

    def await_room(self, rank: Address, generation: int, piece: Piece, then: Callable[[], None]) -> None:
        """Call `then` when there is room for this piece."""
        assert isinstance(self.landing, QueueingLanding)
        self.then.setdefault(name_of(generation, piece), []).append(then)
        self.feed(self.role, PieceArrived(rank, generation, piece))

    def take_piece(self, port: Port, effect: TakePiece) -> None:
        self.trace_admission(effect.rank, effect.piece)

    def accept_piece(self, port: Port, effect: AcceptPiece) -> None:
        for then in self.then.pop(effect.name):
            then()

    def trace_admission(self, rank: Address, piece: Piece) -> None:
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(
                rank, f"reserves memory for {describe_piece(piece)} in {self.method.d_memory.value}"
            )

    def load_hops(self, staged: Allocation) -> list[tuple[Hop, int]]:
        """Return the hops into KV blocks, and how many layers go over each: what is in the host's memory goes over
        PCIe.
        """
        assert self.method.loading is not None
        landing = self.landing
        if not isinstance(landing, ListeningLanding):
            return [(self.method.loading, landing.layers_of(staged))]
        staging = landing.staging
        assert isinstance(staging, BufferStaging)
        allocations = landing.allocations[staged.generation]
        spilled = sum(staging.spilled(allocation) for allocation in allocations.values())
        return [(self.method.loading, len(allocations) - spilled), (Hop.H2D, spilled)]

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.then, f"{self.name} still waits for {list(self.then)}"


def describe_piece(piece: Piece) -> str:
    return f"layer {piece.layer}, tokens {piece.start} to {piece.stop},"

"""A decode engine whose listener takes pieces in: what finds no room does not wait, as PR #18242 was published.

Whether it is refused, or ends the listener that has it, is `sim.shipping`'s to carry out.
"""

from __future__ import annotations

from pdflow.methods.method import Hop
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import BufferStaging, TooLargeError
from pdflow.protocol.values import Address, Allocation
from sim.piecewise_decode_node import PiecewiseDecodeNode, name_of


class ListeningDecodeNode(PiecewiseDecodeNode):
    def takes(self, rank: Address, generation: int, piece: Piece) -> bool:
        """Whether there is room for this piece, which it then has."""
        if self.has(generation, piece):
            return True
        name = name_of(generation, piece)
        try:
            self.staging.want(name, piece.stop - piece.start)
        except TooLargeError:
            return False
        served = self.staging.serve()
        if served is None:
            self.staging.forget(name)
            return False
        self.put(rank, generation, piece, served[1])
        return True

    def ways(self, place: Allocation) -> list[tuple[Hop, int]]:
        """What lies in the host's memory comes over PCIe."""
        assert self.method.loading is not None
        assert isinstance(self.staging, BufferStaging)
        parts = self.parts[place.generation]
        spilled = sum(self.staging.spilled(part) for part in parts.values())
        return [(self.method.loading, len(parts) - spilled), (Hop.H2D, spilled)]

"""The node of a prefill engine that sends a prompt layer by layer, from its blocks or from memory beside them.

What is sent when is decided in `pdflow/serving/sending.py` and `staged_sending.py`. Copies are made at once, in trio's
thread: so nothing of a place is being written when that is released. A layer of a chunk is copied or sent as soon as it
is computed, while the engine computes the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.engine.sequence import ChunkBegun
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.serving.core import Endpoint, Port
from pdflow.serving.effects import (
    CopyOut,
    HoldEngine,
    LeaveRoom,
    OfferPiece,
    ResumeEngine,
    TakeRoom,
    WithdrawPieces,
)
from pdflow.serving.events import ChunkStarted, CopiedOut, LayerReady
from pdflow.serving.sending import Sending
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg, LivePrefillNode
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.nodes.ranks import Rank
from pdflow_runtime.transports.base import MakeTransport


class LiveLayeredPrefillNode(LivePrefillNode):
    """The node of a prefill engine that sends a prompt layer by layer. Args: `staging` is that of each rank, if there
    is any."""

    def __init__(
        self,
        config: NodeConfig,
        scheduler: ProducerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        sending: Sending,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(config, scheduler, ranks, transport, sending)
        self.staging = staging
        self.layers = config.shape.num_layers
        self.step = 0
        """The number of the step that runs, or comes next."""
        self.perform.update(
            {
                OfferPiece: self.offer_piece,
                WithdrawPieces: self.withdraw_pieces,
                CopyOut: self.copy_out,
                TakeRoom: self.take_room,
                LeaveRoom: self.leave_room,
                HoldEngine: self.hold_engine,
                ResumeEngine: self.resume_engine,
            }
        )

    def is_drained(self) -> bool:
        """True if the blocks are free and no room beside them is held any more."""
        return super().is_drained() and (self.staging is None or not self.staging.held)

    # What the engine computes.

    def chunk_begun(self, leg: LivePrefillLeg, chunk: ChunkBegun) -> None:
        known = chunk.computed + chunk.new
        self.feed(self.role, ChunkStarted(leg.xid, self.source(leg), known, self.step))

    def layer_computed(self, layer: int) -> None:
        step = self.step
        if layer == self.layers - 1:
            self.step += 1
        self.feed(self.role, LayerReady(step, layer))

    # What goes.

    def offer_piece(self, port: Port, effect: OfferPiece) -> None:
        ranks = list(self.ranks.values())
        for rank in ranks if effect.rank is None else (ranks[effect.rank],):
            if effect.piece.layer in rank.layers:
                rank.transfers.offer(effect.handle, own_piece(rank, effect.piece))

    def withdraw_pieces(self, port: Port, effect: WithdrawPieces) -> None:
        for rank in self.ranks.values():
            rank.transfers.withdraw(effect.handle)

    def copy_out(self, port: Port, effect: CopyOut) -> None:
        leg, piece = self.legs[effect.handle], effect.piece
        tokens, blocks = len(leg.job.tokens), self.source(leg).blocks
        pieces = [Piece(layer, 0, tokens) for layer in range(self.layers)] if piece is None else [piece]
        for number, rank in enumerate(self.ranks.values()):
            own = [own_piece(rank, each) for each in pieces if each.layer in rank.layers]
            for each in own:
                rank.copy_out(blocks, effect.staged, tokens, each)
            if own:
                self.put(self.role, CopiedOut(effect.handle, piece, number))

    # Room to send from.

    def take_room(self, port: Port, effect: TakeRoom) -> None:
        for rank in self.ranks.values():
            rank.staged[effect.handle] = effect.staged

    def leave_room(self, port: Port, effect: LeaveRoom) -> None:
        for rank in self.ranks.values():
            del rank.staged[effect.handle]

    # The engine waits.

    def hold_engine(self, port: Port, effect: HoldEngine) -> None:
        self.engine.hold()

    def resume_engine(self, port: Port, effect: ResumeEngine) -> None:
        self.engine.resume()


def own_piece(rank: Rank, piece: Piece) -> Piece:
    """Return the same piece, its layer counted among the layers of this rank."""
    return Piece(piece.layer - rank.layers.start, piece.start, piece.stop)

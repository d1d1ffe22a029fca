"""A prefill engine, live, whose blocks are written from while it still computes the prompt, by
`pdflow.methods.in_place`: a layer of a chunk goes as soon as it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.in_place import InPlace
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import ReleaseBlocks
from pdflow.protocol.events import PrefillAborted, PrefillBegun
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import Xid
from pdflow.serving.core import Endpoint, Port
from runtime.diary import RELEASED
from runtime.engines.loop import Told
from runtime.prefill_node import PrefillLeg, PrefillNode
from runtime.ranked_node import Place
from runtime.transports.base import MakeTransport


class ProgressivePrefillNode(PrefillNode):
    """Its engine reports chunks."""

    def __init__(
        self, place: Place, scheduler: ProducerScheduler, ranks: Sequence[Endpoint], transport: MakeTransport
    ) -> None:
        super().__init__(place, scheduler, ranks, transport)
        self.begun = InPlace()
        self.aborted: dict[int, PrefillLeg] = {}
        """Taken back, and computed on, under the identity of the sequence."""
        self.going: list[tuple[Xid, int, int]] = []
        """What of the step that runs goes as each layer comes: of which prompt, from which token to which."""

    def came(self, outcome: Told) -> None:
        if isinstance(outcome, Prefilled) and (aborted := self.aborted.pop(id(outcome.seq), None)) is not None:
            self.over(aborted)
        else:
            super().came(outcome)

    def chunk_begun(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        known = chunk.computed + chunk.new
        if self.begun.begins(leg.xid):
            self.feed(self.scheduler, PrefillBegun(*self.about(leg)))
        self.going.append((leg.xid, self.begun.advance(leg.xid, known), known))

    def layer_computed(self, layer: int) -> None:
        for xid, first, last in self.going:
            if xid in self.by_xid and self.begun.goes(xid):
                for rank in self.ranks.values():
                    if layer in rank.layers:
                        rank.orders.offer(xid, Piece(layer - rank.layers.start, first, last))
        if layer == self.place.shape.num_layers - 1:
            self.going.clear()

    def computed(self, leg: PrefillLeg) -> None:
        super().computed(leg)
        self.over(leg)

    def over(self, leg: PrefillLeg) -> None:
        """Its blocks are the protocol's alone from now on."""
        if self.begun.computed(leg.xid):
            self.end_of(leg)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        for rank in self.ranks.values():
            rank.orders.withdraw(effect.xid)
        leg = self.by_xid[effect.xid]
        self.diary.passed(leg.request_id, RELEASED)
        self.note_expired(effect.code)
        if self.begun.release(effect.xid):
            self.end_of(leg)

    def end_of(self, leg: PrefillLeg) -> None:
        del self.by_xid[leg.xid]
        assert leg.job.seq.allocation is not None
        self.engine.release(leg.job.seq.allocation)

    def abort(self, leg: PrefillLeg) -> None:
        """What has begun is computed on; nothing more of it is sent."""
        if leg.xid not in self.begun or self.by_seq.get(id(leg.job.seq)) is not leg:
            super().abort(leg)
            return
        del self.by_request[leg.request_id], self.by_seq[id(leg.job.seq)]
        self.aborted[id(leg.job.seq)] = leg
        self.put(self.scheduler, PrefillAborted(leg.xid, Code.CANCELLED))

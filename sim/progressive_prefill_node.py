"""A prefill engine whose blocks are written from while it still computes the prompt, layer by layer and chunk by chunk,
by `pdflow.methods.in_place`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.in_place import InPlace
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import ReleaseBlocks, StopWrite
from pdflow.protocol.events import PrefillAborted, PrefillBegun
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from sim.node import Port
from sim.prefill_node import WEIGHTS, PrefillLeg, PrefillNode

if TYPE_CHECKING:
    from sim.world import World


class ProgressivePrefillNode(PrefillNode):
    """Args: layers of the rank with the most."""

    def __init__(self, world: World, index: int, name: str, engine: Engine, block_bytes: int, layers: int) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.layers = layers
        engine.reports_chunks = True
        self.begun = InPlace()
        self.aborted: dict[int, PrefillLeg] = {}
        """Taken back, and computed on, under the identity of the sequence."""
        self.do[StopWrite] = self.stop_write

    def came(self, outcome: object) -> None:
        if type(outcome) is ChunkBegun:
            leg = self.by_seq.get(id(outcome.seq))
            if leg is not None and leg.keeps:
                self.computing(leg, outcome)
            return
        assert type(outcome) is Prefilled
        aborted = self.aborted.pop(id(outcome.seq), None)
        if aborted is not None:
            self.computed(aborted)
            return
        leg = self.by_seq[id(outcome.seq)]
        super().came(outcome)
        if leg.keeps:
            self.computed(leg)

    def computing(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        seq, xid = leg.seq, leg.xid
        if self.begun.begins(xid):
            assert seq.allocation is not None
            source, digest = self.source(seq.allocation), self.world.digest(leg.request)
            self.feed(self.scheduler, PrefillBegun(xid, source, seq.prompt_tokens, digest, WEIGHTS))
        before = self.begun.advance(xid, chunk.computed + chunk.new)
        self.layer_by_layer(chunk, self.layers, before, self.layer_computed, xid)

    def layer_computed(self, about: tuple[Xid, Piece]) -> None:
        xid, piece = about
        if self.alive and xid in self.by_xid and self.begun.goes(xid):
            for rank in self.ranks():
                self.world.shipping.offer(rank.address, xid, piece)

    def computed(self, leg: PrefillLeg) -> None:
        """Its blocks are the protocol's alone from now on."""
        if self.begun.computed(leg.xid):
            self.end_of(leg)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        xid = effect.xid
        for rank in self.ranks():
            self.world.shipping.withdraw(rank.address, xid)
        leg = self.by_xid[xid]
        if self.begun.release(xid):
            self.strand(len(effect.allocation.blocks), leg.finished_ns)
            self.end_of(leg)

    def end_of(self, leg: PrefillLeg) -> None:
        del self.by_xid[leg.xid]
        self.give_back(leg)
        self.rearm()

    def abort(self, request_id: RequestId) -> None:
        """What has begun is computed on; nothing more of it is sent."""
        leg = self.by_request.get(request_id)
        if leg is None or leg.xid not in self.begun:
            super().abort(request_id)
            return
        del self.by_request[request_id], self.by_seq[id(leg.seq)]
        leg.finished_ns = self.env.now
        self.aborted[id(leg.seq)] = leg
        self.feed(self.scheduler, PrefillAborted(leg.xid, Code.CANCELLED))

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.world.shipping.stop(effect.op)

    def assert_empty(self) -> None:
        self.begun.assert_empty(self.name)
        assert not self.aborted, f"{self.name} still computes {self.aborted}"

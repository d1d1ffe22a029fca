"""A prefill engine, live, that sends from memory beside its KV blocks, by `pdflow.methods.departures`.

What it copies it copies at once, in trio's thread: so nothing of a place is being written when that is given back. A
layer of a chunk is copied as soon as it is computed, while the engine computes the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdflow.engine.sequence import ChunkBegun, Dropped, NeverFitsError
from pdflow.methods.departures import Departure, Departures
from pdflow.methods.method import Conduct, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import PostWrite, ReleaseBlocks
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation, Xid
from pdflow.serving.core import Endpoint, Port
from runtime.diary import RELEASED
from runtime.engines.job import Sampling
from runtime.prefill_node import PrefillLeg, PrefillNode
from runtime.ranked_node import Place
from runtime.transports.base import MakeTransport


class StagedPrefillNode(PrefillNode):
    """Args: `staging` is that of each rank."""

    def __init__(
        self,
        place: Place,
        scheduler: ProducerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        method: Method,
        conduct: Conduct,
        staging: Staging,
    ) -> None:
        super().__init__(place, scheduler, ranks, transport)
        self.method = method
        self.conduct = conduct
        self.staging = staging
        self.layers = place.shape.num_layers
        self.departures = Departures(self, method, conduct, staging, self.layers, 1)
        self.awaited: set[Xid] = set()
        """What the engine waits for before it begins another step."""
        self.running: list[ChunkBegun] = []
        """Parts of prompts in the step that runs."""
        self.layers_there = 0
        """Of that step."""
        self.to_copy: list[tuple[Departure, int, int]] = []
        """What of it goes as each layer comes: whose, from which token to which."""

    def begin(self, request_id: str, xid: Xid, tokens: list[int], sampling: Sampling | None = None) -> PrefillLeg:
        if not self.staging.fits_ever(len(tokens)):
            raise NeverFitsError(f"a prompt of {len(tokens)} tokens is too long for {self.method.p_memory.value}")
        return super().begin(request_id, xid, tokens, sampling)

    def abort(self, leg: PrefillLeg) -> None:
        if self.engine.drop(leg.job.seq) is Dropped.NOT_HERE:
            return
        del self.by_request[leg.request_id], self.by_seq[id(leg.job.seq)]
        self.departures.ended(leg.xid)
        self.put(self.scheduler, PrefillAborted(leg.xid, Code.CANCELLED))
        self.wait_no_more(leg.xid)
        self.departures.grant()

    def is_still(self) -> bool:
        """A prompt that has left the blocks is held still."""
        return super().is_still() and not self.departures.outgoing

    # What the engine does.

    def chunk_begun(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        known, tokens = chunk.computed + chunk.new, chunk.seq.prompt_tokens
        if self.departures.concerns(known, tokens):
            self.running.append(chunk)
            self.departures.computing(leg, leg.xid, tokens, known, chunk)

    def layer_computed(self, layer: int) -> None:
        self.layers_there = layer + 1
        for going, first, last in tuple(self.to_copy):
            self.departures.layer_computed(going, Piece(layer, first, last), 1)
        if self.layers_there == self.layers:
            self.running.clear()
            self.to_copy.clear()
            self.layers_there = 0

    def computed(self, leg: PrefillLeg) -> None:
        self.departures.computed(leg, leg.xid, leg.job.seq.prompt_tokens)

    # What `departures` asks for.

    def announce(self, going: Departure) -> None:
        self.put(self.scheduler, PrefillBegun(*self.about(going.leg)))

    def finish(self, going: Departure) -> None:
        self.put(self.scheduler, PrefillFinished(*self.about(going.leg)))

    def about(self, leg: PrefillLeg) -> tuple[Xid, Allocation, int, int, int]:
        """Where D reads it is where it lies; where P writes, it goes by its blocks."""
        xid, source, tokens, digest, weights = super().about(leg)
        place = self.departures.outgoing[xid].place
        lies = place if self.method.pulls and place is not None else source
        return xid, lies, tokens, digest, weights

    def layers_of(self, going: Departure, chunk: Any, before: int) -> None:
        last = chunk.computed + chunk.new
        runs = any(chunk is other for other in self.running)
        if runs:
            self.to_copy.append((going, before, last))
        for layer in range(self.layers_there if runs else self.layers):
            self.departures.layer_computed(going, Piece(layer, before, last), 1)

    def copy_out(self, going: Departure, piece: Piece | None) -> None:
        layers = range(self.layers) if piece is None else (piece.layer,)
        first, last = (0, going.tokens) if piece is None else (piece.start, piece.stop)
        place, allocation = going.place, going.leg.job.seq.allocation
        assert place is not None
        assert allocation is not None
        blocks = self.table(allocation).blocks
        for rank in self.ranks.values():
            for layer in layers:
                if layer in rank.layers:
                    own = Piece(layer - rank.layers.start, first, last)
                    rank.copy_out(blocks, place, going.tokens, own)
                    if not self.method.pulls:
                        rank.orders.offer(going.xid, own)
        self.departures.done_copying(going, 1)

    def has_left(self, going: Departure) -> None:
        leg: PrefillLeg = going.leg
        assert leg.job.seq.allocation is not None
        self.engine.release(leg.job.seq.allocation)

    def forget(self, xid: Xid) -> None:
        self.by_xid.pop(xid, None)

    def took_room(self, going: Departure) -> None:
        assert going.place is not None
        for rank in self.ranks.values():
            rank.places[going.xid] = going.place

    def gave_room_back(self, going: Departure) -> None:
        for rank in self.ranks.values():
            del rank.places[going.xid]

    def recall(self, xid: Xid) -> None:
        for rank in self.ranks.values():
            rank.orders.withdraw(xid)

    def wait_for(self, xid: Xid) -> None:
        self.awaited.add(xid)
        self.engine.hold()

    def wait_no_more(self, xid: Xid) -> None:
        if xid in self.awaited:
            self.awaited.remove(xid)
            if not self.awaited:
                self.engine.let_go()

    # The protocol's effects.

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.departures.written(effect.grant.xid)
        super().post_write(port, effect)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        leg: PrefillLeg = self.departures.outgoing[effect.xid].leg
        self.diary.passed(leg.request_id, RELEASED)
        self.note_expired(effect.code)
        self.departures.released(effect.xid)

"""A decode engine, live, whose KV lands in memory beside its blocks, and is copied into them when its engine has room.

Room there is what D registers; the engine is asked when everything has landed. Blocks are never reached from outside:
what is in quarantine after a failure is a part of that memory. Copies are made at once, in trio's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdflow.engine.sequence import Admitted, NeverFitsError
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging, TooLargeError
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, Quarantine, Resolve
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, RequestId
from runtime.content import digest_of
from runtime.decode_node import DecodeLeg, DecodeNode
from runtime.engines.loop import Told
from runtime.node import Endpoint, Port
from runtime.ranked_node import MakeTransport, Place


class StagedDecodeNode(DecodeNode):
    """Args: `staging` is that of each rank."""

    def __init__(
        self,
        place: Place,
        scheduler: ConsumerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        staging: Staging,
    ) -> None:
        super().__init__(place, scheduler, ranks, transport)
        self.staging = staging
        self.places: dict[RequestId, Allocation] = {}
        """Of requests that have room: landing, or landed."""

    def newest_generation(self) -> int:
        return self.staging.generation

    def is_still(self) -> bool:
        """Room in quarantine is held still."""
        return super().is_still() and not self.staging.held

    # Room to land in.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg = self.legs[effect.request_id]
        try:
            self.staging.want(leg.request_id, len(leg.prompt))
        except TooLargeError:
            self.put(self.scheduler, DecodeAborted(effect.request_id, Code.REJECTED))
            return
        self.grant_soon()

    def grants(self, now: Instant) -> Iterator[tuple[Port, Any]]:
        while (served := self.staging.serve()) is not None:
            request_id, place = served
            leg = self.legs[request_id]
            self.places[request_id] = place
            self.passed(leg, "d_admit")
            leg.granted = True
            tokens, weights = leg.prompt, self.place.weights
            digest = digest_of(tokens, weights)
            yield self.scheduler, DecodeAdmitted(request_id, place, 0, len(tokens), digest, weights)

    def vacate(self, place: Allocation) -> None:
        self.staging.release(place)
        self.grant_soon()

    # The protocol's effects.

    def commit(self, port: Port, effect: Commit) -> None:
        """Everything has landed: now the engine."""
        leg = self.legs[effect.request_id]
        self.passed(leg, "transfer")
        leg.loaded = True
        try:
            self.engine.submit(leg.job)
        except NeverFitsError:
            self.vacate(self.places.pop(leg.request_id))
            self._end(leg, Code.REJECTED)

    def resolve(self, port: Port, effect: Resolve) -> None:
        self.staging.forget(effect.request_id)
        self.places.pop(effect.request_id, None)
        self._end(self.legs[effect.request_id], effect.code)
        self.grant_soon()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """Room that a writer may still reach stays taken."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.vacate(effect.allocation)

    # The engine has made room.

    def came(self, outcome: Told) -> None:
        if isinstance(outcome, Admitted):
            self._load(self.by_seq[id(outcome.seq)])
        else:
            super().came(outcome)

    def _load(self, leg: DecodeLeg) -> None:
        seq, tokens = leg.job.seq, len(leg.prompt)
        assert seq.allocation is not None
        blocks, place = self.table(seq.allocation).blocks, self.places.pop(leg.request_id)
        for rank in self.ranks.values():
            for layer in range(rank.memory.num_layers):
                rank.copy_in(place, blocks, tokens, Piece(layer, seq.cached_tokens, tokens))
        self.vacate(place)
        self.landed(leg)

    def abort(self, leg: DecodeLeg) -> None:
        self.settle()
        here = self.legs.get(leg.request_id) is leg
        super().abort(leg)
        if here and leg.loaded and (place := self.places.pop(leg.request_id, None)) is not None:
            self.vacate(place)

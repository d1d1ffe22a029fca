"""A decode engine whose KV lands in memory beside its blocks, and is copied into them when its engine has made room.

Room there is what D registers; the engine is asked when everything has landed. So a transfer needs no free blocks, and
blocks are never reached from outside: what is in quarantine after a failure is a part of that memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Dropped, NeverFitsError, Phase, Sequence
from pdflow.methods.method import Hop, Method
from pdflow.methods.staging import BufferStaging, Staging, TooLargeError
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, Quarantine, Resolve
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, RequestId
from pdflow.results.records import D_ADMIT, NOTIFY
from pdflow.routing.router import DecodeEnded
from sim.decode_node import DecodeLeg, DecodeNode
from sim.node import Port
from sim.prefill_node import WEIGHTS

if TYPE_CHECKING:
    from sim.world import World


class StagedDecodeNode(DecodeNode):
    """Args: staging is that of one rank."""

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
        super().__init__(world, index, name, engine, block_bytes)
        self.method = method
        self.staging = staging
        self.places: dict[RequestId, Allocation] = {}
        """Of requests that have room: landing, landed, being copied."""
        self.granting = False
        self.loading: dict[RequestId, int] = {}
        """Copies under way."""

    # Room to land in.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg = self.legs[effect.request_id]
        try:
            self.staging.want(leg.request_id, self.world.records.input_tokens[leg.request])
        except TooLargeError:
            self.feed(self.scheduler, DecodeAborted(effect.request_id, Code.REJECTED))
            return
        self.grant()

    def grant(self) -> None:
        """Once what happens now has happened: it may be the end of who would be next."""
        if not self.granting:
            self.granting = True
            self.env.call(0, self.grant_all, None)

    def grant_all(self, _: None) -> None:
        self.granting = False
        world = self.world
        while self.alive and (served := self.staging.serve()) is not None:
            request_id, place = served
            leg = self.legs[request_id]
            self.places[request_id] = place
            if world.tell is not None:
                world.tell(self.name, f"takes room in {self.method.d_memory.value}")
            world.records.ends[D_ADMIT][leg.request] = self.env.now
            tokens = world.records.input_tokens[leg.request]
            digest = world.digest(leg.request)
            self.feed(self.scheduler, DecodeAdmitted(request_id, place, 0, tokens, digest, WEIGHTS))

    def vacate(self, allocation: Allocation) -> None:
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.d_memory.value}")
        self.staging.release(allocation)
        self.grant()

    # The protocol's effects.

    def commit(self, port: Port, effect: Commit) -> None:
        """Everything has landed: now the engine."""
        leg = self.legs[effect.request_id]
        self.world.records.ends[NOTIFY][leg.request] = self.env.now
        try:
            self.engine.submit(leg.seq, self.env.now)
        except NeverFitsError:
            self.forget(leg)
            self.vacate(self.places.pop(leg.request_id))
            self.world.router.later(DecodeEnded(leg.request_id, Code.REJECTED))
            return
        self.rearm()

    def resolve(self, port: Port, effect: Resolve) -> None:
        leg = self.legs[effect.request_id]
        self.forget(leg)
        if self.world.shipping is not None:
            self.world.shipping.ended(effect.request_id)
        self.staging.forget(leg.request_id)
        self.places.pop(leg.request_id, None)
        self.world.router.later(DecodeEnded(effect.request_id, effect.code))
        self.grant()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        """Room that a writer may still reach stays taken."""

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.vacate(effect.allocation)

    # The engine has made room.

    def admitted(self, seq: Sequence) -> None:
        leg = self.by_seq[id(seq)]
        leg.admitted_ns = self.env.now
        self.measure_pool()
        if self.waits:
            self.wait_for(leg.request_id)
        place = self.places[leg.request_id]
        size, tokens = self.staging.size, self.world.records.input_tokens[leg.request] - seq.cached_tokens
        ports = self.ranks()
        ways = [(hop, layers) for hop, layers in self.ways(place) if layers]
        self.loading[leg.request_id] = len(ports) * len(ways)
        for port in ports:
            for hop, layers in ways:
                nbytes = layers * size.bytes_per_token * tokens
                if self.world.tell is not None:
                    self.world.tell(self.name, f"copies {layers} layers, {hop.value}")
                self.world.shipping.copy(port, hop, nbytes, partial(self.copied_in, leg))

    def ways(self, place: Allocation) -> list[tuple[Hop, int]]:
        """How its layers get into blocks: those that lie in the host's memory over PCIe."""
        hop = self.method.loading
        assert hop is not None
        if not isinstance(self.staging, BufferStaging):
            return [(hop, self.staging.size.layers)]
        spilled = self.staging.spilled(place)
        return [(hop, self.staging.size.layers - spilled), (Hop.H2D, spilled)]

    def copied_in(self, leg: DecodeLeg, ok: bool) -> None:
        if not self.alive:
            return
        left = self.loading[leg.request_id] = self.loading[leg.request_id] - 1
        if left:
            return
        del self.loading[leg.request_id]
        self.vacate(self.places.pop(leg.request_id))
        if self.legs.get(leg.request_id) is leg:
            self.strand_own(leg)
            self.engine.loaded(leg.seq, self.env.now)
        else:
            # Its client went away while it was being copied.
            assert leg.seq.allocation is not None
            self.engine.release(leg.seq.allocation, self.env.now)
        self.wait_no_more(leg.request_id)
        self.rearm()

    def abort(self, request_id: RequestId) -> None:
        leg = self.legs.get(request_id)
        if leg is None:
            return
        if leg.seq.phase is Phase.NEW:
            self.feed(self.scheduler, DecodeAborted(request_id, Code.CANCELLED))
            return
        dropped = self.engine.drop(leg.seq, self.env.now)
        self.forget(leg)
        if dropped is not Dropped.BLOCKS_ARE_YOURS and request_id in self.places:
            self.vacate(self.places.pop(request_id))
        self.rearm()

    def assert_empty(self) -> None:
        kept = (self.staging.held, self.staging.waiting, self.places, self.loading, self.awaited)
        assert not any(kept), f"{self.name} still keeps {kept}"

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)

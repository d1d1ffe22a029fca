"""A prefill engine: its batch scheduler, its protocol endpoints, and what their effects do to its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import ChunkBegun, Dropped, NeverFitsError, Prefilled, Sequence
from pdflow.memory.caching import CachingPool
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import AnswerPrefill, BumpWord, PostWrite, ReleaseBlocks
from pdflow.protocol.events import PrefillAborted, PrefillFinished, PrefillQueued, Received
from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation, Instant, RequestId, Xid
from pdflow.results.records import P_QUEUE, PREFILL, ROUTE
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.engine_node import EngineNode
from sim.node import Port
from sim.writer import Writer

if TYPE_CHECKING:
    from sim.world import World

WEIGHTS = 1
"""The weight version: no scenario changes weights under way yet."""


class PrefillLeg:
    __slots__ = ("finished_ns", "keeps", "request", "request_id", "seq", "xid")

    def __init__(self, request: int, request_id: RequestId, xid: Xid, seq: Sequence, keeps: bool) -> None:
        self.request = request
        self.request_id = request_id
        self.xid = xid
        self.seq = seq
        self.keeps = keeps
        """A decode leg will come for the KV, so the protocol knows of it."""
        self.finished_ns: Instant = 0


class PrefillNode(EngineNode):
    """One prefill engine."""

    def __init__(self, world: World, index: int, name: str, engine: Engine, block_bytes: int) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.scheduler: Port
        self.info: EngineInfo
        self.by_xid: dict[Xid, PrefillLeg] = {}
        self.by_request: dict[RequestId, PrefillLeg] = {}
        self.by_seq: dict[int, PrefillLeg] = {}
        """Being computed, under the identity of the sequence: two attempts of one request may meet at one engine."""
        self.writer = Writer(self, world.writer_ns) if world.writer_ns else None
        self.do.update(
            {
                PostWrite: self.post_write,
                AnswerPrefill: self.answer,
                ReleaseBlocks: self.release,
                BumpWord: self.bump,
            }
        )

    def accept(self, leg: DispatchPrefill) -> None:
        """A prefill leg has come over HTTP."""
        now = self.env.now
        request = leg.request
        records = self.world.records
        records.ends[ROUTE][request] = now
        prefix = self.prefix_of(request)
        seq = Sequence(request, records.input_tokens[request], 1, False, True, 0, prefix)
        begun = PrefillLeg(request, leg.request_id, leg.xid, seq, leg.keeps)
        self.by_xid[leg.xid] = self.by_request[leg.request_id] = self.by_seq[id(seq)] = begun
        if leg.keeps:
            self.feed(self.scheduler, PrefillQueued(leg.xid, leg.request_id))
        self.submit(begun)

    def submit(self, leg: PrefillLeg) -> None:
        """Into the engine's queue, if it can ever be served."""
        try:
            self.engine.submit(leg.seq, self.env.now)
        except NeverFitsError:
            self.end(leg, Code.REJECTED)
            self.world.router.later(PrefillAnswered(leg.request_id, None, Code.REJECTED))
            return
        self.rearm()

    def end(self, leg: PrefillLeg, code: Code) -> None:
        """This prefill ends without KV."""
        del self.by_request[leg.request_id], self.by_xid[leg.xid], self.by_seq[id(leg.seq)]
        if leg.keeps:
            self.feed(self.scheduler, PrefillAborted(leg.xid, code))

    def abort(self, request_id: RequestId) -> None:
        """The router takes the leg back. A finished prompt stays: its lease decides."""
        leg = self.by_request.get(request_id)
        if leg is not None and self.engine.drop(leg.seq, self.env.now) is not Dropped.NOT_HERE:
            self.end(leg, Code.CANCELLED)
            self.rearm()

    def came(self, outcome: object) -> None:
        """The engine has computed a prompt's KV."""
        assert type(outcome) is Prefilled
        seq = outcome.seq
        leg = self.by_seq[id(seq)]
        self.note_computed(leg)
        assert seq.allocation is not None
        if not leg.keeps:
            self.done_here(leg)
            return
        if self.writer is not None:
            self.writer.finished(leg.xid)
        source, digest = self.source(seq.allocation), self.world.digest(seq.index)
        self.feed(self.scheduler, PrefillFinished(leg.xid, source, seq.prompt_tokens, digest, WEIGHTS))

    def note_computed(self, leg: PrefillLeg) -> None:
        """Its stages in the engine are over."""
        seq, ends = leg.seq, self.world.records.ends
        del self.by_seq[id(seq)]
        leg.finished_ns = self.env.now
        self.measure_pool()
        ends[P_QUEUE][seq.index] = seq.start_ns
        ends[PREFILL][seq.index] = leg.finished_ns

    def layer_by_layer(
        self, chunk: ChunkBegun, layers: int, before: int, then: Callable[[Any], None], whose: Any
    ) -> None:
        """Have `then((whose, piece))` be called as each layer of the tokens from `before` to the chunk's end is there.

        Layers are computed one after the other, so each is ready at its share of the step's time.
        """
        now, start, lasts = self.env.now, chunk.start_ns, chunk.end_ns - chunk.start_ns
        known = chunk.computed + chunk.new
        for layer in range(layers):
            at = start + lasts * (layer + 1) // layers
            self.env.call(max(0, at - now), then, (whose, Piece(layer, before, known)))

    def source(self, own: Allocation) -> Allocation:
        """All blocks of a prompt, the shared ones first, under the generation of its own ones."""
        pool = self.engine.pool
        return Allocation(own.generation, pool.table(own)) if isinstance(pool, CachingPool) else own

    def done_here(self, leg: PrefillLeg) -> None:
        """P's token is all that was asked for: nobody will come for the KV."""
        del self.by_request[leg.request_id], self.by_xid[leg.xid]
        self.give_back(leg)
        params = KvParams(self.info, leg.xid, leg.request_id, leg.seq.prompt_tokens)
        self.world.router.later(PrefillAnswered(leg.request_id, params))

    def hear(self, port: Port, event: Any) -> None:
        if self.writer is not None and type(event) is Received:
            self.writer.came(port, event)
        super().hear(port, event)

    def polled(self, about: tuple[Port, Any]) -> None:
        if self.writer is not None and type(about[1]) is Received:
            self.writer.woken(about[1])
        else:
            super().polled(about)

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        del self.by_request[effect.request_id]
        params = effect.params
        for rank, word in enumerate(params.words):
            self.world.fabric.words[f"{self.name}.r{rank}", word.index] = word.word
        self.world.router.later(PrefillAnswered(effect.request_id, params))

    def post_write(self, port: Port, effect: PostWrite) -> None:
        if self.writer is not None:
            self.writer.unmatched.discard(effect.grant.xid)
        self.world.fabric.write(port, effect, self.world.request_of(effect.op.reg.request_id))

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.world.fabric.forget_word(port.address, effect.word.index)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        leg = self.by_xid.pop(effect.xid)
        if self.writer is not None:
            self.writer.unmatched.discard(effect.xid)
        assert leg.seq.allocation is not None
        # What it found here is counted with whoever computed it.
        self.strand(len(leg.seq.allocation.blocks), leg.finished_ns)
        self.give_back(leg)
        self.rearm()

    def give_back(self, leg: PrefillLeg) -> None:
        assert leg.seq.allocation is not None
        self.engine.release(leg.seq.allocation, self.env.now)

    def make_scheduler(self, endpoint: ProducerScheduler, incarnation: int) -> None:
        self.info = endpoint.engine
        self.scheduler = self.add(self.name, endpoint, incarnation)

"""A decode engine: its batch scheduler, its protocol endpoints, and what their effects do to its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Admitted, Dropped, Finished, NeverFitsError, Phase, Sequence
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, PostRead, Quarantine, ReadWord, Resolve
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeQueued, PrefillLegEnded
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow.results.records import D_ADMIT, HANDOFF, NOTIFY, P_QUEUE, PREFILL, ROUTE
from pdflow.routing.router import DecodeEnded, DispatchAlone, DispatchDecode, ReportPrefill
from sim.engine_node import EngineNode
from sim.node import Port
from sim.prefill_node import WEIGHTS

if TYPE_CHECKING:
    from sim.world import World


class DecodeLeg:
    __slots__ = ("admitted_ns", "alone", "request", "request_id", "seq")

    def __init__(self, request: int, request_id: RequestId, seq: Sequence, alone: bool = False) -> None:
        self.request = request
        self.request_id = request_id
        self.seq = seq
        self.alone = alone
        """Its prompt is computed here; the protocol knows nothing of it."""
        self.admitted_ns: Instant = 0


class DecodeNode(EngineNode):
    """One decode engine."""

    def __init__(self, world: World, index: int, name: str, engine: Engine, block_bytes: int) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.scheduler: Port
        self.legs: dict[RequestId, DecodeLeg] = {}
        self.by_seq: dict[int, DecodeLeg] = {}
        """Under the identity of the sequence: two attempts of one request may meet at one engine."""
        self.waits = False
        """Its engine stands still while the KV of whoever has come in is on its way."""
        self.do.update(
            {
                Enqueue: self.enqueue,
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Commit: self.commit,
                Resolve: self.resolve,
                Quarantine: self.quarantine,
                FreeBlocks: self.free,
            }
        )

    def accept(self, dispatch: DispatchDecode) -> None:
        """A decode leg has come over HTTP."""
        world = self.world
        request = dispatch.request
        records = world.records
        records.ends[HANDOFF][request] = self.env.now
        prompt = records.input_tokens[request]
        # P's first token, if the client has it from there, is input to D's first step; its KV is nobody's yet.
        given = world.prefill_tokens
        prefix = self.prefix_of(request)
        seq = Sequence(request, prompt + given, records.output_tokens[request] - given, True, False, prompt, prefix)
        leg = self.legs[dispatch.request_id] = self.by_seq[id(seq)] = DecodeLeg(request, dispatch.request_id, seq)
        blocks = -(-prompt // self.engine.limits.block_size)
        self.feed(self.scheduler, DecodeQueued(leg.request_id, dispatch.params, blocks, 0))

    def accept_alone(self, dispatch: DispatchAlone) -> None:
        """The only leg of an attempt has come over HTTP."""
        request, records = dispatch.request, self.world.records
        records.ends[ROUTE][request] = self.env.now
        records.prefill_engine[request] = self.name
        prefix = self.prefix_of(request)
        seq = Sequence(request, records.input_tokens[request], records.output_tokens[request], prefix=prefix)
        try:
            self.engine.submit(seq, self.env.now)
        except NeverFitsError:
            self.world.router.later(DecodeEnded(dispatch.request_id, Code.REJECTED))
            return
        self.legs[dispatch.request_id] = self.by_seq[id(seq)] = DecodeLeg(request, dispatch.request_id, seq, True)
        self.rearm()

    def abort(self, request_id: RequestId) -> None:
        """The router takes the leg back: before it is loaded that is the protocol's business, after it the engine's."""
        leg = self.legs.get(request_id)
        if leg is None:
            return
        if not leg.alone and leg.seq.phase in (Phase.NEW, Phase.WAITING, Phase.LOADING) and not leg.seq.generated:
            self.feed(self.scheduler, DecodeAborted(request_id, Code.CANCELLED))
            return
        self.engine.drop(leg.seq, self.env.now)
        self.forget(leg)
        self.rearm()

    def report_prefill(self, effect: ReportPrefill) -> None:
        self.feed(self.scheduler, PrefillLegEnded(effect.request_id, effect.ok))

    def forget(self, leg: DecodeLeg) -> None:
        del self.legs[leg.request_id]
        del self.by_seq[id(leg.seq)]

    # The engine's outcomes.

    def came(self, outcome: object) -> None:
        if type(outcome) is Admitted:
            self.admitted(outcome.seq)
        else:
            assert type(outcome) is Finished
            self.finished(outcome.seq, outcome.at_ns)

    def admitted(self, seq: Sequence) -> None:
        world = self.world
        leg = self.by_seq[id(seq)]
        request = leg.request
        leg.admitted_ns = world.records.ends[D_ADMIT][request] = self.env.now
        if self.waits:
            self.wait_for(leg.request_id)
        assert seq.allocation is not None
        here = seq.cached_tokens
        missing = world.records.input_tokens[request] - here
        self.measure_pool()
        self.feed(
            self.scheduler,
            DecodeAdmitted(leg.request_id, seq.allocation, here, missing, world.digest(request), WEIGHTS),
        )

    def finished(self, seq: Sequence, at_ns: Instant) -> None:
        leg = self.by_seq[id(seq)]
        self.forget(leg)
        if leg.alone:
            self.stamp_alone(seq)
        self.decoded(leg.request_id, seq, at_ns)
        self.world.router.later(DecodeEnded(leg.request_id))

    def stamp_alone(self, seq: Sequence) -> None:
        """Its prefill yields the first token: between the two nothing is handed over, admitted or moved."""
        ends = self.world.records.ends
        ends[P_QUEUE][seq.index] = seq.start_ns
        for stage in range(PREFILL, NOTIFY + 1):
            ends[stage][seq.index] = seq.first_token_ns
        own_tokens = seq.prompt_tokens + seq.output_tokens - 1 - seq.cached_tokens
        self.measure_pool(-(-own_tokens // self.engine.limits.block_size))

    # The protocol's effects.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg = self.legs[effect.request_id]
        try:
            self.engine.submit(leg.seq, self.env.now)
        except NeverFitsError:
            self.feed(self.scheduler, DecodeAborted(effect.request_id, Code.REJECTED))
            return
        self.rearm()

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.world.fabric.read(port, effect, self.world.request_of(effect.op.reg.request_id))

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.world.fabric.read_word(port, effect.op, effect.source, effect.index)

    def commit(self, port: Port, effect: Commit) -> None:
        leg = self.legs[effect.request_id]
        now = self.env.now
        self.world.records.ends[NOTIFY][leg.request] = now
        self.strand_own(leg)
        self.engine.loaded(leg.seq, now)
        self.wait_no_more(leg.request_id)
        self.rearm()

    def resolve(self, port: Port, effect: Resolve) -> None:
        """The request is over; what remains of its blocks is the protocol's to give back."""
        leg = self.legs[effect.request_id]
        self.forget(leg)
        if self.world.shipping is not None:
            self.world.shipping.ended(effect.request_id)
        dropped = self.engine.drop(leg.seq, self.env.now)
        assert dropped in (Dropped.NOT_HERE, Dropped.AT_ONCE, Dropped.BLOCKS_ARE_YOURS)
        self.strand_own(leg)
        self.world.router.later(DecodeEnded(effect.request_id, effect.code))
        self.wait_no_more(leg.request_id)
        self.rearm()

    def strand_own(self, leg: DecodeLeg) -> None:
        """What it found here is counted with whoever had it sent."""
        allocation = leg.seq.allocation
        if allocation is not None:
            self.strand(len(allocation.blocks), leg.admitted_ns)

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.engine.pool.quarantine(effect.allocation)

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation, self.env.now)
        self.rearm()

    def make_scheduler(self, endpoint: ConsumerScheduler, incarnation: int) -> None:
        self.scheduler = self.add(self.name, endpoint, incarnation)

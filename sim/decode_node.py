"""A decode engine: its batch scheduler, its protocol endpoints, and what their effects do to its blocks.

What it does with a request is decided in `pdflow/serving/decode.py`. Here are its records, its clock and its engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Admitted, Finished, Sequence
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, PostRead, Quarantine, ReadWord
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow.results.records import D_ADMIT, HANDOFF, NOTIFY, P_QUEUE, PREFILL, ROUTE
from pdflow.routing.router import DecodeEnded, DispatchAlone, DispatchDecode, ReportPrefill
from pdflow.serving.batch import drop, enqueue
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import Admit, Drop, EndDecode, HoldEngine, Landed, ResumeEngine
from pdflow.serving.events import (
    AloneRequested,
    DecodeRequested,
    EngineAdmitted,
    EngineFinished,
    PrefillReported,
    RequestAborted,
)
from sim.engine_node import EngineNode
from sim.node import Port

if TYPE_CHECKING:
    from sim.world import World


class DecodeLeg:
    __slots__ = ("admitted_ns", "alone", "finished_ns", "request", "request_id", "seq", "strands")

    def __init__(self, request: int, request_id: RequestId, seq: Sequence, alone: bool = False) -> None:
        self.request = request
        self.request_id = request_id
        self.seq = seq
        self.alone = alone
        """Its prompt is computed here; the protocol knows nothing of it."""
        self.strands = False
        """Its blocks wait for its KV."""
        self.admitted_ns: Instant = 0
        self.finished_ns: Instant = 0


class DecodeNode(EngineNode):
    """One decode engine."""

    def __init__(self, world: World, index: int, name: str, engine: Engine, block_bytes: int, core: DecodeCore) -> None:
        super().__init__(world, index, name, engine, block_bytes, core)
        self.scheduler: Port
        self.legs: dict[RequestId, DecodeLeg] = {}
        self.do.update(
            {
                Enqueue: self.enqueue,
                Drop: self.drop,
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Admit: self.admit,
                Landed: self.landed,
                Commit: self.commit,
                EndDecode: self.end,
                HoldEngine: self.hold_engine,
                ResumeEngine: self.resume_engine,
                Quarantine: self.quarantine,
                FreeBlocks: self.free,
            }
        )

    def accept(self, dispatch: DispatchDecode) -> None:
        """A decode leg has come over HTTP."""
        world = self.world
        request, handle = dispatch.request, dispatch.request_id
        records = world.records
        records.ends[HANDOFF][request] = self.env.now
        prompt = records.input_tokens[request]
        # P's first token, if the client has it from there, is input to D's first step; its KV is nobody's yet.
        given = world.prefill_tokens
        output = records.output_tokens[request] - given
        seq = Sequence(request, prompt + given, output, True, False, prompt, self.prefix_of(request), 0, handle)
        self.legs[handle] = DecodeLeg(request, handle, seq)
        blocks = -(-prompt // self.engine.limits.block_size)
        self.feed(self.scheduler, DecodeRequested(handle, dispatch.params, blocks, prompt, world.digest(request)))

    def accept_alone(self, dispatch: DispatchAlone) -> None:
        """The only leg of an attempt has come over HTTP."""
        request, records, handle = dispatch.request, self.world.records, dispatch.request_id
        records.ends[ROUTE][request] = self.env.now
        records.prefill_engine[request] = self.name
        prefix = self.prefix_of(request)
        seq = Sequence(
            request, records.input_tokens[request], records.output_tokens[request], prefix=prefix, handle=handle
        )
        self.legs[handle] = DecodeLeg(request, handle, seq, True)
        self.feed(self.scheduler, AloneRequested(handle))

    def abort(self, request_id: RequestId) -> None:
        """The router takes the leg back."""
        self.feed(self.scheduler, RequestAborted(request_id))

    def report_prefill(self, effect: ReportPrefill) -> None:
        self.feed(self.scheduler, PrefillReported(effect.request_id, effect.ok))

    # The engine.

    def came(self, outcome: object) -> None:
        if type(outcome) is Admitted:
            seq = outcome.seq
            assert seq.allocation is not None
            self.measure_pool()
            self.feed(self.scheduler, EngineAdmitted(seq.handle, seq.allocation, seq.cached_tokens))
        else:
            assert type(outcome) is Finished
            handle = outcome.seq.handle
            self.legs[handle].finished_ns = outcome.at_ns
            self.feed(self.scheduler, EngineFinished(handle))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        rejected = enqueue(self.engine, self.legs[effect.request_id].seq, self.env.now)
        if rejected is not None:
            self.feed(port, rejected)
        else:
            self.rearm()

    def drop(self, port: Port, effect: Drop) -> None:
        self.feed(port, drop(self.engine, self.legs[effect.handle].seq, self.env.now))
        self.rearm()

    def commit(self, port: Port, effect: Commit) -> None:
        leg = self.legs[effect.request_id]
        self.strand_own(leg)
        self.engine.loaded(leg.seq, self.env.now)
        self.rearm()

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation, self.env.now)
        self.rearm()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.engine.pool.quarantine(effect.allocation)

    def hold_engine(self, port: Port, effect: HoldEngine) -> None:
        self.hold()

    def resume_engine(self, port: Port, effect: ResumeEngine) -> None:
        self.let_go()

    # The record, and the router.

    def admit(self, port: Port, effect: Admit) -> None:
        leg, now = self.legs[effect.handle], self.env.now
        leg.admitted_ns = now
        leg.strands = True
        self.world.records.ends[D_ADMIT][leg.request] = now

    def landed(self, port: Port, effect: Landed) -> None:
        self.world.records.ends[NOTIFY][self.legs[effect.handle].request] = self.env.now

    def end(self, port: Port, effect: EndDecode) -> None:
        handle, world = effect.handle, self.world
        leg = self.legs.pop(handle)
        if effect.code is Code.NONE:
            if leg.alone:
                self.stamp_alone(leg.seq)
            self.decoded(handle, leg.seq, leg.finished_ns)
        elif world.shipping is not None:
            world.shipping.ended(handle)
        self.strand_own(leg)
        world.router.later(DecodeEnded(handle, effect.code))

    def strand_own(self, leg: DecodeLeg) -> None:
        """Blocks that waited for its KV do no more. What it found here is counted with whoever had it sent."""
        allocation = leg.seq.allocation
        if leg.strands and allocation is not None:
            leg.strands = False
            self.strand(len(allocation.blocks), leg.admitted_ns)

    def stamp_alone(self, seq: Sequence) -> None:
        """Its prefill yields the first token: between the two nothing is handed over, admitted or moved."""
        ends = self.world.records.ends
        ends[P_QUEUE][seq.index] = seq.start_ns
        for stage in range(PREFILL, NOTIFY + 1):
            ends[stage][seq.index] = seq.first_token_ns
        own_tokens = seq.prompt_tokens + seq.output_tokens - 1 - seq.cached_tokens
        self.measure_pool(-(-own_tokens // self.engine.limits.block_size))

    # Transfers.

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.world.fabric.read(port, effect, self.world.request_of(effect.op.reg.request_id))

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.world.fabric.read_word(port, effect.op, effect.source, effect.index)

    def assert_empty(self) -> None:
        self.core.assert_empty(self.name)

    def make_scheduler(self, endpoint: ConsumerScheduler, incarnation: int) -> None:
        self.scheduler = self.add(self.name, endpoint, incarnation)
        core = self.core
        assert isinstance(core, DecodeCore)
        core.begin(self.scheduler)

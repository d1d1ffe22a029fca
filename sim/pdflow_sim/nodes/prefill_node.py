"""A prefill engine: its batch scheduler, its protocol endpoints, and what their effects do to its blocks.

`pdflow/serving/prefill.py` decides what it does with a request. This module has its records, its clock and its engine.
"""

from __future__ import annotations

from typing import Any

from pdflow.engine.sequence import Prefilled, Sequence
from pdflow.memory.caching import CachingPool
from pdflow.methods.wire_profile import Side
from pdflow.protocol.effects import AnswerPrefill, BumpWord, Enqueue, PostWrite, StopWrite
from pdflow.protocol.events import Received
from pdflow.protocol.ids import EngineInfo, KvParams, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import NO_BLOCK, Allocation, Instant, RequestId, Xid
from pdflow.results.records import P_QUEUE, PREFILL, ROUTE
from pdflow.routing.effects import DispatchPrefill
from pdflow.routing.events import PrefillAnswered
from pdflow.serving.batch import drop, enqueue
from pdflow.serving.core import Port
from pdflow.serving.effects import Computed, Drop, EndPrefill, Forget, FreePrompt, Released
from pdflow.serving.events import PrefillRequested, PromptComputed, RequestAborted
from pdflow.serving.prefill import PrefillCore
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.nodes.writer import Writer
from pdflow_sim.observe.run_metrics import request_of

WEIGHTS = 1
"""The weight version: no scenario changes weights under way yet."""


class SimPrefillLeg:
    __slots__ = ("computed_ns", "keeps", "request_id", "seq", "xid")

    def __init__(self, request_id: RequestId, xid: Xid, seq: Sequence, keeps: bool) -> None:
        self.request_id = request_id
        self.xid = xid
        self.seq = seq
        self.keeps = keeps
        """True if a decode leg comes for the KV."""
        self.computed_ns: Instant = 0


class SimPrefillNode(SimEngineNode):
    """The node of one prefill engine."""

    def __init__(self, components: EngineComponents, core: PrefillCore) -> None:
        super().__init__(components, Side.P, core)
        self.scheduler: SimPort
        self.info: EngineInfo
        self.legs: dict[Xid, SimPrefillLeg] = {}
        self.by_request: dict[RequestId, SimPrefillLeg] = {}
        """The legs that are not answered yet."""
        writer_ns = components.ports.writer_ns
        self.writer = Writer(self, writer_ns) if writer_ns else None
        self.do.update(
            {
                PostWrite: self.post_write,
                StopWrite: self.stop_write,
                BumpWord: self.bump,
            }
        )
        self.perform.update(
            {
                Enqueue: self.enqueue,
                Drop: self.drop,
                Computed: self.computed,
                AnswerPrefill: self.answer,
                EndPrefill: self.end,
                Released: self.released,
                FreePrompt: self.free,
                Forget: self.forget,
            }
        )

    def accept(self, dispatch: DispatchPrefill) -> None:
        """Take a prefill leg that has come over HTTP."""
        records, request, xid = self.metrics.records, dispatch.request, dispatch.xid
        records.ends[ROUTE][request] = self.clock.now
        prompt = self.prompt_tokens(request)
        seq = Sequence(request, prompt, 1, False, True, 0, self.prefix_of(request), 0, xid)
        leg = SimPrefillLeg(dispatch.request_id, xid, seq, dispatch.keeps)
        self.legs[xid] = self.by_request[dispatch.request_id] = leg
        digest = self.prompts.digest(request)
        lookup = self.looks_up(dispatch)
        self.feed(self.role, PrefillRequested(xid, dispatch.request_id, prompt, digest, dispatch.keeps, lookup))

    def looks_up(self, dispatch: DispatchPrefill) -> bool:
        """True if a store may have the beginning of this prompt."""
        return False

    def abort(self, request_id: RequestId) -> None:
        """Abort a leg, at the router's order."""
        leg = self.by_request.get(request_id)
        if leg is not None:
            self.feed(self.role, RequestAborted(leg.xid))

    # The engine.

    def on_engine_output(self, outcome: object) -> None:
        """Handle a prompt whose KV the engine has computed."""
        assert type(outcome) is Prefilled
        seq = outcome.seq
        leg = self.legs[seq.handle]
        allocation = seq.allocation
        assert allocation is not None
        leg.computed_ns = self.clock.now
        self.feed(self.role, PromptComputed(leg.xid, self.source(allocation)))

    def source(self, own: Allocation) -> Allocation:
        """Return all blocks of a prompt, the shared ones first, under the generation of its own ones."""
        pool = self.engine.pool
        if not isinstance(pool, CachingPool):
            return own
        blocks = pool.table(own)
        if not own.groups:
            return Allocation(own.generation, blocks)
        shared = len(blocks) - len(own.blocks)
        whole, window = own.groups
        return Allocation(own.generation, blocks, (blocks[:shared] + whole, (NO_BLOCK,) * shared + window))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        rejected = enqueue(self.engine, self.legs[effect.request_id].seq, self.clock.now)
        if rejected is not None:
            self.feed(self.role, rejected)
        else:
            self.rearm()

    def drop(self, port: Port, effect: Drop) -> None:
        self.feed(self.role, drop(self.engine, self.legs[effect.handle].seq, self.clock.now))
        self.rearm()

    def free(self, port: Port, effect: FreePrompt) -> None:
        leg = self.legs[effect.handle]
        allocation = leg.seq.allocation
        assert allocation is not None
        # What it found here is counted with whoever computed it.
        self.account_stranded(len(allocation.blocks), leg.computed_ns)
        self.engine.release(allocation, self.clock.now)
        self.rearm()

    # The record, and the router.

    def computed(self, port: Port, effect: Computed) -> None:
        """Stamp the stages of a prompt whose stages in the engine are over."""
        leg, ends = self.legs[effect.handle], self.metrics.records.ends
        seq = leg.seq
        index = seq.index
        self.measure_pool()
        ends[P_QUEUE][index] = seq.start_ns
        ends[PREFILL][index] = leg.computed_ns
        if self.writer is not None and leg.keeps:
            self.writer.finished(leg.xid)

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        params, request_id = effect.params, effect.request_id
        self.by_request.pop(request_id, None)
        for rank, lease_word in enumerate(params.rank_words):
            self.fabric.expose_word(rank_address(self.name, rank), lease_word)
        self.router.later(PrefillAnswered(request_id, params))

    def end(self, port: Port, effect: EndPrefill) -> None:
        leg = self.legs[effect.handle]
        params = None
        if effect.code is Code.NONE:
            params = KvParams(self.info, leg.xid, leg.request_id, leg.seq.prompt_tokens)
        self.router.later(PrefillAnswered(leg.request_id, params, effect.code))

    def released(self, port: Port, effect: Released) -> None:
        if self.writer is not None:
            self.writer.unmatched.discard(effect.handle)

    def forget(self, port: Port, effect: Forget) -> None:
        leg = self.legs.pop(effect.handle)
        if self.by_request.get(leg.request_id) is leg:
            del self.by_request[leg.request_id]

    # Transfers.

    def on_frame(self, port: SimPort, event: Any) -> None:
        if self.writer is not None and type(event) is Received:
            self.writer.on_notification(port, event)
        super().on_frame(port, event)

    def polled(self, arg: tuple[SimPort, Any]) -> None:
        if self.writer is not None and type(arg[1]) is Received:
            self.writer.woken(arg[1])
        else:
            super().polled(arg)

    def post_write(self, port: SimPort, effect: PostWrite) -> None:
        if self.writer is not None:
            self.writer.unmatched.discard(effect.registration.xid)
        self.fabric.write(port, effect, request_of(effect.op.reg.request_id))

    def stop_write(self, port: SimPort, effect: StopWrite) -> None:
        assert self.shipping is not None
        self.shipping.stop(effect.op)

    def bump(self, port: SimPort, effect: BumpWord) -> None:
        self.fabric.forget_word(port.address, effect.lease_word)

    def assert_empty(self) -> None:
        self.core.assert_empty(self.name)
        assert not self.legs, f"{self.name} still keeps {list(self.legs)}"

    def make_scheduler(self, endpoint: ProducerScheduler, incarnation: int) -> None:
        self.info = endpoint.engine
        self.scheduler = self.add(self.name, endpoint, incarnation)
        core = self.core
        assert isinstance(core, PrefillCore)
        core.begin(self.scheduler)

    def make_loads(self, incarnation: int) -> None:
        """Add the endpoints with which it loads from a store, if it does."""

"""A decode engine: its batch scheduler, its protocol endpoints, and what their effects do to its blocks.

`pdflow/serving/decode.py` decides what it does with a request. This module has its records, its clock and its engine.
"""

from __future__ import annotations

from pdflow.engine.hosted import HostedEngine
from pdflow.engine.sequence import Admitted, Finished, Outcome, Sequence
from pdflow.methods.wire_profile import Side
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, PostRead, Quarantine, ReadWord
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow.results.records import D_ADMIT, HANDOFF, NOTIFY, P_QUEUE, PREFILL, ROUTE
from pdflow.routing.effects import DispatchAlone, DispatchDecode, ReportPrefill
from pdflow.routing.events import DecodeEnded
from pdflow.serving.batch import drop, enqueue
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import Admit, Drop, EndDecode, HoldEngine, Landed, ResumeEngine
from pdflow.serving.events import (
    AloneRequested,
    DecodeRequested,
    EngineAdmitted,
    EngineFinished,
    FirstTokenKnown,
    PrefillReported,
    RequestAborted,
)
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.observe.run_metrics import request_of


class SimDecodeNode(SimEngineNode):
    """The node of one decode engine."""

    def __init__(self, components: EngineComponents, core: DecodeCore) -> None:
        super().__init__(components, Side.D, core)
        self.prefill_tokens = components.ports.prefill_tokens
        self.posts_on_engine = components.reads_on != "background"
        self.overlaps = components.reads_on == "overlapped"
        """True if READs are posted once a step has been launched, and not before."""
        self.posting_until: Instant = 0
        """When the thread that launches steps has posted all READs so far."""
        self.scheduler: SimPort
        self.legs: dict[RequestId, Sequence] = {}
        self.do.update(
            {
                Enqueue: self.enqueue,
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Quarantine: self.quarantine,
                FreeBlocks: self.free,
            }
        )
        self.perform.update(
            {
                Enqueue: self.enqueue,
                Drop: self.drop,
                Admit: self.admit,
                Landed: self.landed,
                Commit: self.commit,
                EndDecode: self.end,
                FreeBlocks: self.free,
                HoldEngine: self.hold_engine,
                ResumeEngine: self.resume_engine,
            }
        )

    def accept(self, dispatch: DispatchDecode) -> None:
        """Take a decode leg that has come over HTTP."""
        records, request, handle = self.metrics.records, dispatch.request, dispatch.request_id
        records.ends[HANDOFF][request] = self.clock.now
        prompt = self.prompt_tokens(request)
        # P's first token, if the client has it from there, is input to D's first step; its KV is nobody's yet. It may
        # be known to the router only later. Where the answer is resumed it is in the prompt, with what follows it.
        given = 0 if request in self.prompts.given else self.prefill_tokens
        output = self.tokens_left(request) - given
        prefix = self.prefix_of(request)
        self.legs[handle] = Sequence(request, prompt + given, output, True, False, prompt, prefix, 0, handle)
        blocks = -(-prompt // self.engine.limits.block_size)
        follows = handle in self.router.first_follows
        if follows:
            self.router.first_follows.remove(handle)
        digest = self.prompts.digest(request)
        self.feed(self.role, DecodeRequested(handle, dispatch.params, blocks, prompt, digest, follows))

    def first_token_known(self, request_id: RequestId) -> None:
        """Handle the answer's first token, which the router has from P."""
        self.feed(self.role, FirstTokenKnown(request_id))

    def accept_alone(self, dispatch: DispatchAlone) -> None:
        """Take the only leg of an attempt, which has come over HTTP."""
        request, records, handle = dispatch.request, self.metrics.records, dispatch.request_id
        records.ends[ROUTE][request] = self.clock.now
        records.prefill_engine[request] = self.name
        prefix = self.prefix_of(request)
        self.legs[handle] = Sequence(
            request, self.prompt_tokens(request), self.tokens_left(request), prefix=prefix, handle=handle
        )
        self.feed(self.role, AloneRequested(handle))

    def abort(self, request_id: RequestId) -> None:
        """Abort a leg, at the router's order."""
        self.feed(self.role, RequestAborted(request_id))

    def report_prefill(self, effect: ReportPrefill) -> None:
        self.feed(self.role, PrefillReported(effect.request_id, effect.ok))

    # The engine.

    def on_engine_output(self, outcome: object) -> None:
        if type(outcome) is Admitted:
            seq = outcome.seq
            allocation = seq.allocation
            assert allocation is not None
            self.measure_pool()
            self.feed(self.role, EngineAdmitted(seq.handle, allocation, seq.cached_tokens))
        else:
            assert type(outcome) is Finished
            self.feed(self.role, EngineFinished(outcome.seq.handle))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        rejected = enqueue(self.engine, self.legs[effect.request_id], self.clock.now)
        if rejected is not None:
            self.feed(self.role, rejected)
        else:
            self.rearm()

    def drop(self, port: Port, effect: Drop) -> None:
        seq = self.legs[effect.handle]
        dropped = drop(self.engine, seq, self.clock.now)
        if dropped.left is not None:
            self.account_stranded_sequence(seq)
        self.feed(self.role, dropped)
        self.rearm()

    def commit(self, port: Port, effect: Commit) -> None:
        seq = self.legs[effect.request_id]
        self.account_stranded_sequence(seq)
        self.engine.loaded(seq, self.clock.now)
        self.rearm()

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation, self.clock.now)
        self.rearm()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.engine.pool.quarantine(effect.allocation)

    # The record, and the router.

    def admit(self, port: Port, effect: Admit) -> None:
        self.metrics.records.ends[D_ADMIT][self.legs[effect.handle].index] = self.clock.now

    def landed(self, port: Port, effect: Landed) -> None:
        self.metrics.records.ends[NOTIFY][self.legs[effect.handle].index] = self.clock.now

    def end(self, port: Port, effect: EndDecode) -> None:
        handle, code = effect.handle, effect.code
        seq = self.legs.pop(handle)
        if code is Code.NONE:
            if not seq.remote_kv:
                self.stamp_alone(seq)
            self.decoded(handle, seq, seq.finished_ns)
        elif self.shipping is not None:
            self.shipping.ended(handle)
        self.router.later(DecodeEnded(handle, code))

    def account_stranded_sequence(self, seq: Sequence) -> None:
        """Count how long a sequence's own blocks waited for its KV, up to now. Blocks that it found here are counted
        with the request that had them sent.
        """
        allocation = seq.allocation
        assert allocation is not None
        self.account_stranded(len(allocation.blocks), seq.admitted_ns)

    def stamp_alone(self, seq: Sequence) -> None:
        """Stamp the stages of a request that only this engine computed: its prefill yields the first token, and between
        the two nothing is handed over, admitted or moved.
        """
        ends = self.metrics.records.ends
        ends[P_QUEUE][seq.index] = seq.start_ns
        for stage in range(PREFILL, NOTIFY + 1):
            ends[stage][seq.index] = seq.first_token_ns
        own_tokens = seq.prompt_tokens + seq.output_tokens - 1 - seq.cached_tokens
        self.measure_pool(-(-own_tokens // self.engine.limits.block_size) + seq.extra_blocks)

    # Transfers.

    def post_read(self, port: SimPort, effect: PostRead) -> None:
        self.fabric.read(port, effect, request_of(effect.op.reg.request_id))

    def post_until(self, until: Instant) -> None:
        """Let the thread that launches steps post READs until then: the step that runs is longer by that, or ends no
        earlier if the READs are posted once it has been launched; without a step, none begins before.
        """
        now, engine = self.clock.now, self.engine
        assert isinstance(engine, HostedEngine)
        since = max(now, self.posting_until)
        if until <= since:
            return
        self.posting_until = until
        if not self.held and engine.next_boundary(now) == now:
            # The step that follows has begun, though nothing has asked for it yet: this does not depend on how many
            # steps are planned at once.
            self.handle(engine.advance(now))
            self.rearm()
        boundary = None if self.held else engine.next_boundary(now)
        if boundary is None:
            self.clock.call(until - now, self.posted, None)
            self.hold()
        elif not self.overlaps:
            self.handle(engine.lengthen(now, until - since))
            self.rearm()
        elif boundary < until:
            self.stretch(until)

    def handle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.on_engine_output(outcome)

    def posted(self, _: None) -> None:
        """Let the engine go on if its thread has posted all that it was asked to post."""
        now = self.clock.now
        if self.alive and self.held and self.posting_until <= now:
            if self.paused_until > now:
                self.clock.call(self.paused_until - now, self.posted, None)
            else:
                self.resume_steps()

    def read_word(self, port: SimPort, effect: ReadWord) -> None:
        self.fabric.read_word(port, effect.op, effect.source, effect.index)

    def unfulfilled(self) -> str:
        core = self.core
        assert isinstance(core, DecodeCore)
        return super().unfulfilled() or self.misplaced(self.scheduler, self.engine.pool, core.landing.staged())

    def assert_empty(self) -> None:
        self.core.assert_empty(self.name)

    def make_scheduler(self, endpoint: ConsumerScheduler, incarnation: int) -> None:
        self.scheduler = self.add(self.name, endpoint, incarnation)
        core = self.core
        assert isinstance(core, DecodeCore)
        core.begin(self.scheduler)

"""An aggregated engine: it computes a prompt and decodes from it, and no KV moves. No protocol endpoint takes part.

For the router its leg is a prefill leg that nothing follows; its answer is the whole request's.
"""

from __future__ import annotations

from pdflow.engine.sequence import Finished, Sequence
from pdflow.methods.wire_profile import Side
from pdflow.protocol.effects import Enqueue
from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.results.records import NOTIFY, P_QUEUE, PREFILL, ROUTE
from pdflow.routing.effects import DispatchPrefill
from pdflow.routing.events import PrefillAnswered
from pdflow.serving.batch import drop, enqueue
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import Drop, EndDecode
from pdflow.serving.events import AloneRequested, EngineFinished, RequestAborted
from pdflow.serving.landing import Landing
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.nodes.prefill_node import WEIGHTS


class AggregatedLeg:
    __slots__ = ("request", "request_id", "seq", "xid")

    def __init__(self, dispatch: DispatchPrefill, seq: Sequence) -> None:
        self.request = dispatch.request
        self.request_id = dispatch.request_id
        self.xid = dispatch.xid
        self.seq = seq


class AggregatedNode(SimEngineNode):
    """The node of one aggregated engine."""

    def __init__(self, components: EngineComponents, info: EngineInfo) -> None:
        super().__init__(components, Side.P, DecodeCore(WEIGHTS, Landing()))
        self.info = info
        self.by_request: dict[RequestId, AggregatedLeg] = {}
        self.perform.update({Enqueue: self.enqueue, Drop: self.drop, EndDecode: self.end})

    def accept(self, dispatch: DispatchPrefill) -> None:
        """Take a request that has come over HTTP."""
        request, records, handle = dispatch.request, self.metrics.records, dispatch.request_id
        records.ends[ROUTE][request] = self.clock.now
        records.decode_engine[request] = self.name
        prefix = self.prefix_of(request)
        prompt, output = self.prompt_tokens(request), self.tokens_left(request)
        seq = Sequence(request, prompt, output, prefix=prefix, handle=handle)
        self.by_request[handle] = AggregatedLeg(dispatch, seq)
        self.feed(self.role, AloneRequested(handle))

    def abort(self, request_id: RequestId) -> None:
        """Abort a request, at the router's order."""
        self.feed(self.role, RequestAborted(request_id))

    def on_engine_output(self, outcome: object) -> None:
        """Handle a request whose last token the engine has generated."""
        assert type(outcome) is Finished
        self.feed(self.role, EngineFinished(outcome.seq.handle))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        rejected = enqueue(self.engine, self.by_request[effect.request_id].seq, self.clock.now)
        if rejected is not None:
            self.feed(port, rejected)
        else:
            self.rearm()

    def drop(self, port: Port, effect: Drop) -> None:
        self.feed(port, drop(self.engine, self.by_request[effect.handle].seq, self.clock.now))
        self.rearm()

    def end(self, port: Port, effect: EndDecode) -> None:
        leg = self.by_request.pop(effect.handle)
        if effect.code is not Code.NONE:
            self.router.later(PrefillAnswered(leg.request_id, None, effect.code))
            return
        seq = leg.seq
        # What it found is another's, who may hold it still.
        own_tokens = seq.prompt_tokens + seq.output_tokens - 1 - seq.cached_tokens
        self.measure_pool(-(-own_tokens // self.engine.limits.block_size) + seq.extra_blocks)
        ends = self.metrics.records.ends
        ends[P_QUEUE][leg.request] = seq.start_ns
        # Its prefill yields the first token: between the two nothing is handed over, admitted or moved.
        for stage in range(PREFILL, NOTIFY + 1):
            ends[stage][leg.request] = seq.first_token_ns
        self.decoded(leg.request_id, seq, seq.finished_ns)
        self.router.later(PrefillAnswered(leg.request_id, KvParams(self.info, leg.xid, leg.request_id, 0)))

    def assert_empty(self) -> None:
        self.core.assert_empty(self.name)

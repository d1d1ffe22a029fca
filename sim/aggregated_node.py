"""An engine that does both: it computes a prompt and decodes from it, and no KV moves. Nothing here is a protocol's.

For the router its leg is a prefill leg that nothing follows; its answer is the whole request's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Dropped, Finished, NeverFitsError, Sequence
from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.results.records import NOTIFY, P_QUEUE, PREFILL, ROUTE
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.engine_node import EngineNode

if TYPE_CHECKING:
    from sim.world import World


class AggregatedLeg:
    __slots__ = ("request", "request_id", "seq", "xid")

    def __init__(self, dispatch: DispatchPrefill, seq: Sequence) -> None:
        self.request = dispatch.request
        self.request_id = dispatch.request_id
        self.xid = dispatch.xid
        self.seq = seq


class AggregatedNode(EngineNode):
    """One engine that serves requests alone."""

    def __init__(self, world: World, index: int, info: EngineInfo, engine: Engine, block_bytes: int) -> None:
        super().__init__(world, index, info.engine, engine, block_bytes)
        self.info = info
        self.by_request: dict[RequestId, AggregatedLeg] = {}
        self.by_seq: dict[int, AggregatedLeg] = {}
        """Under the identity of the sequence: two attempts of one request may meet at one engine."""

    def accept(self, dispatch: DispatchPrefill) -> None:
        """A request has come over HTTP."""
        now, request, records = self.env.now, dispatch.request, self.world.records
        records.ends[ROUTE][request] = now
        records.decode_engine[request] = self.name
        prefix = self.prefix_of(request)
        seq = Sequence(request, records.input_tokens[request], records.output_tokens[request], prefix=prefix)
        try:
            self.engine.submit(seq, now)
        except NeverFitsError:
            self.world.router.later(PrefillAnswered(dispatch.request_id, None, Code.REJECTED))
            return
        self.by_request[dispatch.request_id] = self.by_seq[id(seq)] = AggregatedLeg(dispatch, seq)
        self.rearm()

    def abort(self, request_id: RequestId) -> None:
        """The router takes the request back."""
        leg = self.by_request.get(request_id)
        if leg is not None and self.engine.drop(leg.seq, self.env.now) is not Dropped.NOT_HERE:
            del self.by_request[request_id], self.by_seq[id(leg.seq)]
            self.rearm()

    def came(self, outcome: object) -> None:
        """The engine has generated a request's last token."""
        assert type(outcome) is Finished
        seq, world = outcome.seq, self.world
        leg = self.by_seq.pop(id(seq))
        del self.by_request[leg.request_id]
        # What it found is another's, who may hold it still.
        own_tokens = seq.prompt_tokens + seq.output_tokens - 1 - seq.cached_tokens
        self.measure_pool(-(-own_tokens // self.engine.limits.block_size))
        ends = world.records.ends
        ends[P_QUEUE][leg.request] = seq.start_ns
        # Its prefill yields the first token: between the two nothing is handed over, admitted or moved.
        for stage in range(PREFILL, NOTIFY + 1):
            ends[stage][leg.request] = seq.first_token_ns
        self.decoded(leg.request_id, seq, outcome.at_ns)
        world.router.later(PrefillAnswered(leg.request_id, KvParams(self.info, leg.xid, leg.request_id, 0)))

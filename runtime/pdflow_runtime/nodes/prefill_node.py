"""The node of a prefill engine: from a prefill leg to the KV that lies ready, and until it is released.

What it does with a request is decided in `pdflow/serving/prefill.py`. Here are its tokens, its records and its engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.engine.sequence import Sequence as Seq
from pdflow.protocol.effects import AnswerPrefill, BumpWord, Enqueue, PostWrite, StopWrite
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation, Instant, RequestId, Xid
from pdflow.serving.batch import dropped
from pdflow.serving.core import Endpoint, Port
from pdflow.serving.effects import Computed, Drop, EndPrefill, Forget, FreePrompt, Released
from pdflow.serving.events import PrefillRequested, PromptComputed, PromptWithdrawn, RequestAborted
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import Sending
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.job import GREEDY, Job, Sampling, Token
from pdflow_runtime.engines.loop import EngineOutput, LayerComputed
from pdflow_runtime.engines.sampling.logprobs import PromptScores
from pdflow_runtime.nodes.content import digest_of
from pdflow_runtime.nodes.engine_node import Known, LiveEngineNode
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.observe.event_log import RELEASED, TOKEN
from pdflow_runtime.transports.base import MakeTransport


class LivePrefillLeg:
    """The state of one request at P. `answered` is set once there is `params`, or a `code` that says why there will be
    none; or, if no decode leg comes for its KV, once there is its token."""

    def __init__(self, request_id: RequestId, xid: Xid, job: Job, keeps: bool = True) -> None:
        self.request_id: Final = request_id
        self.xid: Final = xid
        self.job = job
        self.keeps: Final = keeps
        """True if a decode leg comes for its KV."""
        self.token: Token | None = None
        """The answer's first token, if it is asked for."""
        self.begun_ns: Final = now_ns()
        self.computed_ns: Instant = 0
        """The time since when all of its KV is in its blocks; 0 before."""
        self.stages_ns: Final[dict[str, int]] = {}
        """How long each stage took that has ended."""
        self.answered: Final = trio.Event()
        self.params: KvParams | None = None
        self.at: Coordinates | None = None
        """The address of the ranks that have its KV, if these are not ours."""
        self.code = Code.NONE
        self.why = ""
        """The reason for people, if it was rejected."""
        self.noted = False
        """True if its stages in the engine are recorded."""

    def answer(self, params: KvParams | None, code: Code = Code.NONE) -> None:
        self.params, self.code = params, code
        self.answered.set()


class LivePrefillNode(LiveEngineNode):
    """The node of one incarnation of a prefill engine. Args: `sending`: the memory that it sends from."""

    pool_role = "prefill"
    stages = ("p_queue", "prefill")

    def __init__(
        self,
        config: NodeConfig,
        scheduler: ProducerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        sending: Sending | None = None,
    ) -> None:
        self.prefilling: Final = PrefillCore(config.weights, sending or Sending())
        super().__init__(config, scheduler, ranks, transport, self.prefilling)
        self._products: Final = scheduler.products
        self.legs: dict[Xid, LivePrefillLeg] = {}
        """Legs of which anything is left here."""
        self.ending: list[LivePrefillLeg] = []
        """Legs whose last tokens are in the step that runs, where the engine reports chunks."""
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
        self.prefilling.begin(self.scheduler)

    def begin(
        self, request_id: RequestId, xid: Xid, tokens: list[int], sampling: Sampling | None = None
    ) -> LivePrefillLeg:
        """Begin a prefill leg; with `sampling` the first token of its answer is returned, too. KeyError if the leg is
        here already."""
        return self._begin(request_id, xid, tokens, sampling, True)

    def begin_alone(
        self, request_id: RequestId, tokens: list[int], sampling: Sampling, scores: PromptScores | None = None
    ) -> LivePrefillLeg:
        """Begin the only leg of a request that wants one token: no decode leg comes for the KV. `scores`: where the
        logprobs of the prompt's tokens are written. Raises as `begin` does."""
        leg = self._begin(request_id, request_id, tokens, sampling, False, scores)
        self.event_log.passed(request_id, "route")
        return leg

    def _begin(
        self,
        request_id: RequestId,
        xid: Xid,
        tokens: list[int],
        sampling: Sampling | None,
        keeps: bool,
        scores: PromptScores | None = None,
    ) -> LivePrefillLeg:
        unanswered = any(leg.request_id == request_id and not leg.answered.is_set() for leg in self.legs.values())
        if unanswered or xid in self.legs:
            raise KeyError(f"request {request_id} is already being prefilled; every attempt needs a new id")
        most = 1 if sampling is None else sampling.max_tokens
        # A prompt whose tokens are scored shares no blocks: all of it has to be computed.
        prefix = self.engine.names(tokens) if scores is None else ()
        seq = Seq(0, len(tokens), most, prefill_only=True, prefix=prefix, handle=xid)
        job = Job(seq, tokens, sampling or GREEDY, returns_first_token=sampling is not None, scores=scores)
        leg = self.legs[xid] = LivePrefillLeg(request_id, xid, job, keeps)
        self.put(self.role, self.request(leg))
        return leg

    def update_stores(self, stores: tuple[Coordinates, ...]) -> None:
        """Note where the nodes of a store take requests, by the latest request. Kept only where KV goes to a store."""

    def request(self, leg: LivePrefillLeg) -> PrefillRequested:
        tokens = leg.job.tokens
        digest = digest_of(tokens, self.config.weights)
        return PrefillRequested(leg.xid, leg.request_id, len(tokens), digest, leg.keeps)

    def withdraw(self, xid: Xid) -> None:
        """Release a prompt's KV that no decode leg will come for: its blocks would else be held until the lease
        expires."""
        self.put(self.role, PromptWithdrawn(xid))

    def abort(self, leg: LivePrefillLeg) -> None:
        """Abort the leg, as its client or router has disconnected."""
        self.settle()
        if self.legs.get(leg.xid) is leg:
            self.feed(self.role, RequestAborted(leg.xid))

    # The engine.

    def on_engine_output(self, outcome: EngineOutput) -> None:
        """Handle one outcome of the engine: a prompt's token, if it is wanted, or the end of its computation."""
        match outcome:
            case Token(seq=seq):
                leg = self.legs.get(seq.handle)
                if leg is not None:
                    leg.token = outcome
            case ChunkBegun(seq=seq):
                leg = self.legs.get(seq.handle)
                if leg is not None:
                    if outcome.computed + outcome.new >= seq.prompt_tokens:
                        self.ending.append(leg)
                    self.chunk_begun(leg, outcome)
            case LayerComputed(layer=layer, at_ns=at):
                if layer == self.config.shape.num_layers - 1:
                    self._all_layers(at)
                self.layer_computed(layer)
            case Prefilled(seq=seq, at_ns=at):
                leg = self.legs[seq.handle]
                leg.computed_ns = at
                self.feed(self.role, PromptComputed(leg.xid, self.source(leg)))

    def chunk_begun(self, leg: LivePrefillLeg, chunk: ChunkBegun) -> None:
        """Called when a step begins that computes a part of this prompt."""

    def layer_computed(self, layer: int) -> None:
        """Called when that step has computed this layer."""

    def source(self, leg: LivePrefillLeg) -> Allocation:
        """Return the blocks of a prompt, shared ones included."""
        assert leg.job.seq.allocation is not None
        return self.table(leg.job.seq.allocation)

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        self.submit(self.legs[effect.request_id])

    def submit(self, leg: LivePrefillLeg) -> None:
        """Enqueue a leg in the engine; rejected if it can never be computed here."""
        rejected = self.engine.enqueue(leg.job)
        if rejected is not None:
            self.put(self.role, rejected)

    def drop(self, port: Port, effect: Drop) -> None:
        seq = self.legs[effect.handle].job.seq
        self.put(self.role, dropped(seq, self.engine.drop(seq)))

    def free(self, port: Port, effect: FreePrompt) -> None:
        allocation = self.legs[effect.handle].job.seq.allocation
        assert allocation is not None
        self.engine.release(allocation)

    # The record, and whoever asked.

    def _all_layers(self, at: Instant) -> None:
        """Record prompts as computed with their last layer. Where layers leave as they come, D may be done with a
        prompt before P's step has ended."""
        for leg in self.ending:
            request = self.prefilling.request_of(leg.xid)
            if self.legs.get(leg.xid) is leg and request is not None and not request.ended:
                self._note_computed(leg, at)
        self.ending.clear()

    def computed(self, port: Port, effect: Computed) -> None:
        leg = self.legs[effect.handle]
        self._note_computed(leg, leg.computed_ns)

    def _note_computed(self, leg: LivePrefillLeg, at: Instant) -> None:
        """Record the leg's stages in the engine, once: all of its KV has been in its blocks since `at`."""
        if leg.noted:
            return
        leg.noted = True
        start = leg.job.seq.start_ns
        leg.stages_ns.update(p_queue=start - leg.begun_ns, prefill=at - start)
        self.stage(leg.request_id, "p_queue", leg.begun_ns, start)
        self.stage(leg.request_id, "prefill", start, at)
        self.event_log.passed(leg.request_id, "p_queue", start)
        self.event_log.passed(leg.request_id, "prefill", at)

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        for rank, lease_word in zip(self.ranks.values(), effect.params.rank_words, strict=False):
            rank.expose(lease_word)
        self.legs[effect.params.xid].answer(effect.params)

    def end(self, port: Port, effect: EndPrefill) -> None:
        """End a leg without KV: P's token is all that was asked for, or there is no answer."""
        leg = self.legs[effect.handle]
        if effect.code is Code.NONE:
            self.event_log.passed(leg.request_id, TOKEN)
        leg.why = effect.reason
        leg.answer(None, effect.code)

    def released(self, port: Port, effect: Released) -> None:
        self.event_log.passed(self.legs[effect.handle].request_id, RELEASED)
        if effect.code is Code.EXPIRED:
            for rank in self.ranks.values():
                if rank.meter is not None:
                    rank.meter.expired()

    def forget(self, port: Port, effect: Forget) -> None:
        leg = self.legs.pop(effect.handle)
        if self.traces is not None:
            self.traces.ended(leg.request_id, leg.code, now_ns())

    def known(self) -> list[Known]:
        return [Known(leg.request_id, self._state(leg), leg.begun_ns) for leg in self.legs.values()]

    def _state(self, leg: LivePrefillLeg) -> str:
        """Return `leased` while the protocol holds its KV; else the phase of the engine's sequence."""
        product = self._products.get(leg.xid)
        if product is not None and product.allocation is not None:
            return "leased"
        phase: str = leg.job.seq.phase.name.lower()
        return phase

    # Transfers.

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.ranks[port.address].write(effect)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.ranks[port.address].transfers.stop(effect.op)

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.ranks[port.address].bump(effect.lease_word)

"""A prefill engine, live: from a prefill leg to the KV that lies ready, and until it is let go of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from pdflow.engine.sequence import ChunkBegun, Dropped, NeverFitsError, Prefilled
from pdflow.engine.sequence import Sequence as Seq
from pdflow.protocol.effects import AnswerPrefill, BumpWord, PostWrite, ReleaseBlocks, StopWrite
from pdflow.protocol.events import PrefillAborted, PrefillFinished, PrefillQueued, SourceWithdrawn
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation, Instant, RequestId, Xid
from pdflow.serving.core import Endpoint, Port
from runtime.clock import now_ns
from runtime.content import digest_of
from runtime.diary import RELEASED, TOKEN
from runtime.engine_node import EngineNode, Known
from runtime.engines.job import GREEDY, Job, Sampling, Token
from runtime.engines.loop import LayerComputed, Told
from runtime.kv_params import Coordinates
from runtime.ranked_node import Place
from runtime.transports.base import MakeTransport


class PrefillLeg:
    """One prompt at P. `answered` is set once there is `params`, or a `code` that says why there will be none; or, if
    nobody comes for its KV, once there is its token."""

    def __init__(self, request_id: RequestId, xid: Xid, job: Job, keeps: bool = True) -> None:
        self.request_id: Final = request_id
        self.xid: Final = xid
        self.job = job
        self.keeps: Final = keeps
        """A decode leg comes for its KV."""
        self.token: Token | None = None
        """The answer's first, if it is to be told."""
        self.begun_ns: Final = now_ns()
        self.answered: Final = trio.Event()
        self.params: KvParams | None = None
        self.at: Coordinates | None = None
        """Where the ranks hear that have its KV, if these are not ours."""
        self.code = Code.NONE
        self.noted = False
        """Its stages in the engine are over."""

    def answer(self, params: KvParams | None, code: Code = Code.NONE) -> None:
        self.params, self.code = params, code
        self.answered.set()


class PrefillNode(EngineNode):
    """One life of a prefill engine."""

    def __init__(
        self,
        place: Place,
        scheduler: ProducerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
    ) -> None:
        super().__init__(place, scheduler, ranks, transport)
        self.by_request: dict[RequestId, PrefillLeg] = {}
        """Not answered yet."""
        self.by_xid: dict[Xid, PrefillLeg] = {}
        """Whose blocks are not free yet."""
        self.by_seq: dict[int, PrefillLeg] = {}
        """Being computed, under the identity of the sequence."""
        self.ending: list[PrefillLeg] = []
        """Whose last tokens are in the step that runs, where the engine reports chunks."""
        self.do.update(
            {
                PostWrite: self.post_write,
                StopWrite: self.stop_write,
                AnswerPrefill: self.answer,
                ReleaseBlocks: self.release,
                BumpWord: self.bump,
            }
        )

    def begin(self, request_id: RequestId, xid: Xid, tokens: list[int], sampling: Sampling | None = None) -> PrefillLeg:
        """A prefill leg has come; with `sampling` the first token of its answer is told, too. NeverFitsError if the
        prompt is too long for this engine, ever; KeyError if the leg is here already."""
        leg = self._leg(request_id, xid, tokens, sampling, True)
        self.submit(leg)
        self._know(leg)
        self.put(self.scheduler, PrefillQueued(xid, request_id))
        return leg

    def begin_alone(self, request_id: RequestId, tokens: list[int], sampling: Sampling) -> PrefillLeg:
        """The only leg of a request that wants one token: nobody comes for the KV. Raises as `begin` does."""
        leg = self._leg(request_id, request_id, tokens, sampling, False)
        self.engine.submit(leg.job)
        self._know(leg)
        self.diary.passed(request_id, "route")
        return leg

    def _leg(
        self, request_id: RequestId, xid: Xid, tokens: list[int], sampling: Sampling | None, keeps: bool
    ) -> PrefillLeg:
        if request_id in self.by_request or xid in self.by_xid:
            raise KeyError(f"request {request_id} is being prefilled already; every attempt needs an id of its own")
        most = 1 if sampling is None else sampling.max_tokens
        seq = Seq(0, len(tokens), most, prefill_only=True, prefix=self.engine.names(tokens))
        job = Job(seq, tokens, sampling or GREEDY, tells_first=sampling is not None)
        return PrefillLeg(request_id, xid, job, keeps)

    def _know(self, leg: PrefillLeg) -> None:
        self.by_request[leg.request_id] = self.by_xid[leg.xid] = self.by_seq[id(leg.job.seq)] = leg

    def submit(self, leg: PrefillLeg) -> None:
        """Into the engine's queue. NeverFitsError."""
        self.engine.submit(leg.job)

    def withdraw(self, xid: Xid) -> None:
        """Nobody is to come for its KV: were its lease waited for, so would be its blocks."""
        self.put(self.scheduler, SourceWithdrawn(xid))

    def abort_alone(self, leg: PrefillLeg) -> None:
        """Whoever asked has gone, and nobody was to come for the KV."""
        if self.engine.drop(leg.job.seq) is not Dropped.NOT_HERE:
            del self.by_request[leg.request_id], self.by_xid[leg.xid], self.by_seq[id(leg.job.seq)]

    def abort(self, leg: PrefillLeg) -> None:
        """Whoever asked has gone. A finished prompt stays: its lease decides."""
        if self.engine.drop(leg.job.seq) is Dropped.NOT_HERE:
            return
        del self.by_request[leg.request_id], self.by_xid[leg.xid], self.by_seq[id(leg.job.seq)]
        self.put(self.scheduler, PrefillAborted(leg.xid, Code.CANCELLED))

    def came(self, outcome: Told) -> None:
        """The engine has something to tell: a prompt's token, if it is wanted, and that its KV is there."""
        match outcome:
            case Token(seq=seq):
                told = self.by_seq.get(id(seq))
                if told is not None:
                    told.token = outcome
            case ChunkBegun(seq=seq):
                leg = self.by_seq.get(id(seq))
                if leg is not None:
                    if outcome.computed + outcome.new >= seq.prompt_tokens:
                        self.ending.append(leg)
                    if leg.keeps:
                        self.chunk_begun(leg, outcome)
            case LayerComputed(layer=layer, at_ns=at):
                if layer == self.place.shape.num_layers - 1:
                    self._all_layers(at)
                self.layer_computed(layer)
            case Prefilled(seq=seq, at_ns=at):
                leg = self.by_seq.pop(id(seq))
                self._note_computed(leg, at)
                if leg.keeps:
                    self.computed(leg)
                else:
                    self.done_here(leg)

    def chunk_begun(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        """A step has begun that computes a part of this prompt."""

    def layer_computed(self, layer: int) -> None:
        """That step has come so far."""

    def _all_layers(self, at: Instant) -> None:
        """Where layers leave as they come, D may be done with a prompt before P's step has ended."""
        for leg in self.ending:
            if self.by_seq.get(id(leg.job.seq)) is leg:
                self._note_computed(leg, at)
        self.ending.clear()

    def _note_computed(self, leg: PrefillLeg, at: Instant) -> None:
        """All of its KV has been in its blocks since then."""
        if leg.noted:
            return
        leg.noted = True
        start = leg.job.seq.start_ns
        self.stage("p_queue", leg.begun_ns, start)
        self.stage("prefill", start, at)
        self.diary.passed(leg.request_id, "p_queue", start)
        self.diary.passed(leg.request_id, "prefill", at)

    def done_here(self, leg: PrefillLeg) -> None:
        """P's token is all that was asked for."""
        del self.by_request[leg.request_id], self.by_xid[leg.xid]
        assert leg.job.seq.allocation is not None
        self.engine.release(leg.job.seq.allocation)
        self.diary.passed(leg.request_id, TOKEN)
        leg.answered.set()

    def computed(self, leg: PrefillLeg) -> None:
        """All of a prompt's KV is in its blocks."""
        self.feed(self.scheduler, PrefillFinished(*self.about(leg)))

    def about(self, leg: PrefillLeg) -> tuple[Xid, Allocation, int, int, int]:
        """What the protocol is told of a prompt: where it lies, how long it is, what it was computed from."""
        seq, weights = leg.job.seq, self.place.weights
        assert seq.allocation is not None
        return leg.xid, self.table(seq.allocation), seq.prompt_tokens, digest_of(leg.job.tokens, weights), weights

    def known(self) -> list[Known]:
        return [Known(leg.request_id, leg.xid, leg.job.seq, leg.begun_ns) for leg in self.by_xid.values()]

    # The protocol's effects.

    def answer(self, port: Port, effect: AnswerPrefill) -> None:
        for rank, word in zip(self.ranks.values(), effect.params.words, strict=False):
            rank.expose(word)
        self.by_request.pop(effect.request_id).answer(effect.params)

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.ranks[port.address].write(effect)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.ranks[port.address].orders.stop(effect.op)

    def bump(self, port: Port, effect: BumpWord) -> None:
        self.ranks[port.address].bump(effect.word)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        leg = self.by_xid.pop(effect.xid)
        self.diary.passed(leg.request_id, RELEASED)
        self.note_expired(effect.code)
        assert leg.job.seq.allocation is not None
        self.engine.release(leg.job.seq.allocation)

    def note_expired(self, code: Code) -> None:
        if code is Code.EXPIRED:
            for rank in self.ranks.values():
                if rank.meter is not None:
                    rank.meter.expired()


__all__ = ["NeverFitsError", "PrefillLeg", "PrefillNode"]

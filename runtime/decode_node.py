"""A decode engine, live: from a decode leg to its last token, and until nobody can write to its blocks any more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import trio

from pdflow.engine.sequence import Admitted, Dropped, Finished, NeverFitsError
from pdflow.engine.sequence import Sequence as Seq
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, PostRead, Quarantine, ReadWord, Resolve
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeQueued
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from runtime.clock import now_ns
from runtime.content import digest_of
from runtime.diary import TOKEN
from runtime.engine_node import EngineNode, Known
from runtime.engines.job import Job, Sampling, Token
from runtime.engines.loop import Told
from runtime.node import Endpoint, Port
from runtime.ranked_node import MakeTransport, Place

UNKNOWN: Final = 0
"""In the place of a token that is still to be told."""
Said: TypeAlias = Token | Code
"""A token, or the end: NONE if all have come."""


class DecodeLeg:
    """One request at D. `said` yields its tokens, then a Code."""

    def __init__(self, request_id: RequestId, prompt: list[int], job: Job, alone: bool) -> None:
        self.request_id: Final = request_id
        self.prompt: Final = prompt
        self.job: Final = job
        """Of the prompt and, where P's token is the answer's first, of that: what D's first step computes."""
        self.begun_ns: Final = now_ns()
        self.step_ns = self.begun_ns
        """When its last stage ended."""
        self.granted = False
        """The protocol has been told of its blocks."""
        self.loaded = False
        """Its KV is here: the protocol is done with it."""
        self.waits = False
        """P's token is the answer's first, and is not known here yet."""
        self.in_blocks = False
        """Its KV is where the engine computes."""
        self.alone: Final = alone
        """Its prompt is computed here; the protocol knows nothing of it."""
        self.tell, self.said = trio.open_memory_channel[Said](math.inf)
        """Bounded by the tokens that it may generate."""


class DecodeNode(EngineNode):
    """One life of a decode engine."""

    def __init__(
        self,
        place: Place,
        scheduler: ConsumerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
    ) -> None:
        super().__init__(place, scheduler, ranks, transport)
        self._cells = scheduler.cells
        self.legs: dict[RequestId, DecodeLeg] = {}
        self.by_seq: dict[int, DecodeLeg] = {}
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

    def begin(
        self,
        request_id: RequestId,
        params: KvParams,
        tokens: list[int],
        sampling: Sampling,
        first: int | None = None,
        first_follows: bool = False,
    ) -> DecodeLeg:
        """A decode leg has come, whose KV a prefill engine has or will have. `first`: the answer's first token, which
        P has told; one that follows is told by `tell_first`."""
        leg = self._leg(request_id, tokens, sampling, False, UNKNOWN if first_follows else first)
        leg.waits = first_follows
        blocks = -(-len(tokens) // self.place.info.shards.block_size)
        self.put(self.scheduler, DecodeQueued(request_id, params, blocks, 0))
        return leg

    def tell_first(self, leg: DecodeLeg, token: int) -> None:
        """P has computed the answer's first token, and its client has it."""
        leg.job.tokens = [*leg.prompt, token]
        leg.waits = False
        if leg.in_blocks and self.legs.get(leg.request_id) is leg:
            self.engine.loaded(leg.job.seq)

    def begin_alone(
        self, request_id: RequestId, tokens: list[int], sampling: Sampling, first: int | None = None
    ) -> DecodeLeg:
        """The only leg of a request: its prompt is computed here, and so is the KV of a first token that a P has told
        of its answer. NeverFitsError if it can never be."""
        leg = self._leg(request_id, tokens, sampling, True, first)
        try:
            self.engine.submit(leg.job)
        except NeverFitsError:
            self._forget(leg)
            raise
        return leg

    def _leg(
        self, request_id: RequestId, tokens: list[int], sampling: Sampling, alone: bool, first: int | None
    ) -> DecodeLeg:
        if request_id in self.legs or request_id in self._cells:
            raise KeyError(f"request {request_id} is here already; every attempt needs an id of its own")
        given = first is not None
        if given:
            sampling = attrs.evolve(sampling, max_tokens=max(1, sampling.max_tokens - 1))
        known = tokens if first is None else [*tokens, first]
        seq = Seq(
            0,
            len(known),
            sampling.max_tokens,
            remote_kv=not alone,
            remote_tokens=0 if alone else len(tokens),
            prefix=self.engine.names(tokens),
        )
        leg = DecodeLeg(request_id, tokens, Job(seq, known, sampling, int(given)), alone)
        self.legs[request_id] = self.by_seq[id(seq)] = leg
        return leg

    def abort(self, leg: DecodeLeg) -> None:
        """Whoever asked has gone: before it is loaded that is the protocol's business, after it the engine's."""
        self.settle()
        if self.legs.get(leg.request_id) is not leg:
            return
        if not leg.alone and not leg.loaded:
            self.put(self.scheduler, DecodeAborted(leg.request_id, Code.CANCELLED))
            return
        if self.engine.drop(leg.job.seq) is Dropped.BLOCKS_ARE_YOURS:
            # Its KV was all here, and P's token was not.
            assert leg.job.seq.allocation is not None
            self.engine.release(leg.job.seq.allocation)
        self._end(leg, Code.CANCELLED)

    def _end(self, leg: DecodeLeg, code: Code) -> None:
        self._forget(leg)
        self.diary.generated(leg.request_id, leg.job.given + leg.job.seq.generated)
        leg.tell.send_nowait(code)

    def _forget(self, leg: DecodeLeg) -> None:
        del self.legs[leg.request_id], self.by_seq[id(leg.job.seq)]

    def came(self, outcome: Told) -> None:
        """The engine has something to tell."""
        match outcome:
            case Token(seq=seq):
                leg = self.by_seq.get(id(seq))
                if leg is not None:
                    if seq.generated == 0:
                        self.first(leg)
                    leg.tell.send_nowait(outcome)
            case Admitted(seq=seq):
                self.settle()
                leg = self.by_seq.get(id(seq))
                if leg is None:
                    return  # it has ended meanwhile, and given back what it had just got
                self.passed(leg, "d_admit")
                assert seq.allocation is not None
                leg.granted = True
                tokens, here = leg.prompt, seq.cached_tokens
                digest = digest_of(tokens, self.place.weights)
                self.feed(
                    self.scheduler,
                    DecodeAdmitted(
                        leg.request_id, seq.allocation, here, len(tokens) - here, digest, self.place.weights
                    ),
                )
            case Finished(seq=seq):
                self._end(self.by_seq[id(seq)], Code.NONE)

    def first(self, leg: DecodeLeg) -> None:
        """Its first token is here. Alone, its prompt has just been computed."""
        if leg.alone:
            self.diary.passed(leg.request_id, "route", leg.begun_ns)
            self.diary.passed(leg.request_id, "p_queue", leg.job.seq.start_ns)
        else:
            self.passed(leg, "first_decode")
        self.diary.passed(leg.request_id, TOKEN)

    def passed(self, leg: DecodeLeg, stage: str) -> None:
        """It has come through this stage, too."""
        self.stage(stage, leg.step_ns)
        leg.step_ns = now_ns()

    def known(self) -> list[Known]:
        return [Known(leg.request_id, leg.request_id, leg.job.seq, leg.begun_ns) for leg in self.legs.values()]

    # The protocol's effects.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        try:
            self.engine.submit(self.legs[effect.request_id].job)
        except NeverFitsError:
            self.put(self.scheduler, DecodeAborted(effect.request_id, Code.REJECTED))

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.ranks[port.address].read(effect)

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.ranks[port.address].read_word(effect)

    def commit(self, port: Port, effect: Commit) -> None:
        leg = self.legs[effect.request_id]
        self.passed(leg, "transfer")
        leg.loaded = True
        self.landed(leg)

    def landed(self, leg: DecodeLeg) -> None:
        """Its KV is in its blocks."""
        leg.in_blocks = True
        if not leg.waits:
            self.engine.loaded(leg.job.seq)

    def resolve(self, port: Port, effect: Resolve) -> None:
        """The request is over; what remains of its blocks is the protocol's to give back."""
        leg = self.legs[effect.request_id]
        dropped = self.engine.drop(leg.job.seq)
        assert dropped in (Dropped.NOT_HERE, Dropped.AT_ONCE, Dropped.BLOCKS_ARE_YOURS)
        if dropped is Dropped.BLOCKS_ARE_YOURS and not leg.granted:
            # The engine gave it blocks in this very turn: the protocol never heard of them.
            allocation = leg.job.seq.allocation
            assert allocation is not None
            self.engine.release(allocation)
        self._end(leg, effect.code)

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.pool.quarantine(effect.allocation)

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation)

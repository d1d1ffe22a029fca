"""The node of a decode engine: from a decode leg to its last token, and until no peer can write to its blocks any more.

What it does with a request is decided in `pdflow/serving/decode.py`. Here are its tokens, its records and its engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import trio

from pdflow.engine.sequence import Admitted, Finished
from pdflow.engine.sequence import Sequence as Seq
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, PostRead, Quarantine, ReadWord
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, RequestId
from pdflow.serving.batch import dropped
from pdflow.serving.core import Endpoint, Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import Admit, Drop, EndDecode, Landed
from pdflow.serving.events import (
    AloneRequested,
    DecodeRequested,
    EngineAdmitted,
    EngineFinished,
    FirstTokenKnown,
    RequestAborted,
)
from pdflow.serving.landing import Landing
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.job import Job, Sampling, Token
from pdflow_runtime.engines.loop import EngineOutput
from pdflow_runtime.engines.sampling.logprobs import PromptScores
from pdflow_runtime.nodes.content import digest_of
from pdflow_runtime.nodes.engine_node import Known, LiveEngineNode
from pdflow_runtime.nodes.models import weights_words
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.observe.event_log import TOKEN
from pdflow_runtime.transports.base import MakeTransport

log = logging.getLogger(__name__)

UNKNOWN: Final = 0
"""Stands in the prompt's tokens for a first token that is still to come."""
TokenOrEnd: TypeAlias = Token | Code
"""A token, or the end: NONE if all have come."""


class DecodeLeg:
    """The state of one request at D. `receive_channel` yields its tokens, then a Code."""

    def __init__(self, request_id: RequestId, prompt: list[int], job: Job, alone: bool) -> None:
        self.request_id: Final = request_id
        self.prompt: Final = prompt
        self.job: Final = job
        """The engine's job of D's first step: the prompt and, where P's token is the answer's first, that token."""
        self.begun_ns: Final = now_ns()
        self.step_ns = self.begun_ns
        """The time at which its last stage ended."""
        self.stages_ns: Final[dict[str, int]] = {}
        """How long each stage took that has ended."""
        self.alone: Final = alone
        """True if its prompt is computed here; the protocol knows nothing of it."""
        self.why = ""
        """The reason that the engine gave for rejecting it."""
        self.source: EngineId | None = None
        """The engine or store whose KV it decodes from."""
        self.source_weights = 0
        """The number of the weights of that KV, if the request names it, as a request does whose KV is read."""
        self.send_channel, self.receive_channel = trio.open_memory_channel[TokenOrEnd](math.inf)
        """Bounded by the number of tokens that it may generate."""


class LiveDecodeNode(LiveEngineNode):
    """The node of one incarnation of a decode engine. Args: `landing`: where KV lands."""

    pool_role = "decode"
    stages = ("d_admit", "transfer", "first_decode")

    def __init__(
        self,
        config: NodeConfig,
        scheduler: ConsumerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        landing: Landing | None = None,
    ) -> None:
        self.decoding: Final = DecodeCore(config.weights, landing or Landing())
        super().__init__(config, scheduler, ranks, transport, self.decoding)
        self._cells = scheduler.cells
        self._other_weights: set[EngineId] = set()
        """Sources of which the log has said that their KV was computed with other weights."""
        self.legs: dict[RequestId, DecodeLeg] = {}
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
            }
        )
        self.decoding.begin(self.scheduler)

    def begin(
        self,
        request_id: RequestId,
        params: KvParams,
        tokens: list[int],
        sampling: Sampling,
        first: int | None = None,
        first_follows: bool = False,
        given: int = 0,
    ) -> DecodeLeg:
        """Begin a decode leg whose KV a prefill engine has or will have. `first`: the answer's first token, if P has
        sent it; with `first_follows` it is passed to `set_first_token` later. `given`: how many of the tokens, at their
        end, are the answer's beginning, which another D has generated."""
        leg = self._leg(request_id, tokens, sampling, False, UNKNOWN if first_follows else first, given)
        leg.source, leg.source_weights = params.prefill.engine, params.weights
        blocks = -(-len(tokens) // self.config.info.shards.block_size)
        digest = digest_of(tokens, self.config.weights)
        asked = DecodeRequested(request_id, params, blocks, len(tokens), digest, first_follows)
        self.put(self.role, asked)
        return leg

    def set_first_token(self, leg: DecodeLeg, token: int) -> None:
        """Set the answer's first token, which P has computed and the client has already received."""
        leg.job.tokens = [*leg.prompt, token]
        if self.legs.get(leg.request_id) is leg:
            self.put(self.role, FirstTokenKnown(leg.request_id))

    def begin_alone(
        self,
        request_id: RequestId,
        tokens: list[int],
        sampling: Sampling,
        first: int | None = None,
        given: int = 0,
        *,
        scores: PromptScores | None = None,
    ) -> DecodeLeg:
        """Begin the only leg of a request: its prompt is computed here, and so is the KV of a first token that a P has
        computed for its answer. `given`: as in `begin`. `scores`: where the logprobs of the prompt's tokens are
        written."""
        leg = self._leg(request_id, tokens, sampling, True, first, given, scores=scores)
        self.put(self.role, AloneRequested(request_id))
        return leg

    def _leg(
        self,
        request_id: RequestId,
        tokens: list[int],
        sampling: Sampling,
        alone: bool,
        first: int | None,
        given: int,
        *,
        scores: PromptScores | None = None,
    ) -> DecodeLeg:
        if request_id in self.legs or request_id in self._cells or self.decoding.knows(request_id):
            raise KeyError(f"request {request_id} is already open; every attempt needs a new id")
        given += first is not None
        if given:
            sampling = attrs.evolve(sampling, max_tokens=max(1, sampling.max_tokens - given))
        known = tokens if first is None else [*tokens, first]
        seq = Seq(
            0,
            len(known),
            sampling.max_tokens,
            remote_kv=not alone,
            remote_tokens=0 if alone else len(tokens),
            # A prompt whose tokens are scored shares no blocks: all of it has to be computed.
            prefix=self.engine.names(tokens) if scores is None else (),
            handle=request_id,
        )
        job = Job(seq, known, sampling, given, scores=scores)
        leg = self.legs[request_id] = DecodeLeg(request_id, tokens, job, alone)
        return leg

    def abort(self, leg: DecodeLeg) -> None:
        """Abort the leg, as its client or router has disconnected."""
        self.settle()
        if self.legs.get(leg.request_id) is leg:
            self.feed(self.role, RequestAborted(leg.request_id))

    # The engine.

    def on_engine_output(self, outcome: EngineOutput) -> None:
        """Handle one outcome of the engine."""
        match outcome:
            case Token(seq=seq):
                leg = self.legs[seq.handle]
                if seq.generated == 0:
                    self.first(leg)
                leg.send_channel.send_nowait(outcome)
            case Admitted(seq=seq):
                assert seq.allocation is not None
                self.feed(self.role, EngineAdmitted(seq.handle, seq.allocation, seq.cached_tokens))
            case Finished(seq=seq):
                self.feed(self.role, EngineFinished(seq.handle))

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        leg = self.legs[effect.request_id]
        rejected = self.engine.enqueue(leg.job)
        if rejected is not None:
            leg.why = rejected.reason
            self.put(self.role, rejected)

    def drop(self, port: Port, effect: Drop) -> None:
        seq = self.legs[effect.handle].job.seq
        self.put(self.role, dropped(seq, self.engine.drop(seq)))

    def commit(self, port: Port, effect: Commit) -> None:
        self.engine.loaded(self.legs[effect.request_id].job.seq)

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.pool.quarantine(effect.allocation)

    def free(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation)

    # The record, and whoever asked.

    def admit(self, port: Port, effect: Admit) -> None:
        self.passed(self.legs[effect.handle], "d_admit")

    def landed(self, port: Port, effect: Landed) -> None:
        self.passed(self.legs[effect.handle], "transfer")

    def first(self, leg: DecodeLeg) -> None:
        """Record a leg's first token. Without remote KV, its prompt has just been computed."""
        if leg.alone:
            start = leg.job.seq.start_ns
            leg.stages_ns.update(p_queue=start - leg.begun_ns, prefill=now_ns() - start)
            self.event_log.passed(leg.request_id, "route", leg.begun_ns)
            self.event_log.passed(leg.request_id, "p_queue", start)
            if self.traces is not None:
                self.traces.alone(leg.request_id, leg.begun_ns, leg.stages_ns)
        else:
            self.passed(leg, "first_decode")
        self.event_log.passed(leg.request_id, TOKEN)

    def end(self, port: Port, effect: EndDecode) -> None:
        leg = self.legs.pop(effect.handle)
        self.event_log.generated(leg.request_id, leg.job.given + leg.job.seq.generated)
        if effect.code is Code.WEIGHTS and leg.source is not None:
            self._refused_weights(leg.source, leg.source_weights)
        leg.send_channel.send_nowait(effect.code)
        if self.traces is not None:
            self.traces.ended(leg.request_id, effect.code, now_ns())

    def _refused_weights(self, source: EngineId, weights: int) -> None:
        """Log a refusal of KV for its weights, once for each source: every request from that source ends like this."""
        if source not in self._other_weights:
            self._other_weights.add(source)
            theirs = f" ({weights_words(weights)})" if weights else ""
            log.error(
                "%s: refused KV from %s (WEIGHTS): its weights, config.json or dtype%s differ from those here (%s); "
                "compare the `weights` line that each engine logs at its start",
                self.name,
                source,
                theirs,
                weights_words(self.config.weights),
            )

    def passed(self, leg: DecodeLeg, stage: str) -> None:
        """Record that the leg has passed this stage."""
        now = now_ns()
        leg.stages_ns[stage] = now - leg.step_ns
        self.stage(leg.request_id, stage, leg.step_ns, now)
        leg.step_ns = now

    def known(self) -> list[Known]:
        return [Known(leg.request_id, self._state(leg), leg.begun_ns) for leg in self.legs.values()]

    def _state(self, leg: DecodeLeg) -> str:
        """Return the phase of the protocol's cell while there is one; else that of the engine's sequence."""
        cell = self._cells.get(leg.request_id)
        phase: str = (leg.job.seq if cell is None else cell).phase.name.lower()
        return phase

    # Transfers.

    def post_read(self, port: Port, effect: PostRead) -> None:
        self.ranks[port.address].read(effect)

    def read_word(self, port: Port, effect: ReadWord) -> None:
        self.ranks[port.address].read_word(effect)

"""D alone: requests whose KV comes, whose first token comes later, and whose prompt D computes itself, in every order.

The real `DecodeCore` decides. Its endpoint and its engine are what they may do: `DecodeEndpoint` commits a request, or
resolves it, and the engine admits, rejects, decodes and drops. The world knows who holds which blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Any, Final

from pdflow.methods.method import PipelinePolicy
from pdflow.protocol.effects import Commit, Enqueue, Outcome, Resolve
from pdflow.protocol.events import DecodeAdmitted, PrefillLegEnded
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import Admit, EndDecode, Landed
from pdflow.serving.events import (
    AloneRequested,
    DecodeRequested,
    EngineAdmitted,
    EngineDropped,
    EngineFinished,
    EngineRejected,
    FirstTokenKnown,
    PrefillReported,
    RequestAborted,
)
from pdflow.serving.landing import Landing
from pdflow_sim.check.datapath.core_world import CoreWorld
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.stub_endpoints import ConsumerStub
from pdflow_sim.check.search.forward import Move, Violation

TOKENS: Final = 32
WEIGHTS, NEW_WEIGHTS, DIGEST = 3, 4, 7
FOLLOWS, PLAIN, ALONE = range(3)
"""The requests: P's first token follows, the decode leg has it, D computes the prompt."""
NAMES: Final = ("d0", "d1", "d2")


class DecodingPhase(IntEnum):
    """What the engine does with a request."""

    NOTHING = 0
    QUEUED = 1
    LOADING = 2
    """It has blocks, and its KV is not there."""
    DECODING = 3


class DecodeEndpoint(ConsumerStub):
    """The endpoint of D's scheduler, as far as the core depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: dict[str, bool] = {}
        """Whether each request that was just admitted is to be decoded with the new weights."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        if not isinstance(event, PrefillLegEnded):
            return super().handle(event, now)
        if event.ok or event.request_id not in self.open:
            return ()
        return self.ended(event.request_id, Code.PREFILL_ABORTED)

    def admitted(self, event: DecodeAdmitted) -> None:
        if (event.digest, event.token_start + event.num_tokens) != (DIGEST, TOKENS):
            raise Violation(Finding.INDEX, f"{event.request_id} is admitted as {event}")
        self.reported[event.request_id] = event.weights == NEW_WEIGHTS


class DecodingWorld(CoreWorld):
    """A state of D and its engine; implements `Explorable`. Args: `requests` that are made; `updates`: the model may
    get other weights."""

    core: DecodeCore
    loading = DecodingPhase.LOADING

    def __init__(self, pipeline_policy: PipelinePolicy, requests: tuple[int, ...], *, updates: bool = False) -> None:
        super().__init__(NAMES, failures=1, aborts=1)
        self.pipeline_policy = pipeline_policy
        self.requests = requests
        self.whole_batches = pipeline_policy.fails_whole_batches
        self.core = DecodeCore(WEIGHTS, Landing(), pipeline_policy.decode_waits, self.whole_batches)
        self.endpoint = DecodeEndpoint()
        self.port = Port("d", self.endpoint, 1)
        self.core.add(self.port)
        self.core.do[Enqueue] = self.enqueue
        self.perform_all(
            {
                Admit: self.nothing,
                Commit: self.commit,
                EndDecode: self.end,
                Enqueue: self.enqueue,
                Landed: self.nothing,
            }
        )
        self.core.begin(self.port)
        self.phases = [DecodingPhase.NOTHING] * len(NAMES)
        self.first_known = False
        self.ends: dict[str, Code] = {}
        self.causes: dict[str, Code] = {}
        """The codes with which requests must end."""
        self.may_update, self.updated = updates, False
        """Whether the model may get other weights, and has them."""

    # What the core asks of its driver.

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        r = NAMES.index(effect.request_id)
        if self.phases[r] is not DecodingPhase.NOTHING:
            raise Violation(Finding.TWICE, f"{effect.request_id} is queued, and is {self.phases[r].name}")
        self.phases[r] = DecodingPhase.QUEUED

    def commit(self, port: Port, effect: Commit) -> None:
        r = NAMES.index(effect.request_id)
        if self.phases[r] is not DecodingPhase.LOADING or effect.request_id in self.endpoint.open:
            raise Violation(Finding.STALE, f"{effect.request_id} decodes, and is {self.phases[r].name}")
        if r == FOLLOWS and not self.first_known:
            raise Violation(Finding.STALE, f"{effect.request_id} decodes without P's first token")
        self.phases[r] = DecodingPhase.DECODING

    def end(self, port: Port, effect: EndDecode) -> None:
        expected = self.causes.get(effect.handle)
        if effect.handle in self.ends or expected is not effect.code:
            raise Violation(Finding.ANSWER, f"{effect.handle} ends as {effect.code.name}, with the cause {expected}")
        self.ends[effect.handle] = effect.code

    # What may happen.

    def moves(self) -> Iterator[Move]:
        for r in self.requests:
            name = NAMES[r]
            if not self.asked[r]:
                yield ("request", r, 0)
                continue
            yield from self.engine_moves(r, name)
            if name in self.endpoint.open:
                if self.endpoint.open[name] is not None:
                    yield ("landed", r, 0)
                if self.failures:
                    yield ("load_fails", r, 0)
                    yield ("prefill_fails", r, 0)
            if self.aborts and name not in self.ends:
                yield ("abort", r, 0)
        if self.asked[FOLLOWS] and not self.first_known:
            yield ("first_token", FOLLOWS, 0)
        if self.may_update and not self.updated:
            yield ("update", 0, 0)

    def engine_moves(self, r: int, name: str) -> Iterator[Move]:
        phase = self.phases[r]
        if name in self.dropping:
            yield ("dropped", r, 0)
        # Several requests may enter the step before which the engine waits.
        if phase is DecodingPhase.QUEUED:
            yield ("admit", r, 0)
            if r == PLAIN:
                yield ("admit", r, TOKENS)
            if self.failures:
                yield ("reject", r, 0)
        if phase is DecodingPhase.DECODING and name not in self.dropping and not self.held_engine:
            yield ("finish", r, 0)

    def start(self) -> DecodingWorld:
        return DecodingWorld(self.pipeline_policy, self.requests, updates=self.may_update)

    def do_request(self, r: int, _: int) -> None:
        self.asked[r] = True
        name = NAMES[r]
        if r == ALONE:
            self.feed(AloneRequested(name))
            return
        params = KvParams(EngineInfo("p", Shards(1, 1, 16)), f"x{r}", f"p{r}", TOKENS)
        self.feed(DecodeRequested(name, params, 2, TOKENS, DIGEST, first_follows=r == FOLLOWS))

    def do_abort(self, r: int, _: int) -> None:
        self.aborts -= 1
        self.causes[NAMES[r]] = Code.CANCELLED
        self.feed(RequestAborted(NAMES[r]))
        if NAMES[r] not in self.ends:
            raise Violation(Finding.ANSWER, f"{NAMES[r]} is aborted, and has not ended")

    def do_first_token(self, r: int, _: int) -> None:
        self.first_known = True
        self.feed(FirstTokenKnown(NAMES[r]))

    def do_update(self, _: int, __: int) -> None:
        self.updated = True
        self.core.set_weights(NEW_WEIGHTS)

    def do_admit(self, r: int, hit_tokens: int) -> None:
        blocks = self.give_blocks(r)
        if r == ALONE:
            self.phases[r] = DecodingPhase.DECODING
            return
        self.phases[r] = DecodingPhase.LOADING
        self.feed(EngineAdmitted(NAMES[r], blocks, hit_tokens))
        if self.endpoint.reported.pop(NAMES[r], self.updated) is not self.updated:
            raise Violation(Finding.STALE, f"{NAMES[r]} is admitted with other weights than the model's")

    def do_reject(self, r: int, _: int) -> None:
        self.failures -= 1
        self.phases[r] = DecodingPhase.NOTHING
        self.causes.setdefault(NAMES[r], Code.REJECTED)
        self.feed(EngineRejected(NAMES[r]))

    def do_finish(self, r: int, _: int) -> None:
        self.phases[r], self.blocks[r] = DecodingPhase.NOTHING, None
        self.causes[NAMES[r]] = Code.NONE
        self.feed(EngineFinished(NAMES[r]))

    def do_dropped(self, r: int, _: int) -> None:
        """Let the engine drop a request. It gives up the blocks of one whose KV is not there without freeing them."""
        del self.dropping[NAMES[r]]
        phase, blocks = self.phases[r], self.blocks[r]
        self.phases[r] = DecodingPhase.NOTHING
        if phase is DecodingPhase.DECODING:
            self.blocks[r] = None
        left = blocks if phase is DecodingPhase.LOADING else None
        self.feed(EngineDropped(NAMES[r], left, phase is DecodingPhase.NOTHING))

    def do_landed(self, r: int, _: int) -> None:
        self.feed(Commit(NAMES[r]), self.port)

    def do_load_fails(self, r: int, _: int) -> None:
        self.fails(r, Code.IO)
        self.feed(Resolve(NAMES[r], Outcome.FAILED, Code.IO), self.port)

    def do_prefill_fails(self, r: int, _: int) -> None:
        self.fails(r, Code.PREFILL_ABORTED)
        self.feed(PrefillReported(NAMES[r], False))
        if NAMES[r] not in self.ends:
            raise Violation(Finding.ANSWER, f"{NAMES[r]} goes on, and its prefill has failed")

    def fails(self, r: int, code: Code) -> None:
        """Note why a request ends; where whole batches fail, the others that the engine waits for may end so, too."""
        self.failures -= 1
        self.causes[NAMES[r]] = code
        together = self.whole_batches and NAMES[r] in self.core.requests.awaited
        for other in self.core.requests.awaited if together else ():
            self.causes[other] = code

    def fingerprint(self) -> Hashable:
        tables = (self.ends, self.causes, self.dropping, self.endpoint.reported)
        blocks = tuple([blocks is not None for blocks in self.blocks])
        bound = tuple([(name, blocks is not None) for name, blocks in self.endpoint.open.items()])
        around = tuple(self.phases), blocks, bound, tuple(self.asked), self.first_known, self.held_engine, self.updated
        role = self.core.requests.fingerprint(), self.core.landing.fingerprint()
        return role, around, self.failures, self.aborts, tuple([tuple(table.items()) for table in tables])

    def at_rest(self) -> None:
        """Check that all requests have ended and nothing is held. Raises Violation."""
        open_ones = [NAMES[r] for r in self.requests if NAMES[r] not in self.ends]
        if open_ones or self.endpoint.open:
            raise Violation(Finding.STUCK, f"{open_ones or [*self.endpoint.open]} cannot end")
        if any(self.blocks) or self.held_engine:
            raise Violation(Finding.KEPT, f"{self.blocks}, and the engine is held: {self.held_engine}")
        try:
            self.core.requests.assert_empty("D")
        except AssertionError as wrong:
            raise Violation(Finding.KEPT, str(wrong)) from wrong

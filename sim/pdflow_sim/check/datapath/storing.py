"""P with a store: prompts are looked up, loaded, computed and put in every order, and aborted at any moment.

The real `PrefillCore` with `Storing` decides. Its two endpoints, its engine and the store are what they may do: one
endpoint holds a computed prompt until it is withdrawn or its lease ends, and the other loads what the store has found,
or fails (stub_endpoints.py). The world knows who holds which blocks, and which calls of the store await an answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Any, Final

from pdflow.methods.method import PipelinePolicy
from pdflow.protocol.effects import Commit, Enqueue, Outcome, ReleaseBlocks, Resolve
from pdflow.protocol.messages import Code
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    AnswerStored,
    AskStore,
    ComputeAgain,
    Computed,
    EndPrefill,
    EnqueueLoading,
    Forget,
    FreePrompt,
    Released,
    StartPut,
    WithdrawFound,
    WithdrawPut,
)
from pdflow.serving.events import (
    EngineAdmitted,
    EngineDropped,
    EngineRejected,
    PrefillFailed,
    PrefillRequested,
    PromptComputed,
    PutEnded,
    RequestAborted,
    StoreAnswered,
)
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.storing import Storing
from pdflow_sim.check.datapath.core_world import CoreWorld
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.stub_endpoints import (
    BLOCK_TOKENS,
    FOUND_TOKENS,
    LoadEndpoint,
    PutEndpoint,
    params_of,
)
from pdflow_sim.check.search.forward import Move, Violation

NAMES: Final = ("x0", "x1")
PROMPT_TOKENS: Final = (100, 40)
LONGEST: Final = 100
"""The most tokens of a prompt that the store takes: the first prompt has as many."""


class EnginePhase(IntEnum):
    """What the engine does with a prompt."""

    NOTHING = 0
    QUEUED = 1
    QUEUED_TO_LOAD = 2
    LOADING = 3
    """It has blocks, and waits for what is loaded."""
    COMPUTING = 4
    COMPUTED = 5


class StoringWorld(CoreWorld):
    """A state of P, its engine and the store's answers; implements `Explorable`."""

    core: PrefillCore
    loading = EnginePhase.LOADING

    def __init__(self, pipeline_policy: PipelinePolicy) -> None:
        super().__init__(NAMES, failures=2, aborts=1)
        self.pipeline_policy = pipeline_policy
        self.core = PrefillCore(1, Storing(LONGEST, BLOCK_TOKENS, pipeline_policy.prefill_waits))
        self.puts, self.loads = PutEndpoint(), LoadEndpoint()
        self.put_port, self.load_port = Port("p", self.puts, 1), Port("p.load", self.loads, 1)
        self.core.add(self.put_port)
        self.core.add(self.load_port)
        storing = self.core.sending
        assert isinstance(storing, Storing)
        storing.scheduler = self.load_port
        self.perform_all(self.performed())
        self.core.begin(self.put_port)
        self.phases = [EnginePhase.NOTHING] * len(NAMES)
        self.looked_up: dict[str, None] = {}
        self.found: dict[str, None] = {}
        """Beginnings of prompts that the store keeps for P until they are loaded or withdrawn."""
        self.putting: dict[str, None] = {}
        self.answers: dict[str, str] = {}
        self.given: dict[str, None] = {}
        """Prompts that the protocol answered, and that are to be put."""
        self.aborted: dict[str, None] = {}
        self.failed: dict[str, Code] = {}
        """The code with which each prompt must end that the engine or the store refuses."""

    def performed(self) -> dict[type, Any]:
        return {
            AskStore: self.ask_store,
            AnswerStored: self.answer_stored,
            Commit: self.commit,
            ComputeAgain: self.compute_again,
            Computed: self.nothing,
            EndPrefill: self.end_prefill,
            Enqueue: self.enqueue,
            EnqueueLoading: self.enqueue_loading,
            Forget: self.forget,
            FreePrompt: self.free_prompt,
            Released: self.nothing,
            StartPut: self.start_put,
            WithdrawFound: self.withdraw_found,
            WithdrawPut: self.withdraw_put,
        }

    # What the core asks of its driver.

    def ask_store(self, port: Port, effect: AskStore) -> None:
        self.looked_up[effect.handle] = None

    def withdraw_found(self, port: Port, effect: WithdrawFound) -> None:
        if self.found.pop(effect.params.xid, 0) == 0:
            raise Violation(Finding.ANSWER, f"{effect.params.xid} is withdrawn, and was not found")

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        self.queue(effect.request_id, EnginePhase.QUEUED)

    def compute_again(self, port: Port, effect: ComputeAgain) -> None:
        self.queue(effect.handle, EnginePhase.QUEUED)

    def enqueue_loading(self, port: Port, effect: EnqueueLoading) -> None:
        if effect.loaded_tokens != FOUND_TOKENS:
            raise Violation(Finding.INDEX, f"{effect.handle} is to load {effect.loaded_tokens} tokens")
        self.queue(effect.handle, EnginePhase.QUEUED_TO_LOAD)

    def queue(self, handle: str, phase: EnginePhase) -> None:
        r = int(handle[1])
        if self.phases[r] is not EnginePhase.NOTHING or self.blocks[r] is not None:
            raise Violation(Finding.TWICE, f"{handle} is queued, and is {self.phases[r].name} or has blocks")
        self.phases[r] = phase

    def commit(self, port: Port, effect: Commit) -> None:
        r = int(effect.request_id[1])
        if self.phases[r] is not EnginePhase.LOADING:
            raise Violation(Finding.ANSWER, f"{effect.request_id} is loaded, but is {self.phases[r].name}")
        self.phases[r] = EnginePhase.COMPUTING

    def free_prompt(self, port: Port, effect: FreePrompt) -> None:
        r = int(effect.handle[1])
        if effect.handle in self.puts.held:
            raise Violation(Finding.FREED, f"the blocks of {effect.handle} are freed, which the protocol holds")
        if self.phases[r] is not EnginePhase.COMPUTED or self.blocks[r] is None:
            raise Violation(Finding.TWICE, f"the blocks of {effect.handle} are freed, which is {self.phases[r].name}")
        self.phases[r], self.blocks[r] = EnginePhase.NOTHING, None

    def start_put(self, port: Port, effect: StartPut) -> None:
        if effect.params != params_of(effect.handle, PROMPT_TOKENS[int(effect.handle[1])]):
            raise Violation(Finding.INDEX, f"{effect.handle} is put with {effect.params}")
        self.putting[effect.handle] = None

    def withdraw_put(self, port: Port, effect: WithdrawPut) -> None:
        if self.putting.pop(effect.handle, 0) == 0:
            raise Violation(Finding.ANSWER, f"the put of {effect.handle} is withdrawn, and has ended")

    def answer_stored(self, port: Port, effect: AnswerStored) -> None:
        if effect.handle not in self.given:
            raise Violation(Finding.ANSWER, f"{effect.handle} is answered, and the store does not have it")
        self.end(effect.handle, "stored")

    def end_prefill(self, port: Port, effect: EndPrefill) -> None:
        if self.failed.get(effect.handle) is not effect.code:
            raise Violation(Finding.ANSWER, f"{effect.handle} ends as {effect.code.name} without a reason")
        self.end(effect.handle, effect.code.name)

    def end(self, handle: str, how: str) -> None:
        if handle in self.answers:
            raise Violation(Finding.ANSWER, f"{handle} is answered {how}, and was {self.answers[handle]}")
        self.answers[handle] = how

    def forget(self, port: Port, effect: Forget) -> None:
        r = int(effect.handle[1])
        if effect.handle not in self.answers and effect.handle not in self.aborted:
            raise Violation(Finding.ANSWER, f"{effect.handle} is forgotten, and was never answered")
        if effect.handle in self.puts.held or self.blocks[r] is not None:
            raise Violation(Finding.KEPT, f"{effect.handle} is forgotten, and has blocks")

    # What may happen.

    def moves(self) -> Iterator[Move]:
        for r, phase in enumerate(self.phases):
            handle = f"x{r}"
            if not self.asked[r]:
                yield from ((("request", r, 0), ("request", r, 1)) if r == 0 else (("request", r, 0),))
                continue
            yield from self.engine_moves(r, handle, phase)
            yield from self.store_moves(r, handle)
            if self.aborts and handle not in self.answers and handle not in self.aborted:
                yield ("abort", r, 0)

    def engine_moves(self, r: int, handle: str, phase: EnginePhase) -> Iterator[Move]:
        if handle in self.dropping:
            yield ("dropped", r, 0)
        if phase in (EnginePhase.QUEUED, EnginePhase.QUEUED_TO_LOAD) and not self.held_engine:
            yield ("admit", r, 0)
            if phase is EnginePhase.QUEUED_TO_LOAD:
                yield ("admit", r, FOUND_TOKENS)
            if self.failures:
                yield ("reject", r, 0)
        if phase is EnginePhase.COMPUTING and not self.held_engine:
            yield ("compute", r, 0)
            if self.failures:
                yield ("fail", r, 0)
        if f"r{r}" in self.loads.open and phase in (EnginePhase.QUEUED_TO_LOAD, EnginePhase.LOADING):
            if self.loads.open[f"r{r}"] is not None:
                yield ("loaded", r, 0)
            if self.failures:
                yield ("load_fails", r, 0)

    def store_moves(self, r: int, handle: str) -> Iterator[Move]:
        if handle in self.looked_up:
            for tokens in (0, FOUND_TOKENS, PROMPT_TOKENS[r]):
                yield ("found", r, tokens)
        if handle in self.putting:
            yield ("put", r, 1)
            if self.failures:
                yield ("put", r, 0)
        if handle in self.puts.held:
            yield ("lapse", r, 0)

    def start(self) -> StoringWorld:
        return StoringWorld(self.pipeline_policy)

    def do_request(self, r: int, lookup: int) -> None:
        self.asked[r] = True
        self.feed(PrefillRequested(f"x{r}", f"r{r}", PROMPT_TOKENS[r], 7, lookup=bool(lookup)))

    def do_abort(self, r: int, _: int) -> None:
        self.aborts -= 1
        self.aborted[f"x{r}"] = None
        is_put = f"x{r}" in self.putting
        self.feed(RequestAborted(f"x{r}"))
        self.check_released(r, is_put)

    def do_found(self, r: int, tokens: int) -> None:
        del self.looked_up[f"x{r}"]
        if tokens:
            self.found[f"x{r}"] = None
        self.feed(StoreAnswered(f"x{r}", params_of(f"x{r}", tokens) if tokens else None))
        if f"r{r}" in self.loads.open or tokens == PROMPT_TOKENS[r]:
            # It is loaded; or the store claims more than it was asked for, and is not believed.
            self.found.pop(f"x{r}", None)

    def do_admit(self, r: int, hit_tokens: int) -> None:
        blocks = self.give_blocks(r)
        if self.phases[r] is EnginePhase.QUEUED:
            self.phases[r] = EnginePhase.COMPUTING
        else:
            self.phases[r] = EnginePhase.LOADING
            self.feed(EngineAdmitted(f"x{r}", blocks, hit_tokens))

    def do_reject(self, r: int, _: int) -> None:
        self.failures -= 1
        if self.phases[r] is EnginePhase.QUEUED:
            self.failed[f"x{r}"] = Code.REJECTED
        self.phases[r] = EnginePhase.NOTHING
        self.feed(EngineRejected(f"x{r}", "too long"))

    def do_compute(self, r: int, _: int) -> None:
        blocks = self.blocks[r]
        assert blocks is not None
        self.phases[r] = EnginePhase.COMPUTED
        self.feed(PromptComputed(f"x{r}", blocks))

    def do_fail(self, r: int, _: int) -> None:
        self.failures -= 1
        self.phases[r], self.blocks[r] = EnginePhase.NOTHING, None
        self.failed[f"x{r}"] = Code.PREFILL_ABORTED
        self.feed(PrefillFailed(f"x{r}"))

    def do_dropped(self, r: int, _: int) -> None:
        """Let the engine drop a prompt. It gives up the blocks of one that waits for its load without freeing them."""
        del self.dropping[f"x{r}"]
        phase, blocks = self.phases[r], self.blocks[r]
        too_late = phase in (EnginePhase.NOTHING, EnginePhase.COMPUTED)
        if not too_late:
            self.phases[r] = EnginePhase.NOTHING
        if phase is EnginePhase.COMPUTING:
            self.blocks[r] = None
        left = blocks if phase is EnginePhase.LOADING else None
        self.feed(EngineDropped(f"x{r}", left, too_late))

    def do_loaded(self, r: int, _: int) -> None:
        self.feed(Commit(f"r{r}"), self.load_port)

    def do_load_fails(self, r: int, _: int) -> None:
        self.failures -= 1
        self.feed(Resolve(f"r{r}", Outcome.FAILED, Code.IO), self.load_port)

    def do_put(self, r: int, well: int) -> None:
        handle = f"x{r}"
        del self.putting[handle]
        if well:
            self.given[handle] = None
            self.feed(PutEnded(handle, params_of(handle, PROMPT_TOKENS[r])))
        else:
            self.failures -= 1
            self.failed[handle] = Code.REJECTED
            self.feed(PutEnded(handle, None, Code.REJECTED))
            self.check_released(r, True)

    def check_released(self, r: int, is_put: bool) -> None:
        """Check that a prompt that is not put after all does not wait for its lease."""
        if is_put and f"x{r}" in self.puts.held:
            raise Violation(Finding.KEPT, f"x{r} is not put, and its blocks wait for its lease")

    def do_lapse(self, r: int, _: int) -> None:
        """Let the store have all of a prompt, or its lease end."""
        self.feed(ReleaseBlocks(f"x{r}", self.puts.held[f"x{r}"], Code.NONE), self.put_port)

    def fingerprint(self) -> Hashable:
        tables = (
            *(self.looked_up, self.found, self.putting, self.dropping, self.given, self.aborted, self.failed),
            *(self.puts.known, self.puts.held, self.loads.open, self.answers),
        )
        blocks = tuple([blocks is not None for blocks in self.blocks])
        around = tuple(self.phases), blocks, tuple(self.asked), self.held_engine, self.failures, self.aborts
        role = self.core.requests.fingerprint(), self.core.sending.fingerprint()
        return role, around, tuple([tuple(table) for table in tables])

    def at_rest(self) -> None:
        """Check that all requests have ended and nothing is held. Raises Violation."""
        open_ones = [f"x{r}" for r in range(len(self.phases)) if f"x{r}" not in {**self.answers, **self.aborted}]
        if open_ones or self.puts.known or self.loads.open:
            raise Violation(Finding.STUCK, f"{open_ones or [*self.puts.known, *self.loads.open]} cannot end")
        if any(self.blocks) or self.found or self.held_engine:
            raise Violation(Finding.KEPT, f"{self.blocks}, {[*self.found]}, {self.held_engine}")
        try:
            self.core.sending.assert_empty("P")
            self.core.requests.assert_empty("P")
        except AssertionError as wrong:
            raise Violation(Finding.KEPT, str(wrong)) from wrong

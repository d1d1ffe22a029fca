"""A prefill engine beside a store: what it asks, loads, computes and puts, and how an abort ends each."""

from __future__ import annotations

from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Outcome, ReleaseBlocks, Resolve
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillAborted,
    PrefillQueued,
    SourceWithdrawn,
)
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.effects import (
    AnswerStored,
    AskStore,
    ComputeAgain,
    Computed,
    Drop,
    EndPrefill,
    EnqueueLoading,
    Forget,
    FreePrompt,
    HoldEngine,
    Released,
    ResumeEngine,
    StartPut,
    WithdrawFound,
    WithdrawPut,
)
from pdflow.serving.events import (
    EngineAdmitted,
    EngineDropped,
    EngineRejected,
    PrefillRequested,
    PromptComputed,
    PutEnded,
    RequestAborted,
    StoreAnswered,
)
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.storing import Storing
from tests.serving.bench import Bench

BLOCKS = Allocation(7, (1, 2))
SHARDS = Shards(1, 1, 16)
PARAMS = KvParams(EngineInfo("p", SHARDS), "x", "r", 100)
FOUND = KvParams(EngineInfo("s.get", SHARDS), "x/load", "r", 64)
STORED = KvParams(EngineInfo("s.get", SHARDS), "x", "r", 100)
RELEASE = ReleaseBlocks("x", BLOCKS, Code.NONE)
OF_THE_ROLE = (
    *(Enqueue, Drop, Computed, AnswerPrefill, EndPrefill, Released, FreePrompt, Forget, FreeBlocks, Commit),
    *(AskStore, EnqueueLoading, ComputeAgain, StartPut, AnswerStored, WithdrawFound, WithdrawPut),
    *(HoldEngine, ResumeEngine),
)
GONE = [PrefillAborted("x", Code.CANCELLED)]


class StoringBench(Bench):
    core: PrefillCore

    def __init__(self, waits: bool = False) -> None:
        storing = Storing(1000, 16, waits)
        super().__init__(PrefillCore(1, storing), (FreeBlocks,), OF_THE_ROLE)
        self.core.begin(self.port)
        self.loads, self.load_port = self.end("e.load")
        storing.scheduler = self.load_port

    def take_load_events(self) -> list[object]:
        events, self.loads.events = self.loads.events, []
        return events

    def asking(self) -> None:
        self.role(PrefillRequested("x", "r", 100, 42, lookup=True))
        self.take_events()

    def loading(self) -> None:
        self.asking()
        self.role(StoreAnswered("x", FOUND))
        self.protocol(Enqueue("r"), port=self.load_port)
        self.take_load_events()

    def admitted(self) -> None:
        self.loading()
        self.role(EngineAdmitted("x", BLOCKS, 16))
        self.take_load_events()

    def putting(self) -> None:
        self.role(PrefillRequested("x", "r", 100, 42), PromptComputed("x", BLOCKS))
        self.protocol(AnswerPrefill("r", PARAMS))
        self.take_events()

    def failed(self, code: Code) -> list[object]:
        return self.protocol(Resolve("r", Outcome.FAILED, code), port=self.load_port)


# What the store has already.


def test_the_store_is_asked_before_a_prompt_is_computed() -> None:
    bench = StoringBench()
    assert bench.role(PrefillRequested("x", "r", 100, 42, lookup=True)) == [AskStore("x")]
    assert bench.take_events() == [PrefillQueued("x", "r")]
    assert bench.role(StoreAnswered("x", None)) == [Enqueue("x")]


def test_what_it_has_is_loaded_and_the_rest_computed() -> None:
    bench = StoringBench()
    bench.asking()
    assert bench.role(StoreAnswered("x", FOUND)) == []
    assert bench.take_load_events() == [DecodeQueued("r", FOUND, 4, 0)]
    assert bench.protocol(Enqueue("r"), port=bench.load_port) == [EnqueueLoading("x", 64)]
    assert bench.role(EngineAdmitted("x", BLOCKS, 16)) == []
    assert bench.take_load_events() == [DecodeAdmitted("r", BLOCKS, 16, 48, 42, 1)]
    assert bench.protocol(Commit("r"), port=bench.load_port) == [Commit("x")]
    assert bench.role(PromptComputed("x", BLOCKS)) == [Computed("x")]


def test_what_is_here_is_not_loaded() -> None:
    bench = StoringBench()
    bench.loading()
    bench.role(EngineAdmitted("x", BLOCKS, 64))
    assert bench.take_load_events() == [DecodeHit("r")]


def test_a_store_that_claims_all_of_a_prompt_or_nothing_is_not_believed() -> None:
    for claimed in (0, 100, 101):
        bench = StoringBench()
        bench.asking()
        found = KvParams(FOUND.prefill, "x/load", "r", claimed)
        assert bench.role(StoreAnswered("x", found)) == [Enqueue("x")]


def test_what_cannot_be_loaded_is_computed() -> None:
    bench = StoringBench()
    bench.admitted()
    assert bench.failed(Code.IO) == [Drop("x")]
    assert bench.role(EngineDropped("x", BLOCKS)) == [ComputeAgain("x")], "the protocol knows of its blocks"
    assert bench.take_events() == []


def test_blocks_unknown_to_the_protocol_are_released() -> None:
    bench = StoringBench()
    bench.loading()
    bench.failed(Code.IO)
    assert bench.role(EngineDropped("x", BLOCKS)) == [FreeBlocks(BLOCKS), ComputeAgain("x")]


def test_an_admission_that_arrives_behind_the_failure_of_its_load_is_not_reported() -> None:
    """The endpoint has resolved the load, and would take the report for an error of its driver. The engine has given
    the blocks before it is asked to drop the prompt, and gives them back with its answer."""
    bench = StoringBench()
    bench.loading()
    assert bench.failed(Code.PEER_DEAD) == [Drop("x")]
    for hit_tokens in (16, 64):
        assert bench.role(EngineAdmitted("x", BLOCKS, hit_tokens)) == []
    assert bench.take_load_events() == []
    assert bench.role(EngineDropped("x", BLOCKS)) == [FreeBlocks(BLOCKS), ComputeAgain("x")]


def test_what_never_fits_is_found_out_once_more_without_the_load() -> None:
    bench = StoringBench()
    bench.loading()
    bench.role(EngineRejected("x", "too long"))
    assert bench.take_load_events() == [DecodeAborted("r", Code.REJECTED)]
    bench.failed(Code.REJECTED)
    assert bench.role(EngineDropped("x", too_late=True)) == [ComputeAgain("x")]
    assert bench.role(EngineRejected("x", "too long")) == [EndPrefill("x", Code.REJECTED, "too long"), Forget("x")]
    bench.core.assert_empty("P")


def test_a_prompt_that_fits_no_node_of_the_store_is_rejected() -> None:
    bench = StoringBench()
    (end, _) = bench.role(PrefillRequested("x", "r", 1001, 42, lookup=True))
    assert end == EndPrefill("x", Code.REJECTED, "a prompt of 1001 tokens is too long for a store node")


# What is computed.


def test_a_leg_is_answered_with_the_stores_params() -> None:
    bench = StoringBench()
    bench.role(PrefillRequested("x", "r", 100, 42), PromptComputed("x", BLOCKS))
    assert bench.protocol(AnswerPrefill("r", PARAMS)) == [StartPut("x", PARAMS)]
    assert bench.role(PutEnded("x", STORED)) == [AnswerStored("x", STORED)]
    assert bench.protocol(RELEASE) == [Released("x", Code.NONE), FreePrompt("x"), Forget("x")]
    bench.core.assert_empty("P")


def test_blocks_that_are_freed_before_the_store_answers_do_not_end_the_put() -> None:
    bench = StoringBench()
    bench.putting()
    assert bench.protocol(RELEASE) == [Released("x", Code.NONE), FreePrompt("x")]
    assert bench.role(PutEnded("x", STORED)) == [AnswerStored("x", STORED), Forget("x")]
    bench.core.assert_empty("P")


def test_a_put_that_is_refused_is_withdrawn() -> None:
    """Were its lease waited for, so would be its blocks."""
    bench = StoringBench()
    bench.putting()
    assert bench.role(PutEnded("x", None, Code.REJECTED)) == [EndPrefill("x", Code.REJECTED)]
    assert bench.take_events() == [SourceWithdrawn("x")]
    bench.protocol(RELEASE)
    bench.core.assert_empty("P")


def test_as_published_the_engine_waits_until_all_is_put() -> None:
    bench = StoringBench(waits=True)
    bench.role(PrefillRequested("x", "r", 100, 42), PromptComputed("x", BLOCKS))
    assert bench.protocol(AnswerPrefill("r", PARAMS)) == [HoldEngine(), StartPut("x", PARAMS)]
    assert bench.protocol(RELEASE)[:2] == [Released("x", Code.NONE), ResumeEngine()]


# Aborts.


def test_an_abort_while_the_store_is_asked() -> None:
    bench = StoringBench()
    bench.asking()
    assert bench.role(RequestAborted("x")) == [Forget("x")]
    assert bench.take_events() == GONE
    assert bench.role(StoreAnswered("x", FOUND)) == [WithdrawFound(FOUND)]
    assert bench.role(StoreAnswered("x", None)) == []
    bench.core.assert_empty("P")


def test_an_abort_while_it_is_loaded() -> None:
    bench = StoringBench()
    bench.admitted()
    assert bench.role(RequestAborted("x")) == []
    assert bench.take_load_events() == [DecodeAborted("r", Code.CANCELLED)]
    assert bench.failed(Code.CANCELLED) == [Drop("x")]
    assert bench.role(EngineDropped("x", BLOCKS)) == [Forget("x")]
    assert bench.take_events() == GONE
    bench.core.assert_empty("P")


def test_an_abort_between_a_failed_load_and_the_engines_answer() -> None:
    bench = StoringBench()
    bench.admitted()
    bench.failed(Code.IO)
    assert bench.role(RequestAborted("x")) == []
    assert bench.role(EngineDropped("x", BLOCKS)) == [Forget("x")]
    assert bench.take_events() == GONE


def test_an_abort_while_it_is_computed() -> None:
    bench = StoringBench()
    bench.role(PrefillRequested("x", "r", 100, 42))
    assert bench.role(RequestAborted("x")) == [Drop("x")]


def test_an_abort_while_it_is_put() -> None:
    bench = StoringBench()
    bench.putting()
    assert bench.role(RequestAborted("x")) == [WithdrawPut("x")]
    assert bench.take_events() == [SourceWithdrawn("x")]
    assert bench.role(PutEnded("x", None, Code.CANCELLED)) == []
    assert bench.protocol(RELEASE) == [Released("x", Code.NONE), FreePrompt("x"), Forget("x")]
    bench.core.assert_empty("P")


def test_an_abort_when_the_store_has_it() -> None:
    """Its leg is answered."""
    bench = StoringBench()
    bench.putting()
    bench.role(PutEnded("x", STORED))
    assert bench.role(RequestAborted("x")) == []
    assert bench.take_events() == []


def test_endpoints_have_an_order_in_which_deadlines_of_one_instant_are_fed() -> None:
    bench = StoringBench()
    assert [port.order for port in (bench.port, bench.load_port)] == [0, 1]

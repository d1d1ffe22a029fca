"""What a prefill engine does with a request: by whom it is aborted, when its blocks are free, what is told in which
order. The protocol and the engine are the test's."""

from __future__ import annotations

import pytest

from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import AnswerPrefill, Enqueue, ReleaseBlocks
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished, PrefillQueued, SourceWithdrawn
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.effects import (
    Computed,
    Drop,
    EndPrefill,
    Forget,
    FreePrompt,
    OfferPiece,
    Released,
    WithdrawPieces,
)
from pdflow.serving.events import (
    ChunkStarted,
    EngineDropped,
    EngineRejected,
    LayerReady,
    PrefillFailed,
    PrefillRequested,
    PromptComputed,
    PromptWithdrawn,
    RequestAborted,
)
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import ProgressiveSending, Sending
from tests.serving.bench import Bench

BLOCKS = Allocation(7, (1, 2))
PARAMS = KvParams(EngineInfo("p", Shards(1, 1, 16)), "x", "r", 100)
ANSWER = AnswerPrefill("r", PARAMS)
RELEASE = ReleaseBlocks("x", BLOCKS, Code.NONE)
FINISHED = PrefillFinished("x", BLOCKS, 100, 42, 1)
OF_THE_ROLE = (Enqueue, Drop, Computed, AnswerPrefill, EndPrefill, Released, FreePrompt, Forget)
LAYERS = 2


class PrefillBench(Bench):
    """A prefill engine's core."""

    core: PrefillCore

    def __init__(self, sending: Sending | None = None) -> None:
        core = PrefillCore(1, sending or Sending())
        super().__init__(core, (), (*OF_THE_ROLE, OfferPiece, WithdrawPieces))
        core.begin(self.port)

    def request(self, keeps: bool = True) -> None:
        self.role(PrefillRequested("x", "r", 100, 42, keeps))
        self.take_events()

    def computed(self) -> None:
        self.request()
        self.role(PromptComputed("x", BLOCKS))
        self.take_events()

    def answered(self) -> None:
        self.computed()
        self.protocol(ANSWER)


def progressive() -> PrefillBench:
    return PrefillBench(ProgressiveSending(LAYERS))


def begun() -> PrefillBench:
    """Sixty tokens of it are being computed."""
    bench = progressive()
    bench.request()
    bench.role(ChunkStarted("x", BLOCKS, 60, 0))
    bench.take_events()
    return bench


# In the engine.


def test_the_protocol_knows_of_a_prompt_before_anything_else_happens_to_it() -> None:
    bench = PrefillBench()
    assert bench.role(PrefillRequested("x", "r", 100, 42)) == [Enqueue("x")]
    assert bench.take_events() == [PrefillQueued("x", "r")]


def test_a_computed_prompt_is_the_protocols_until_it_is_released() -> None:
    bench = PrefillBench()
    bench.request()
    assert bench.role(PromptComputed("x", BLOCKS)) == [Computed("x")]
    assert bench.take_events() == [FINISHED]
    assert bench.protocol(ANSWER) == [ANSWER]
    assert bench.protocol(RELEASE) == [Released("x", Code.NONE), FreePrompt("x"), Forget("x")]
    bench.core.assert_empty("P")


def test_a_prompt_that_never_fits_is_rejected_and_the_protocol_knows() -> None:
    """So that a registration finds an answer."""
    bench = PrefillBench()
    bench.role(PrefillRequested("x", "r", 100, 42))
    assert bench.role(EngineRejected("x", "too long")) == [EndPrefill("x", Code.REJECTED, "too long"), Forget("x")]
    assert bench.take_events() == [PrefillQueued("x", "r"), PrefillAborted("x", Code.REJECTED)]
    bench.core.assert_empty("P")


def test_an_abort_frees_the_queue_and_reaches_the_protocol() -> None:
    bench = PrefillBench()
    bench.request()
    assert bench.role(RequestAborted("x")) == [Drop("x")]
    assert bench.role(RequestAborted("x")) == [], "it is being dropped"
    assert bench.take_events() == []
    assert bench.role(EngineDropped("x")) == [Forget("x")], "who has gone needs no answer"
    assert bench.take_events() == [PrefillAborted("x", Code.CANCELLED)]
    bench.core.assert_empty("P")


def test_a_prompt_that_was_computed_before_its_drop_stays() -> None:
    bench = PrefillBench()
    bench.request()
    bench.role(RequestAborted("x"))
    assert bench.role(EngineDropped("x", too_late=True)) == []
    assert bench.role(PromptComputed("x", BLOCKS)) == [Computed("x")]
    assert bench.take_events() == [FINISHED]


def test_a_computed_prompt_stays_when_its_client_goes() -> None:
    """Its lease decides."""
    bench = PrefillBench()
    bench.answered()
    assert bench.role(RequestAborted("x")) == []
    assert bench.take_events() == []
    assert bench.protocol(ReleaseBlocks("x", BLOCKS, Code.EXPIRED))[0] == Released("x", Code.EXPIRED)


def test_a_prompt_that_nobody_comes_for_is_withdrawn() -> None:
    bench = PrefillBench()
    bench.answered()
    bench.role(PromptWithdrawn("x"))
    assert bench.take_events() == [SourceWithdrawn("x")]


def test_where_the_token_is_all_the_protocol_knows_nothing() -> None:
    bench = PrefillBench()
    assert bench.role(PrefillRequested("x", "r", 100, 42, keeps=False)) == [Enqueue("x")]
    done = [Computed("x"), EndPrefill("x", Code.NONE), FreePrompt("x"), Forget("x")]
    assert bench.role(PromptComputed("x", BLOCKS)) == done
    assert bench.take_events() == []


def test_a_prompt_that_is_here_already_is_refused() -> None:
    bench = PrefillBench()
    bench.request()
    with pytest.raises(LocalProtocolError, match="needs a new id"):
        bench.core.feed(bench.core.role, PrefillRequested("x", "r", 100, 42), 0)


def test_the_engine_answers_for_what_is_forgotten() -> None:
    """As one that is asynchronous may."""
    bench = PrefillBench()
    assert bench.role(EngineDropped("x"), EngineRejected("x")) == []
    assert bench.take_events() == []


# While it is computed.


def test_layers_go_as_they_are_computed() -> None:
    bench = progressive()
    bench.request()
    assert bench.role(ChunkStarted("x", BLOCKS, 60, 0)) == []
    assert bench.take_events() == [PrefillBegun("x", BLOCKS, 100, 42, 1)]
    assert bench.role(LayerReady(0, 0)) == [OfferPiece("x", Piece(0, 0, 60))]
    assert bench.role(LayerReady(0, 1)) == [OfferPiece("x", Piece(1, 0, 60))]
    assert bench.role(ChunkStarted("x", BLOCKS, 100, 1)) == []
    assert bench.role(LayerReady(1, 0)) == [OfferPiece("x", Piece(0, 60, 100))]
    bench.role(LayerReady(1, 1), PromptComputed("x", BLOCKS))
    assert bench.take_events() == [FINISHED]


def test_what_has_begun_is_computed_on_after_an_abort() -> None:
    """A WRITE may read its blocks until then."""
    bench = begun()
    assert bench.role(RequestAborted("x")) == []
    assert bench.take_events() == [PrefillAborted("x", Code.CANCELLED)]
    assert bench.protocol(RELEASE) == [Released("x", Code.NONE), WithdrawPieces("x")]
    assert bench.role(LayerReady(0, 0), LayerReady(0, 1)) == []
    assert bench.role(ChunkStarted("x", BLOCKS, 100, 1), LayerReady(1, 0), LayerReady(1, 1)) == []
    assert bench.role(PromptComputed("x", BLOCKS)) == [FreePrompt("x"), Forget("x")]
    assert bench.take_events() == []
    bench.core.assert_empty("P")


def test_what_has_begun_and_is_computed_no_more_is_free_when_it_is_released() -> None:
    """vLLM aborts without asking, and keeps the blocks for as long as we say."""
    for first in (RELEASE, None):
        bench = begun()
        assert bench.role(RequestAborted("x")) == []
        done = list(bench.protocol(first)) if first is not None else []
        done += bench.role(PrefillFailed("x"))
        done += bench.protocol(RELEASE) if first is None else []
        assert done == [Released("x", Code.NONE), WithdrawPieces("x"), FreePrompt("x"), Forget("x")]
        assert bench.take_events() == [PrefillAborted("x", Code.CANCELLED)]
        assert bench.role(LayerReady(0, 0), LayerReady(0, 1)) == []
        bench.core.assert_empty("P")


def test_a_prefill_that_ends_after_it_was_forgotten_changes_nothing() -> None:
    bench = begun()
    bench.role(RequestAborted("x"))
    bench.protocol(RELEASE)
    bench.role(PrefillFailed("x"))
    bench.take_events()
    assert not bench.core.requests.by_handle
    assert bench.role(PrefillFailed("x")) == []
    assert bench.take_events() == []


def test_what_has_not_begun_is_dropped() -> None:
    bench = progressive()
    bench.request()
    assert bench.role(RequestAborted("x")) == [Drop("x")]


def test_what_is_released_before_all_of_it_is_computed_is_answered_all_the_same() -> None:
    """D has what it needs, and the prefill leg its end."""
    bench = begun()
    bench.protocol(RELEASE)
    assert bench.role(PromptComputed("x", BLOCKS)) == [Computed("x")]
    assert bench.take_events() == [FINISHED]
    assert bench.protocol(ANSWER) == [ANSWER, FreePrompt("x"), Forget("x")]
    assert bench.role(LayerReady(0, 0), LayerReady(0, 1)) == []
    bench.core.assert_empty("P")


def test_chunks_of_two_prompts_in_one_step_are_sent_together() -> None:
    bench = begun()
    bench.role(PrefillRequested("y", "s", 50, 43), ChunkStarted("y", BLOCKS, 40, 0))
    assert bench.role(LayerReady(0, 0)) == [OfferPiece("x", Piece(0, 0, 60)), OfferPiece("y", Piece(0, 0, 40))]


def test_what_it_keeps_is_in_its_fingerprint() -> None:
    for bench, events in (
        (PrefillBench(), [PromptComputed("x", BLOCKS)]),
        (progressive(), [ChunkStarted("x", BLOCKS, 60, 0), LayerReady(0, 0), PromptComputed("x", BLOCKS)]),
    ):
        states = [state(bench)]
        bench.request()
        states.append(state(bench))
        for event in events:
            bench.role(event)
            states.append(state(bench))
        assert len(set(states)) == len(states)


def state(bench: PrefillBench) -> object:
    return bench.core.requests.fingerprint(), bench.core.sending.fingerprint()


# Weights.


def test_a_prompt_has_the_weights_that_were_loaded_when_it_was_requested() -> None:
    """Its KV is of both, if others were loaded while it was computed: under the new name it would be used."""
    bench = PrefillBench()
    bench.request()
    bench.core.set_weights(2)
    bench.role(PromptComputed("x", BLOCKS))
    assert bench.take_events() == [FINISHED]


def test_a_prompt_that_is_sent_while_it_is_computed_has_one_name_of_its_weights() -> None:
    bench = begun()
    bench.core.set_weights(2)
    bench.role(PromptComputed("x", BLOCKS))
    assert {event.weights for event in bench.take_events() if type(event) is PrefillFinished} == {1}

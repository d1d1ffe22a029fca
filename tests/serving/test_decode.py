"""What a decode engine does with a request: by whom it is aborted, who gives its blocks back, what is told in which
order. The protocol and the engine are the test's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdflow.methods.staging import KvSize, PagedStaging
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, Outcome, Quarantine, Resolve
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeQueued, PrefillLegEnded
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.decode import DecodeCore
from pdflow.serving.decode_request import DecodeStage
from pdflow.serving.effects import (
    Admit,
    AskForRoom,
    CopyIn,
    Drop,
    EndDecode,
    GiveBackRoom,
    HoldEngine,
    Landed,
    LoadInStep,
    ResumeEngine,
    TakeRoom,
)
from pdflow.serving.events import (
    AloneRequested,
    CopiedIn,
    DecodeRequested,
    EngineAdmitted,
    EngineDropped,
    EngineFinished,
    EngineRejected,
    FirstTokenKnown,
    PrefillReported,
    RequestAborted,
    RoomDue,
)
from pdflow.serving.landing import Landing, StagedLanding
from tests.serving.bench import Bench

PARAMS = KvParams(EngineInfo("p", Shards(1, 1, 16)), "x", "r", 0)
BLOCKS = Allocation(7, (1, 2))
ROOM = Allocation(1, (0, 1, 2, 3, 4, 5, 6))
OF_ENDPOINTS = (Enqueue, Quarantine, FreeBlocks)
OF_THE_ROLE = (
    *(Enqueue, Drop, Admit, Landed, Commit, EndDecode, FreeBlocks, HoldEngine, ResumeEngine),
    *(AskForRoom, TakeRoom, GiveBackRoom, LoadInStep, CopyIn),
)


class DecodeBench(Bench):
    """A decode engine's core."""

    core: DecodeCore

    def __init__(self, landing: Landing | None = None, **how: bool) -> None:
        super().__init__(DecodeCore(1, landing or Landing(), **how), OF_ENDPOINTS, OF_THE_ROLE)
        self.core.begin(self.port)

    def request(self, handle: str = "r", **how: bool) -> None:
        self.role(DecodeRequested(handle, PARAMS, 7, 100, 42, **how))

    def admitted(self, handle: str = "r", blocks: Allocation = BLOCKS) -> None:
        self.request(handle)
        self.protocol(Enqueue(handle))
        self.role(EngineAdmitted(handle, blocks, 16))

    def landed(self, handle: str = "r") -> None:
        self.admitted(handle)
        self.protocol(Commit(handle))
        self.take_events()


def staged(by_layer: bool = False, **how: bool) -> DecodeBench:
    """With room for 112 tokens beside the blocks."""
    return DecodeBench(StagedLanding(PagedStaging(KvSize(1, 1), 16, 7), by_layer), **how)


def with_room(by_layer: bool = False, first_follows: bool = False, **how: bool) -> DecodeBench:
    bench = staged(by_layer, **how)
    bench.request(first_follows=first_follows)
    assert bench.protocol(Enqueue("r")) == [AskForRoom()]
    assert bench.role(RoomDue()) == [TakeRoom("r", ROOM), Admit("r")]
    return bench


def copying() -> DecodeBench:
    bench = with_room()
    assert bench.protocol(Commit("r")) == [Landed("r"), Enqueue("r")]
    assert bench.role(EngineAdmitted("r", BLOCKS, 16)) == [CopyIn("r", ROOM, BLOCKS, 16)]
    bench.take_events()
    return bench


def test_a_request_is_admitted_loaded_and_ends_with_its_last_token() -> None:
    bench = DecodeBench()
    bench.request()
    assert bench.take_events() == [DecodeQueued("r", PARAMS, 7, 0)]
    assert bench.protocol(Enqueue("r")) == [Enqueue("r")]
    assert bench.role(EngineAdmitted("r", BLOCKS, 16)) == [Admit("r")]
    assert bench.take_events() == [DecodeAdmitted("r", BLOCKS, 16, 84, 42, 1)]
    assert bench.protocol(Commit("r")) == [Landed("r"), Commit("r")]
    assert bench.role(EngineFinished("r")) == [EndDecode("r", Code.NONE)]
    bench.core.assert_empty("d")
    assert not bench.core.knows("r")


def test_before_its_kv_is_here_the_protocol_aborts_it() -> None:
    for stage in (DecodeStage.PENDING, DecodeStage.ADMITTED):
        bench = DecodeBench()
        bench.request() if stage is DecodeStage.PENDING else bench.admitted()
        assert bench.core.stage_of("r") is stage
        bench.take_events()
        assert bench.role(RequestAborted("r")) == []
        assert bench.take_events() == [DecodeAborted("r", Code.CANCELLED)]


def test_once_its_kv_is_here_the_engine_drops_it_whatever_it_does_with_it() -> None:
    """A sequence that was preempted before its first token waits as a new one, and the protocol knows it no more."""
    bench = DecodeBench()
    bench.landed()
    assert bench.role(RequestAborted("r")) == [Drop("r"), EndDecode("r", Code.CANCELLED)]
    assert bench.take_events() == []
    assert bench.role(EngineDropped("r")) == []
    bench.core.assert_empty("d")


def test_an_abort_for_nobody_is_nothing() -> None:
    bench = DecodeBench()
    assert bench.role(RequestAborted("r")) == []
    assert bench.take_events() == []


def test_blocks_of_which_the_protocol_knows_are_its_own_to_free() -> None:
    bench = DecodeBench()
    bench.admitted()
    resolve = Resolve("r", Outcome.FAILED, Code.PEER_DEAD)
    assert bench.protocol(resolve, Quarantine(BLOCKS)) == [
        Drop("r"),
        EndDecode("r", Code.PEER_DEAD),
        Quarantine(BLOCKS),
    ]
    assert bench.role(EngineDropped("r", BLOCKS)) == []
    assert bench.protocol(FreeBlocks(BLOCKS)) == [FreeBlocks(BLOCKS)]


def test_blocks_that_were_given_in_the_turn_of_its_end_are_given_back() -> None:
    """RESOLVE before the grant was reported: the engine answers with blocks that nobody else will free, and its report
    comes too late."""
    bench = DecodeBench()
    bench.request()
    bench.protocol(Enqueue("r"))
    ended = [Drop("r"), EndDecode("r", Code.STALLED)]
    assert bench.protocol(Resolve("r", Outcome.FAILED, Code.STALLED)) == ended
    assert bench.role(EngineDropped("r", BLOCKS)) == [FreeBlocks(BLOCKS)]
    bench.take_events()
    assert bench.role(EngineAdmitted("r", BLOCKS)) == []
    assert bench.take_events() == []


def test_its_name_is_taken_until_the_engine_has_dropped_it() -> None:
    bench = DecodeBench()
    bench.landed()
    with pytest.raises(LocalProtocolError, match="is already open"):
        bench.core.rules[DecodeRequested](DecodeRequested("r", PARAMS, 7, 100, 42))
    bench.role(RequestAborted("r"))
    with pytest.raises(LocalProtocolError, match="is already open"):
        bench.core.rules[AloneRequested](AloneRequested("r"))
    assert bench.take_events() == []
    bench.role(EngineDropped("r"))
    bench.request()
    assert len(bench.take_events()) == 1


def test_a_request_that_fits_no_engine_is_reported_to_the_protocol() -> None:
    bench = DecodeBench()
    bench.request()
    bench.protocol(Enqueue("r"))
    bench.take_events()
    assert bench.role(EngineRejected("r", "too long")) == []
    assert bench.take_events() == [DecodeAborted("r", Code.REJECTED)]


def test_alone_a_request_is_the_engines_from_its_start() -> None:
    bench = DecodeBench()
    assert bench.role(AloneRequested("r")) == [Enqueue("r")]
    assert bench.role(EngineRejected("r", "too long")) == [EndDecode("r", Code.REJECTED)]
    bench.role(AloneRequested("r"))
    assert bench.role(RequestAborted("r")) == [Drop("r"), EndDecode("r", Code.CANCELLED)]
    assert bench.role(EngineDropped("r")) == []
    bench.role(AloneRequested("r"))
    assert bench.role(EngineFinished("r")) == [EndDecode("r", Code.NONE)]
    assert bench.take_events() == []


def test_a_first_token_that_follows_is_waited_for() -> None:
    bench = DecodeBench()
    bench.request(first_follows=True)
    bench.protocol(Enqueue("r"))
    bench.role(EngineAdmitted("r", BLOCKS))
    assert bench.protocol(Commit("r")) == [Landed("r")]
    assert bench.core.stage_of("r") is DecodeStage.LOADED
    assert bench.role(FirstTokenKnown("r")) == [Commit("r")]
    assert bench.role(FirstTokenKnown("r")) == []


def test_a_first_token_may_be_here_before_the_kv() -> None:
    bench = DecodeBench()
    bench.request(first_follows=True)
    assert bench.role(FirstTokenKnown("r")) == []
    bench.protocol(Enqueue("r"))
    bench.role(EngineAdmitted("r", BLOCKS))
    assert bench.protocol(Commit("r")) == [Landed("r"), Commit("r")]


def test_aborted_while_it_waits_for_its_first_token_its_blocks_are_given_back() -> None:
    """The protocol is done with them, and the engine takes them for still being written to."""
    bench = DecodeBench()
    bench.request(first_follows=True)
    bench.protocol(Enqueue("r"))
    bench.role(EngineAdmitted("r", BLOCKS))
    bench.protocol(Commit("r"))
    assert bench.role(RequestAborted("r")) == [Drop("r"), EndDecode("r", Code.CANCELLED)]
    assert bench.role(EngineDropped("r", BLOCKS)) == [FreeBlocks(BLOCKS)]


def test_the_router_s_report_of_a_prefill_leg_goes_to_the_protocol() -> None:
    bench = DecodeBench()
    bench.role(PrefillReported("r", False))
    assert bench.take_events() == [PrefillLegEnded("r", False)]


def test_an_engine_that_waits_stands_still_until_the_last_kv_is_here() -> None:
    bench = DecodeBench(waits=True)
    for handle in ("a", "b"):
        bench.request(handle)
        bench.protocol(Enqueue(handle))
    assert bench.role(EngineAdmitted("a", BLOCKS)) == [HoldEngine(), Admit("a")]
    assert bench.role(EngineAdmitted("b", Allocation(8, (3,)))) == [Admit("b")]
    assert ResumeEngine() not in bench.protocol(Commit("a"))
    assert bench.protocol(Resolve("b", Outcome.FAILED, Code.STALLED))[-1] == ResumeEngine()


def test_where_batches_fail_whole_the_others_are_aborted() -> None:
    """#12957: what the engine waits for is one batch."""
    bench = DecodeBench(waits=True, fails_whole_batches=True)
    for number, handle in enumerate("abc"):
        bench.admitted(handle, Allocation(number, (number,)))
    bench.take_events()
    bench.protocol(Resolve("b", Outcome.FAILED, Code.STALLED))
    assert bench.take_events() == [DecodeAborted("a", Code.STALLED), DecodeAborted("c", Code.STALLED)]
    bench.protocol(Resolve("a", Outcome.CANCELLED, Code.CANCELLED))
    assert bench.take_events() == []


# Beside the blocks.


def test_staged_a_request_has_room_first_and_blocks_when_all_has_landed() -> None:
    bench = with_room()
    assert bench.take_events() == [DecodeQueued("r", PARAMS, 7, 0), DecodeAdmitted("r", ROOM, 0, 100, 42, 1)]
    bench.protocol(Commit("r"))
    bench.role(EngineAdmitted("r", BLOCKS, 16))
    assert bench.role(CopiedIn("r")) == [GiveBackRoom(ROOM), AskForRoom(), Commit("r")]
    assert bench.role(EngineFinished("r")) == [EndDecode("r", Code.NONE)]
    bench.core.assert_empty("d")


def test_staged_whoever_waits_has_room_when_another_gives_it_back() -> None:
    bench = copying()
    bench.request("s")
    assert bench.protocol(Enqueue("s")) == [AskForRoom()]
    assert bench.role(RoomDue()) == []
    bench.role(CopiedIn("r"))
    assert bench.role(RoomDue())[0] == TakeRoom("s", Allocation(2, ROOM.blocks))


def test_staged_what_no_memory_holds_is_rejected() -> None:
    bench = staged()
    bench.role(DecodeRequested("r", PARAMS, 8, 113, 42))
    bench.take_events()
    assert bench.protocol(Enqueue("r")) == []
    assert bench.take_events() == [DecodeAborted("r", Code.REJECTED)]


def test_staged_what_no_engine_holds_ends_and_gives_its_room_back() -> None:
    bench = with_room()
    bench.protocol(Commit("r"))
    ended = [EndDecode("r", Code.REJECTED), GiveBackRoom(ROOM), AskForRoom()]
    assert bench.role(EngineRejected("r", "too long")) == ended
    bench.core.assert_empty("d")


def test_staged_room_that_a_writer_may_reach_stays_taken() -> None:
    bench = with_room()
    failed = Resolve("r", Outcome.FAILED, Code.PEER_DEAD)
    assert bench.protocol(failed, Quarantine(ROOM)) == [AskForRoom(), EndDecode("r", Code.PEER_DEAD)]
    assert bench.core.landing.staging.held  # type: ignore[attr-defined]
    assert bench.protocol(FreeBlocks(ROOM)) == [GiveBackRoom(ROOM)]
    bench.core.assert_empty("d")


def test_staged_aborted_in_the_engines_queue_it_gives_its_room_back() -> None:
    bench = with_room()
    bench.protocol(Commit("r"))
    done = [Drop("r"), EndDecode("r", Code.CANCELLED), GiveBackRoom(ROOM), AskForRoom()]
    assert bench.role(RequestAborted("r")) == done
    bench.role(EngineDropped("r"))
    bench.core.assert_empty("d")


@pytest.mark.parametrize("order", [("dropped", "copied"), ("copied", "dropped")])
def test_staged_aborted_while_it_is_copied_blocks_are_free_behind_the_copy(order: Sequence[str]) -> None:
    bench = copying()
    assert bench.role(RequestAborted("r")) == [Drop("r"), EndDecode("r", Code.CANCELLED)]
    assert bench.core.knows("r"), "another of that name would be taken for it"
    done = []
    for what in order:
        done += bench.role(EngineDropped("r", BLOCKS) if what == "dropped" else CopiedIn("r"))
    assert done == [GiveBackRoom(ROOM), AskForRoom(), FreeBlocks(BLOCKS)]
    bench.core.assert_empty("d")
    assert not bench.core.knows("r")


# Layer by layer, in the step that admits the request.


@pytest.mark.parametrize("waits", [False, True])
def test_by_layer_a_request_decodes_while_it_is_copied(waits: bool) -> None:
    """Its copies are a part of its first step, for which the engine need not be held."""
    bench = with_room(by_layer=True, waits=waits)
    assert bench.protocol(Commit("r")) == [Landed("r"), LoadInStep("r"), Enqueue("r")]
    assert bench.role(EngineAdmitted("r", BLOCKS, 16)) == [CopyIn("r", ROOM, BLOCKS, 16)]
    assert bench.role(CopiedIn("r")) == [GiveBackRoom(ROOM), AskForRoom()]
    assert bench.role(EngineFinished("r")) == [EndDecode("r", Code.NONE)]
    bench.core.assert_empty("d")


def test_by_layer_an_answer_of_one_token_may_end_before_its_copies_are_reported() -> None:
    bench = with_room(by_layer=True)
    bench.protocol(Commit("r"))
    bench.role(EngineAdmitted("r", BLOCKS, 16))
    assert bench.role(EngineFinished("r")) == [EndDecode("r", Code.NONE)]
    assert bench.core.knows("r"), "another of that name would be taken for it"
    assert bench.role(CopiedIn("r")) == [GiveBackRoom(ROOM), AskForRoom()]
    bench.core.assert_empty("d")


@pytest.mark.parametrize("order", [("dropped", "copied"), ("copied", "dropped")])
def test_by_layer_a_running_request_is_aborted_and_the_engine_frees_its_blocks(order: Sequence[str]) -> None:
    bench = with_room(by_layer=True)
    bench.protocol(Commit("r"))
    bench.role(EngineAdmitted("r", BLOCKS, 16))
    assert bench.role(RequestAborted("r")) == [Drop("r"), EndDecode("r", Code.CANCELLED)]
    done = []
    for what in order:
        done += bench.role(EngineDropped("r") if what == "dropped" else CopiedIn("r"))
    assert done == [GiveBackRoom(ROOM), AskForRoom()]
    bench.core.assert_empty("d")


def test_by_layer_a_request_whose_first_token_is_not_known_is_copied_before_its_step() -> None:
    bench = with_room(by_layer=True, first_follows=True)
    assert bench.protocol(Commit("r")) == [Landed("r"), Enqueue("r")]
    assert bench.role(EngineAdmitted("r", BLOCKS, 16)) == [CopyIn("r", ROOM, BLOCKS, 16)]
    assert bench.role(CopiedIn("r")) == [GiveBackRoom(ROOM), AskForRoom()]
    assert bench.role(FirstTokenKnown("r")) == [Commit("r")]


def test_an_admission_is_known_to_the_protocol_before_what_ends_the_request() -> None:
    """Both have happened in one turn, the abort first: its blocks would be nobody's, or reported for nobody."""
    bench = DecodeBench()
    bench.request()
    bench.take_events()

    def both(_: object, effect: Enqueue) -> None:
        bench.core.feed(bench.core.role, RequestAborted("r"), 0)
        bench.core.feed(bench.core.role, EngineAdmitted("r", BLOCKS, 16), 0)

    bench.core.do[Enqueue] = both
    bench.protocol(Enqueue("r"))
    assert [type(event) for event in bench.take_events()] == [DecodeAdmitted, DecodeAborted]


def test_what_it_keeps_is_in_its_fingerprint() -> None:
    marks = set()
    for bench in (DecodeBench(), staged(), with_room(), copying()):
        bench.core.ports.clear()
        marks.add(bench.core.fingerprint())
    bench = copying()
    bench.role(RequestAborted("r"))
    bench.core.ports.clear()
    marks.add(bench.core.fingerprint())
    assert len(marks) == 5

"""The cores of `pdflow/serving` in the order of vLLM's hooks, by a connector that only translates.

vLLM calls us: it queues a request before the core knows of it, asks whether it may give blocks, finishes or aborts it
without asking, and does what a Drop wants a step later, as a failed load. Each test ends at rest: no reference on a
block is left in either pool, and the oracle of the protocol agrees.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import MS, S
from pdflow.serving.decode_request import DecodeStage
from pdflow.serving.effects import EndDecode, EndPrefill, Released
from pdflow.serving.events import DecodeRequested
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json
from pdflow_runtime.vllm.step_metadata import encode_up
from tests.runtime.vllm.support.fake_engine import Request, Status
from tests.runtime.vllm.support.pair import Pair

BLOCKS = 3
"""What a prompt of 40 tokens takes."""
METHODS = pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
MOVING = {False: "WRITE", True: "READ"}


def prefilled(pulls: bool = False, **how: Any) -> Pair:
    """P has computed the prompt x and keeps it."""
    pair = Pair(pulls, **how)
    pair.submit_prefill()
    pair.step(2)
    return pair


def loading(pulls: bool = False, **how: Any) -> tuple[Pair, Request]:
    """D's request has blocks, and bytes are on their way into them."""
    pair = prefilled(pulls, **how)
    pair.holding = {MOVING[pulls]}
    request = pair.submit_decode()
    pair.step(2)
    assert pair.has(MOVING[pulls])
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    return pair, request


def ended(pair: Pair, request_id: str = "r") -> Code:
    """How D's core says that the request ended."""
    (code,) = [e.code for e in pair.record["D"] if isinstance(e, EndDecode) and e.handle == request_id]
    return code


def references(pair: Pair, request: Request) -> list[int]:
    return [pair.d.pool.references[block] for block in request.block_ids]


def computed_events(pair: Pair) -> list[str]:
    """What P's core is fed, but for the announcements of what a step computes."""
    return [each for each in pair.core_events("P") if not each.startswith("take_down")]


# A whole request.


@METHODS
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_goes_through(pulls: bool, tp: int, async_scheduling: bool) -> None:
    how = {"async_scheduling": async_scheduling}
    pair = prefilled(pulls, tp=tp, p=how, d=how)
    request = pair.submit_decode()
    pair.step(12)
    assert pair.d.answers["r"] == (Status.FINISHED_LENGTH_CAPPED, None)
    assert ended(pair) is Code.NONE
    assert request.num_preemptions == 0
    assert computed_events(pair) == ["on_new_request: PrefillRequested", "request_finished: PromptComputed"]
    assert pair.core_events("D") == [
        "on_new_request: DecodeRequested",
        "update_state_after_alloc: EngineAdmitted",
        "request_finished: EngineFinished",
    ]
    pair.assert_at_rest()


@METHODS
def test_what_the_prefix_cache_has_is_not_loaded(pulls: bool) -> None:
    pair = prefilled(pulls)
    request = pair.submit_decode(cached_tokens=16)
    pair.step()
    assert references(pair, request) == [1, 2, 2], "the grant is of the blocks that are written to"
    pair.step(8)
    assert ended(pair) is Code.NONE
    pair.assert_at_rest()


def test_a_request_of_nobody_is_vllm_s_alone() -> None:
    pair = Pair()
    pair.d.add_request(Request("alone", 40, 2))
    pair.p.add_request(Request("alone", 40, 2))
    pair.step(4)
    assert not pair.core_events("D")
    assert not computed_events(pair)
    assert pair.d.answers["alone"] == pair.p.answers["alone"] == (Status.FINISHED_LENGTH_CAPPED, None)
    pair.assert_at_rest()


# P: blocks whose freeing vLLM delays.


@METHODS
def test_p_keeps_a_prompt_until_it_is_sent(pulls: bool) -> None:
    pair, _ = loading(pulls)
    assert pair.params_of().blocks == ((0, 1, 2) if pulls else ()), "it is answered by the return value of the hook"
    assert pair.p.requests == {}, "vLLM is done with it"
    assert pair.p.pool.references[:BLOCKS] == [1] * BLOCKS
    pair.holding = set()
    pair.step(3)
    assert not any(pair.p.pool.references)
    pair.assert_at_rest()


def test_p_frees_a_prompt_that_nobody_comes_for_when_its_lease_is_over() -> None:
    pair = prefilled()
    pair.idle(29 * S)
    pair.step(2)
    assert pair.p.pool.references[:BLOCKS] == [1] * BLOCKS
    pair.idle(2 * S)
    pair.step(2)
    assert not any(pair.p.pool.references)
    assert Released("x", Code.EXPIRED) in pair.record["P"]
    pair.assert_at_rest()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_p_s_prompt_is_aborted(steps: int) -> None:
    """Queued, in the middle of its chunks, and computed: vLLM asks nobody, and a computed one has no abort any more."""
    pair = Pair(p={"max_num_batched_tokens": 16})
    pair.submit_prefill()
    pair.step(steps)
    pair.p.abort("p-x")
    if steps < 3:
        assert pair.p.requests == {}, "there is nothing to delay"
        assert computed_events(pair)[1:] == ["request_finished: RequestAborted EngineDropped PrefillFailed"]
        assert not pair.prefill_side.core.knows("x")
        assert not [e for e in pair.record["P"] if isinstance(e, EndPrefill)], "nobody waits for an answer"
    else:
        assert computed_events(pair)[1:] == ["request_finished: PromptComputed"]
        assert pair.p.pool.references[:BLOCKS] == [1] * BLOCKS
        pair.idle(31 * S)
    pair.assert_at_rest()


def test_p_s_prompt_ends_with_an_error() -> None:
    """vLLM's own, of which no client knows: a registration finds an answer."""
    pair = Pair(p={"max_num_batched_tokens": 16})
    pair.submit_prefill()
    pair.step()
    pair.p.finish_requests(["p-x"], Status.FINISHED_ERROR)
    assert pair.p.requests == {}
    assert EndPrefill("x", Code.PREFILL_ABORTED) in pair.record["P"]
    params = KvParams(pair.infos["P"], "x", "p-x", 40)
    pair.d.add_request(Request("r", 40, 3, decode_json(params, Coordinates("127.0.0.1", 1), "nixl-push")))
    pair.step(10)
    assert ended(pair) is Code.PREFILL_ABORTED
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED, "it is computed here"
    pair.idle(31 * S)
    pair.assert_at_rest()


def test_p_preempts_a_prompt_that_is_half_computed() -> None:
    """The protocol learns of its blocks when all of it is computed, and those of before are nothing to it."""
    pair = Pair(p={"num_blocks": 4, "max_num_batched_tokens": 17})
    pair.p.add_request(Request("other", 15, 10))
    request = pair.submit_prefill(num_tokens=60)
    while not request.num_preemptions:
        pair.step()
        assert pair.now < S
    assert request.num_output_tokens == 0
    assert computed_events(pair) == ["on_new_request: PrefillRequested"]
    pair.step(20)
    assert computed_events(pair)[1:] == ["request_finished: PromptComputed"]
    pair.submit_decode(num_tokens=60)
    pair.step(10)
    assert ended(pair) is Code.NONE
    pair.assert_at_rest()


# D: aborts.


@METHODS
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_d_s_request_is_aborted_at_any_step(pulls: bool, async_scheduling: bool, steps: int) -> None:
    pair = prefilled(pulls, d={"async_scheduling": async_scheduling})
    pair.submit_decode()
    pair.step(steps)
    over = "r" in pair.d.answers
    pair.d.abort("r")
    assert pair.decode_side.core.stage_of("r") is None, "the core knows it no more, whoever frees its blocks when"
    assert ended(pair) is (Code.NONE if over else Code.CANCELLED)
    pair.step(6)
    assert pair.d.requests == {}
    assert not pair.decode_side.core.knows("r")
    pair.idle(31 * S)
    pair.assert_at_rest()


@pytest.mark.parametrize(
    ("pulls", "at", "kept"),
    [
        (False, "handshake", BLOCKS),
        (False, "Register", 0),  # CANCEL overtakes it, and P knows of it when it comes.
        (False, "WRITE", BLOCKS),
        (True, "handshake", BLOCKS),
        (True, "READ", BLOCKS),
        (True, "word", BLOCKS),
    ],
)
def test_d_s_request_is_aborted_while_something_is_under_way(pulls: bool, at: str, kept: int) -> None:
    pair = prefilled(pulls)
    pair.holding = {at}
    pair.submit_decode()
    pair.step(3)
    assert pair.has(at)
    pair.d.abort("r")
    pair.step(5)
    assert pair.d.requests == {}, "vLLM is done with it"
    assert sum(pair.d.pool.references) == kept, "the protocol may not be"
    pair.holding = set()
    pair.idle(31 * S)
    pair.assert_at_rest()


def test_d_s_request_comes_and_goes_in_one_call() -> None:
    """So does that of a client that has hung up: a report of it would stop EngineCore."""
    pair = prefilled()
    pair.submit_decode()
    pair.d.abort("r")
    pair.step(3)
    assert pair.d.requests == {}
    assert pair.core_events("D")[1:] == ["request_finished: RequestAborted EngineDropped"]
    pair.idle(31 * S)
    pair.assert_at_rest()


# D: preemption.


@METHODS
def test_matched_tokens_of_a_decode_request_are_polled_until_it_has_blocks(pulls: bool) -> None:
    """vLLM preempts none but those that run, so before its load a request can only wait."""
    pair = prefilled(pulls, d={"num_blocks": 5})
    pair.d.add_request(Request("other", 32, 40))
    pair.step()
    request = pair.submit_decode()
    pair.step(3)
    assert request.status is Status.WAITING
    asked = [call for call in pair.calls["D"] if call[0] == "get_num_new_matched_tokens"]
    assert len(asked) >= 3
    assert pair.core_events("D") == ["on_new_request: DecodeRequested"]
    pair.step(60)
    assert {status for status, _ in pair.d.answers.values()} == {Status.FINISHED_LENGTH_CAPPED}
    assert ended(pair) is Code.NONE
    pair.assert_at_rest()


@METHODS
@pytest.mark.parametrize("aborts", [False, True])
def test_d_s_request_is_preempted_after_its_load(pulls: bool, aborts: bool) -> None:
    """It waits as a new one does, and vLLM asks again. Its KV is computed here, or it is aborted while it waits."""
    pair = prefilled(pulls, d={"num_blocks": 7, "max_num_batched_tokens": 48})
    first = Request("first", 40, 30)
    pair.d.add_request(first)
    request = pair.submit_decode(max_tokens=40)
    while not request.num_preemptions:
        pair.step()
        assert pair.now < S
    assert pair.decode_side.core.stage_of("r") is DecodeStage.DECODING
    assert request.status in (Status.PREEMPTED, Status.RUNNING)
    if aborts:
        pair.d.abort("r")
        assert ended(pair) is Code.CANCELLED
        assert pair.core_events("D")[-1] == "request_finished: RequestAborted EngineDropped"
    pair.step(80)
    assert pair.d.requests == {}
    assert ended(pair) is (Code.CANCELLED if aborts else Code.NONE)
    assert sum("EngineAdmitted" in call for call in pair.core_events("D")) == 1
    pair.assert_at_rest()


# D: loads that fail.


@METHODS
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_load_fails(pulls: bool, recompute: bool, async_scheduling: bool) -> None:
    """Drop is a failed load: vLLM frees the blocks, and computes the prompt or fails the request."""
    pair, _ = loading(pulls, d={"recompute": recompute, "async_scheduling": async_scheduling})
    pair.holding = {"Cancel", "fence", MOVING[pulls]}
    pair.fail(MOVING[pulls])
    pair.holding = set()
    pair.step(12)
    status, _ = pair.d.answers["r"]
    assert status is (Status.FINISHED_LENGTH_CAPPED if recompute else Status.FINISHED_ERROR)
    assert ended(pair) is Code.IO
    assert pair.core_events("D")[2:] == ["update_output: EngineDropped"]
    pair.idle(31 * S)
    pair.assert_at_rest()


@METHODS
@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_of_a_load_that_fails_stay_out_of_use(pulls: bool, recompute: bool) -> None:
    """P is silent, and its WRITE lands after D's request has been computed here, or has failed."""
    pair, request = loading(pulls, d={"recompute": recompute})
    first = tuple(request.block_ids)
    pair.holding |= {"SyncReply", "fence", "CancelAck"}
    while "r" not in pair.d.answers:
        pair.now += 500 * MS
        pair.step()
        assert pair.now < 100 * S
    assert ended(pair) in (Code.PEER_DEAD, Code.STALLED)
    assert [pair.d.pool.references[block] for block in first] == [1] * BLOCKS
    pair.run()
    pair.carry_out(pair.find(MOVING[pulls]))  # Where it lands is looked at there.
    pair.idle(31 * S)
    pair.assert_at_rest()


@METHODS
def test_drop_is_answered_in_a_later_step(pulls: bool) -> None:
    """Until then the name is taken, and the client may go as well."""
    for aborts in (False, True):
        pair, request = loading(pulls)
        pair.fail(MOVING[pulls])
        pair.holding = set()
        pair.step()
        core = pair.decode_side.core
        if core.stage_of("r") is not None:
            pair.step()
        assert core.stage_of("r") is None
        assert core.knows("r")
        assert request.status is Status.WAITING_FOR_REMOTE_KVS
        with pytest.raises(LocalProtocolError, match="is already open"):
            core.rules[DecodeRequested](of_r(pair))
        if aborts:
            pair.d.abort("r")
            assert list(pair.d.requests) == ["r"], "vLLM waits for the end of the load"
        pair.step()
        assert not core.knows("r")
        assert pair.core_events("D")[2:] == ["update_output: EngineDropped"]
        pair.step(5)
        status, _ = pair.d.answers["r"]
        assert status is (Status.FINISHED_ABORTED if aborts else Status.FINISHED_LENGTH_CAPPED)
        pair.idle(31 * S)
        pair.assert_at_rest()


def of_r(pair: Pair) -> DecodeRequested:
    """It comes again under the same name."""
    return DecodeRequested("r", pair.params_of(), BLOCKS, 40, 0)


def test_content_that_is_not_the_prompt_s_is_computed() -> None:
    pair = prefilled()
    pair.d.add_request(Request("r", 40, 3, pair.p.answers["p-x"][1], first=1))
    pair.step(10)
    assert ended(pair) is Code.CONTENT
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED
    pair.idle(31 * S)
    pair.assert_at_rest()


@METHODS
def test_a_request_that_is_resolved_before_it_has_blocks_is_computed(pulls: bool) -> None:
    """No load was begun, so none is reported as failed."""
    pair = prefilled(pulls, d={"num_blocks": 4})
    pair.d.add_request(Request("other", 60, 4))
    pair.step()
    pair.submit_decode()
    pair.step()
    pair.now += 16 * S
    pair.step()
    assert ended(pair) is Code.PEER_DEAD
    assert pair.core_events("D")[-1] == "update_output: EngineDropped"
    pair.step(10)
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED
    pair.assert_at_rest()


@METHODS
@pytest.mark.parametrize("aborts", [False, True])
def test_a_request_is_resolved_before_its_admission_is_reported(pulls: bool, aborts: bool) -> None:
    """vLLM 0.33 gives blocks in one step and says so in another."""
    pair = prefilled(pulls, d={"defers_alloc": True})
    request = pair.submit_decode()
    pair.now += 16 * S
    output = pair.d.schedule()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    if aborts:
        pair.d.abort("r")
    pair.d.update_from_output(output, pair.d.execute(output))
    assert ended(pair) is (Code.CANCELLED if aborts else Code.PEER_DEAD)
    pair.step(8)
    if aborts:
        assert pair.core_events("D")[1:] == ["request_finished: RequestAborted EngineDropped"]
    else:
        assert pair.core_events("D")[1:] == [
            "update_state_after_alloc: EngineAdmitted",
            "update_output: EngineDropped",
        ]
        assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED
    pair.assert_at_rest()


# Time.


@METHODS
def test_an_engine_that_was_parked_does_not_take_its_peer_for_dead(pulls: bool) -> None:
    """EngineCore has called nobody for an hour. What was due meanwhile is told after what has arrived (C11)."""
    pair = prefilled(pulls)
    pair.submit_decode()
    pair.step(8)
    assert pair.d.parked()
    pair.idle(3600 * S)
    pair.submit_prefill("y")
    pair.step()
    pair.submit_decode("s", "y")
    pair.step(8)
    assert ended(pair, "s") is Code.NONE
    pair.assert_at_rest()


def test_a_second_prompt_of_a_name_is_computed_for_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A router repeats a prompt's name while the first one is kept: no D can come for the second."""
    pair = prefilled()
    pair.p.add_request(Request("p-2", 40, 1, {"do_remote_decode": True, "pdflow": {"xid": "x"}}))
    pair.step(2)
    assert pair.p.answers["p-2"] == (Status.FINISHED_LENGTH_CAPPED, None)
    assert "a prompt named x is already open" in caplog.text
    pair.submit_decode()
    pair.step(8)
    assert ended(pair) is Code.NONE
    pair.assert_at_rest()


@METHODS
@pytest.mark.parametrize("loaded", [False, True])
def test_a_second_decode_leg_of_a_prompt_is_computed_at_once(
    pulls: bool, loaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a request with n > 1, of which vLLM makes several: P sends a prompt once, and has it no more after that."""
    pair = prefilled(pulls)
    pair.submit_decode()
    pair.step(8 if loaded else 1)
    pair.submit_decode("r-2")
    pair.step(8)
    assert ended(pair) is Code.NONE
    assert "r-2: computing the prompt on this instance: another request has the KV of prompt x" in caplog.text
    assert pair.d.answers["r-2"][0] is Status.FINISHED_LENGTH_CAPPED
    pair.assert_at_rest()


def test_what_has_no_blocks_yet_keeps_no_engine_stepping() -> None:
    """A pause, in which vLLM computes no request that waits, would not end for its sake."""
    pair = prefilled()
    pair.submit_decode()
    pair.submit_prefill("y")
    pair.d.connector.take_down({})
    assert pair.decode_side.endpoint.unfinished()
    assert not pair.d.connector.has_pending_work()
    assert pair.p.connector.has_pending_work(), "P holds the blocks of x"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tp_size": None},
        {"remote_request_id": None},
        {"remote_port": "5600"},
        {"remote_host": 7},
        {"pdflow": None},
        {"pdflow": {"xid": "x", "block_size": 0}},
        {"pdflow": {"xid": "x", "block_size": 16, "ranks": [["127.0.0.1", 1]] * 3}},
        {"remote_engine_id": ["P"]},
    ],
    ids=str,
)
def test_a_decode_leg_whose_parameters_are_wrong_is_computed_here(wrong: dict[str, Any]) -> None:
    pair = prefilled()
    answer = {key: value for key, value in (pair.p.answers["p-x"][1] | wrong).items() if value is not None}
    pair.d.add_request(Request("r", 40, 3, answer))
    pair.step(8)
    assert pair.d.answers["r"] == (Status.FINISHED_LENGTH_CAPPED, None)
    assert not pair.core_events("D")
    pair.idle(31 * S)
    pair.assert_at_rest()


def test_parameters_of_a_prefill_leg_that_are_wrong_cost_only_its_kv() -> None:
    pair = Pair()
    pair.p.add_request(Request("p-x", 40, 1, {"do_remote_decode": True, "pdflow": {"xid": 7}}))
    pair.step(2)
    assert pair.p.answers["p-x"] == (Status.FINISHED_LENGTH_CAPPED, None)
    pair.assert_at_rest()


@METHODS
def test_kv_that_vllm_does_not_load_after_all_is_given_up(pulls: bool) -> None:
    """It skips the prefix cache for a request that wants logprobs of its prompt, whatever the connector offers."""
    pair = prefilled(pulls)
    request = Request("r", 40, 3, pair.p.answers["p-x"][1])
    request.skip_reading_prefix_cache = True
    pair.d.add_request(request)
    pair.step(8)
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED
    assert ended(pair) is Code.CANCELLED
    pair.idle(3 * S)
    pair.step(2)
    assert not any(pair.p.pool.references), "P has been told that nobody comes"
    pair.assert_at_rest()


# Weights.


@METHODS
def test_kv_of_other_weights_is_refused_until_both_have_them(pulls: bool) -> None:
    """vLLM resets its caches before it updates weights, and does not say what these are."""
    pair = prefilled(pulls)
    pair.d.connector.reset()
    pair.submit_decode()
    pair.step(8)
    assert ended(pair) is Code.WEIGHTS
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED, "it is computed here"
    pair.idle(31 * S)
    pair.step(2)
    pair.p.connector.reset()
    pair.submit_prefill("y")
    pair.step(2)
    pair.submit_decode("s", "y")
    pair.step(8)
    assert ended(pair, "s") is Code.NONE
    pair.idle(31 * S)
    pair.assert_at_rest()


# Errors of ours.


def broken(pair: Pair, side: str, hook: str) -> Any:
    """Have a hook of this half raise from now on, and let its guard keep that from vLLM."""
    engine = pair.p if side == "P" else pair.d
    guarded: Any = engine.connector

    def raises(*_: Any) -> None:
        raise AssertionError("an assertion of an endpoint")

    guarded._make_broken = lambda _: None
    setattr(guarded.side, hook, raises)
    return guarded


@METHODS
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("hook", ["take_up", "take_down", "on_new_request", "get_num_new_matched_tokens"])
def test_an_error_of_ours_at_d_costs_the_open_loads_and_nothing_else(pulls: bool, recompute: bool, hook: str) -> None:
    """The load that is open fails, its blocks stay out of use, later requests are computed, and vLLM goes on."""
    pair, request = loading(pulls, d={"recompute": recompute})
    held = tuple(request.block_ids)
    guarded = broken(pair, "D", hook)
    pair.d.add_request(Request("later", 20, 2, pair.p.answers["p-x"][1]))
    pair.step(12)
    assert "an assertion of an endpoint" in guarded.broken
    assert pair.d.answers["r"][0] is (Status.FINISHED_LENGTH_CAPPED if recompute else Status.FINISHED_ERROR)
    assert pair.d.answers["later"][0] in (Status.FINISHED_LENGTH_CAPPED, pair.d.answers["r"][0])
    assert [pair.d.pool.references[block] for block in held] == [1] * BLOCKS
    pair.d.add_request(Request("last", 20, 2, pair.p.answers["p-x"][1]))
    pair.step(4)
    assert pair.d.answers["last"] == (Status.FINISHED_LENGTH_CAPPED, None)
    assert pair.d.parked()


@pytest.mark.parametrize("aborts", [False, True])
def test_an_error_of_ours_at_d_while_a_load_is_being_reported(aborts: bool) -> None:
    pair, _ = loading()
    pair.fail("WRITE")
    pair.holding = set()
    pair.step()
    broken(pair, "D", "update_failed")
    if aborts:
        pair.d.abort("r")
    pair.step(6)
    assert pair.d.answers["r"][0] is (Status.FINISHED_ABORTED if aborts else Status.FINISHED_LENGTH_CAPPED)
    assert pair.d.requests == {}
    assert pair.d.parked()


@METHODS
def test_an_error_of_ours_at_p_costs_no_prompt(pulls: bool) -> None:
    """What D may still read stays as it is; later prompts are computed without a D that could come for them."""
    pair = prefilled(pulls)
    guarded = broken(pair, "P", "request_finished")
    pair.submit_prefill("y")
    pair.step(3)
    assert guarded.broken
    assert pair.p.answers["p-y"] == (Status.FINISHED_LENGTH_CAPPED, None)
    assert pair.p.pool.references[:BLOCKS] == [1] * BLOCKS
    assert pair.p.parked()


def test_a_rank_that_has_ended_breaks_the_connector() -> None:
    pair, _ = loading()
    guarded: Any = pair.d.connector
    guarded._make_broken = lambda _: None
    worker = pair.workers["D.r0"]
    worker.take_up = lambda: encode_up(0, [], "ValueError('a bug')")  # type: ignore[method-assign]
    pair.step(6)
    assert guarded.broken == "rank 0: ValueError('a bug')"
    assert pair.d.answers["r"][0] is Status.FINISHED_LENGTH_CAPPED
    assert pair.d.parked()

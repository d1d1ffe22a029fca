"""What vLLM's Scheduler expects of a connector from a lookup to the end of a load.

The table in `support/real_engine.py` sums it up. `unguarded` takes the bed's own ledger away, which is stricter.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from vllm.v1.request import RequestStatus

    from tests.vllm.support.decode_bed import ASYNC, POLICY, PROMPT, REMOTE, DecodeBed

pytestmark = MARKS


@ASYNC
def test_a_lookup_without_an_answer_is_repeated(async_scheduling: bool) -> None:
    bed = DecodeBed(async_scheduling=async_scheduling)
    bed.side.hesitates.add("r")
    request = bed.engine.add_request("r", PROMPT, 3, dict(REMOTE))
    bed.engine.add_request("behind", PROMPT)
    bed.steps(4)
    assert bed.side.of("lookup")[0] == ("r", 0, None, False)
    assert len([call for call in bed.side.of("lookup") if call[0] == "r"]) == 4
    assert request.status is RequestStatus.WAITING
    assert "behind" in bed.engine.answers, "those behind it go on"
    bed.side.hesitates.clear()
    bed.steps(1)
    assert bed.side.of("lookup")[-1] == ("r", 32, 8, True), "by now, the prefix cache has two blocks of it"
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_match_without_room_is_looked_up_again_and_keeps_others_waiting() -> None:
    """vLLM keeps nothing of the answer, and does not consider the requests behind it. An abort waits for no report."""
    bed = DecodeBed(num_blocks=5)
    bed.engine.add_request("first", range(100, 160), 5)
    bed.steps(1)
    bed.engine.add_request("r", PROMPT, 3, dict(REMOTE))
    bed.engine.add_request("behind", [7] * 10)
    bed.steps(2)
    assert bed.side.of("lookup")[1:] == [("r", 0, 40, True)] * 2
    assert not [call for call in bed.side.of("alloc") if call[0] != "first"]
    bed.engine.abort("r")
    assert bed.side.of("finished") == [("r", "FINISHED_ABORTED", [])]
    assert "r" not in bed.engine.requests, "no report is waited for"
    bed.steps(8)
    bed.rest()


def test_what_is_aborted_in_the_call_that_adds_it_waits_for_no_report() -> None:
    bed = DecodeBed()
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    assert bed.side.of("finished") == [("bare", "FINISHED_ABORTED", [])] * 2
    assert not bed.side.of("lookup")
    bed.steps(1)
    bed.rest()


def test_a_second_request_under_the_name_of_one_that_is_left_stops_enginecore() -> None:
    """A client may cause two under one bare id, so the hook must not delay the free of such a request."""
    bed = DecodeBed()
    bed.side.delays = True
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    with pytest.raises(AssertionError, match="duplicate request id"):
        bed.engine.hang_up("never-seen", "bare", dict(REMOTE))


def test_a_request_with_prompt_logprobs_loads_nothing() -> None:
    """vLLM looks it up, and replaces the answer by (0, False)."""
    bed = DecodeBed()
    bed.engine.add_request("r", PROMPT, 3, dict(REMOTE), prompt_logprobs=1)
    bed.steps(1)
    assert bed.side.of("lookup") == [("r", 0, 40, True)]
    assert bed.side.of("alloc") == [("r", ([1, 2, 3],), 0)]
    bed.steps(5)
    bed.rest()


# Loads.


@ASYNC
@pytest.mark.parametrize("tp", [1, 2])
def test_a_load(tp: int, async_scheduling: bool) -> None:
    bed = DecodeBed(tp, async_scheduling=async_scheduling)
    request = bed.loading()
    bed.steps(2)
    assert request.num_computed_tokens == 40, "of what it will have"
    bed.report("r")
    bed.steps(6)
    assert bed.engine.answers["r"] == (RequestStatus.FINISHED_LENGTH_CAPPED, None)
    assert len(bed.side.of("lookup")) == 1
    assert [external for _, _, external in bed.side.of("alloc")] == [40, 0], "again, when it is scheduled"
    bed.rest()


def test_a_rank_that_does_not_report_keeps_the_request_waiting() -> None:
    bed = DecodeBed(tp=2)
    bed.loading()
    bed.report("r", ranks=1)
    bed.steps(20)
    assert "r" in bed.engine.requests
    with pytest.raises(AssertionError, match="vLLM waits for finished_recving of \\['r'\\]"):
        bed.engine.assert_at_rest()


@ASYNC
@pytest.mark.parametrize("before", ["load", "abort"])
def test_a_load_that_is_aborted_before_its_report_waits_for_it(before: str, async_scheduling: bool) -> None:
    """The hook is called at once, with all blocks of the load. They are freed when the report arrives, which may be in
    the same update."""
    bed = DecodeBed(async_scheduling=async_scheduling)
    bed.loading()
    if before == "load":
        bed.report("r")
        bed.engine.abort("r", late=True)
        bed.steps(1)
    else:
        bed.engine.abort("r")
        bed.steps(3)
        assert list(bed.engine.requests) == ["r"]
        assert sum(bed.engine.references()) == 3
        bed.report("r")
        bed.steps(1)
    assert bed.side.of("finished") == [("r", "FINISHED_ABORTED", [1, 2, 3])]
    bed.steps(1)
    assert bed.engine.requests == {}
    bed.steps(2)
    bed.rest()


def test_a_load_that_is_aborted_after_its_report_waits_for_nothing() -> None:
    bed = DecodeBed()
    bed.loading()
    bed.report("r")
    bed.steps(1)
    bed.engine.abort("r")
    assert bed.side.of("finished") == [("r", "FINISHED_ABORTED", [1, 2, 3])]
    assert bed.engine.requests == {}
    bed.unguarded()
    bed.ranks[0].results.finished_recving.add("r")
    with pytest.raises(AssertionError):
        bed.steps(1)


def test_what_the_prefix_cache_has_is_among_the_blocks_of_the_end() -> None:
    bed = DecodeBed()
    bed.engine.add_request("first", PROMPT)
    bed.steps(2)
    bed.loading()
    assert bed.side.of("lookup")[-1] == ("r", 32, 8, True)
    assert bed.side.of("alloc")[-1] == ("r", ([1, 2, 4],), 8) or bed.side.of("alloc")[-1] == ("r", ([1, 2, 3],), 8)
    bed.engine.abort("r")
    assert len(bed.side.of("finished")[-1][2]) == 3


# Loads that fail.


@ASYNC
@POLICY
@pytest.mark.parametrize("tp", [1, 2])
def test_a_load_fails(tp: int, recompute: bool, async_scheduling: bool) -> None:
    """With policy "fail" the hook is called before the report is read, in the same update."""
    bed = DecodeBed(tp, recompute=recompute, async_scheduling=async_scheduling)
    bed.loading()
    bed.side.calls.clear()
    bed.report("r", failed=True)
    bed.steps(10)
    status, _ = bed.engine.answers["r"]
    if recompute:
        assert status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert bed.side.of("lookup") == [("r", 0, 0, False)], "it is asked again, and must not load again for nothing"
        assert bed.side.of("alloc")[0][2] == 0
    else:
        assert status is RequestStatus.FINISHED_ERROR
        reported = bed.side.calls.index(("output", ["r"]))
        assert bed.side.calls[reported - 1] == ("finished", "r", "FINISHED_ERROR", [1, 2, 3])
        assert not bed.side.of("lookup")
    bed.rest()


def test_a_load_that_has_failed_is_aborted_before_it_is_scheduled() -> None:
    """No token counts as computed, so the hook gets no block, though three are held until it returns."""
    bed = DecodeBed()
    request = bed.loading()
    bed.report("r", failed=True)
    bed.steps(1)
    assert request.num_computed_tokens == 0
    assert sum(bed.engine.references()) == 3
    bed.engine.abort("r")
    assert bed.side.of("finished") == [("r", "FINISHED_ABORTED", [])]
    bed.steps(1)
    bed.rest()


def test_a_failure_of_some_ranks_is_one_when_all_have_reported() -> None:
    bed = DecodeBed(tp=2)
    bed.loading()
    bed.report("r", failed=True, ranks=1)
    bed.steps(2)
    assert not bed.side.of("output")[-1][0]
    bed.ranks[1].results.finished_recving.add("r")
    bed.steps(8)
    assert bed.side.of("lookup")[-1] == ("r", 0, 0, False)
    bed.rest()


def test_a_failure_that_the_scheduler_s_half_adds_is_not_read() -> None:
    """vLLM reads `failed_recving` first, calls the connector then, and reads `finished_recving` last."""
    bed = DecodeBed()
    bed.loading()

    def added(output: Any) -> None:
        output.failed_recving.add("r")
        output.finished_recving = {"r"}

    bed.engine.connector.update_connector_output = added
    bed.steps(1)
    bed.unguarded()
    with pytest.raises(AssertionError, match="reads KV that is not of its tokens"):
        bed.steps(1)


def test_blocks_in_quarantine_keep_loaded_requests_behind_a_failed_one_waiting() -> None:
    """A request whose load has failed stays at the head of the queue of those that hold blocks, with none of its own.
    While it has no room, vLLM does not consider the loaded ones behind it, which need none. An answer of None moves it
    to the other queue."""
    bed = DecodeBed(num_blocks=7)
    request = bed.loading("failed")
    blocks = [bed.engine.pool.blocks[number] for number in bed.ranks[0].loads[0].blocks[0]]
    loaded = bed.loading("loaded", prompt=[*PROMPT[:39], 99])
    bed.engine.pool.touch(blocks)
    bed.report("failed", failed=True)
    bed.steps(1)
    bed.report("loaded")
    bed.steps(5)
    assert (request.status, loaded.status) == (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    bed.side.hesitates.add("failed")
    bed.side.loaded.discard("failed")
    bed.steps(6)
    assert bed.engine.answers["loaded"][0] is RequestStatus.FINISHED_LENGTH_CAPPED
    bed.engine.pool.free_blocks(blocks)
    bed.side.loaded.add("failed")
    bed.rest()


def test_a_failed_load_may_stop_vllm_for_good() -> None:
    """With a sliding window a load takes fewer blocks than the same prompt when it is computed. Two loads fill the
    pool, and the first fails. It has no room while the second has its blocks, and that one is never considered."""
    bed = DecodeBed(num_blocks=14, windows=(None, 32))
    prompt = list(range(60))
    first = bed.loading("failed", prompt=prompt)
    second = bed.loading("loaded", prompt=[*prompt[:59], 99])
    bed.report("failed", failed=True)
    bed.report("loaded")
    bed.steps(100)
    assert not bed.engine.parked()
    assert (first.status, second.status) == (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert not bed.engine.scheduler.running
    bed.side.loaded.discard("failed")
    bed.side.hesitates.add("failed")
    bed.steps(1)
    bed.side.loaded.add("failed")
    bed.rest()
    assert {status.name for status, _ in bed.engine.answers.values()} == {"FINISHED_LENGTH_CAPPED"}

"""Preemption, resets of the prefix cache and pauses, as a connector sees them."""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from vllm.v1.request import RequestStatus

    from tests.vllm.support.decode_bed import ASYNC, PROMPT, DecodeBed

pytestmark = MARKS


@ASYNC
def test_a_request_that_is_preempted_after_its_load_is_looked_up_again(async_scheduling: bool) -> None:
    bed = DecodeBed(async_scheduling=async_scheduling)
    request = bed.loading(max_tokens=30)
    bed.report("r")
    bed.steps(12)
    assert request.num_output_tokens > 8
    bed.side.calls.clear()
    bed.engine.add_request("other", PROMPT)
    if async_scheduling:
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            bed.engine.reset_prefix_cache(reset_running_requests=True)  # A step in flight may write its blocks.
    else:
        assert bed.engine.reset_prefix_cache(reset_running_requests=True)
    assert request.status is RequestStatus.PREEMPTED
    bed.steps(2)
    (again,) = [call for call in bed.side.of("lookup") if call[0] == "r"]
    assert again[2:] == (0, False)
    if async_scheduling:
        assert again[1] == 48, "the prefix cache may have more than the prompt: what is missing of it is negative"
    bed.steps(40)
    assert bed.engine.answers["r"][0] is RequestStatus.FINISHED_LENGTH_CAPPED
    bed.rest()


def test_a_request_that_is_preempted_may_load_again() -> None:
    bed = DecodeBed()
    request = bed.loading(max_tokens=5)
    bed.report("r")
    bed.steps(3)
    assert bed.engine.reset_prefix_cache(reset_running_requests=True)
    bed.side.loaded.clear()
    bed.steps(1)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_preemptions == 1
    bed.ranks[0].loads = bed.ranks[0].loads[1:]
    bed.report("r")
    bed.steps(6)
    assert bed.engine.seen["loads again"] == 1
    bed.rest()


@pytest.mark.parametrize("holder", ["load", "reference"])
def test_a_reset_fails_while_anybody_holds_a_block(holder: str) -> None:
    """Without `reset_running_requests` it returns False. With it vLLM raises, after preempting the running requests."""
    bed = DecodeBed()
    if holder == "load":
        bed.loading()
    else:
        bed.engine.pool.touch([bed.engine.pool.blocks[60]])
    running = bed.engine.add_request("running", [1, 2, 3], 20)
    bed.steps(1)
    assert not bed.engine.reset_prefix_cache()
    assert running.status is RequestStatus.RUNNING
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        bed.engine.reset_prefix_cache(reset_running_requests=True)
    assert running.status is RequestStatus.PREEMPTED


def test_paused_for_new_ones_a_loaded_request_goes_on() -> None:
    bed = DecodeBed()
    bed.loading()
    fresh = bed.engine.add_request("fresh", [1, 2, 3])
    bed.engine.pause("wait")
    bed.report("r")
    bed.steps(6)
    assert bed.engine.answers["r"][0] is RequestStatus.FINISHED_LENGTH_CAPPED
    assert fresh.status is RequestStatus.WAITING
    assert bed.engine.parked()
    bed.engine.finish_pause()
    bed.engine.resume()
    bed.steps(3)
    bed.rest()


def test_paused_for_all_a_load_is_not_looked_at() -> None:
    """EngineCore is parked while a load is under way: it calls no hook, so no deadline can be judged there."""
    bed = DecodeBed()
    bed.loading()
    bed.engine.pause("keep")
    bed.report("r")
    bed.side.calls.clear()
    bed.steps(5)
    assert bed.engine.parked()
    assert not bed.side.calls
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        bed.engine.finish_pause()
    bed.engine.resume()
    bed.steps(6)
    bed.rest()


def test_a_pause_ends_when_no_push_work_is_left() -> None:
    """A pause is complete, and sleep begins, when EngineCore is parked. Blocks in quarantine must count as pending
    work, or the reset that follows raises."""
    bed = DecodeBed()
    bed.engine.pool.touch([bed.engine.pool.blocks[60]])
    bed.side.pushes = True
    bed.engine.pause("keep")
    bed.steps(5)
    assert not bed.engine.parked()
    assert len(bed.side.of("output")) == 5, "it steps, with nothing scheduled"
    bed.side.pushes = False
    assert bed.engine.parked()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        bed.engine.finish_pause()
    bed.engine.pool.free_blocks([bed.engine.pool.blocks[60]])
    bed.engine.finish_pause()


def test_aborting_all_for_a_pause_waits_for_their_loads() -> None:
    bed = DecodeBed()
    bed.loading()
    bed.engine.pause("abort")
    bed.steps(3)
    assert not bed.engine.parked()
    bed.report("r")
    bed.steps(2)
    assert bed.engine.parked()
    bed.engine.finish_pause()

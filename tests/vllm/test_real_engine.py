"""What vLLM's Scheduler expects of a connector, row by row of the table in `support/real_engine.py`.

Each test shows vLLM itself: `unguarded` takes the bed's own ledger away, whose assertions are stricter.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    if vllm.__version__ != "0.32.0":
        pytest.skip(f"this is vLLM {vllm.__version__}, the bed is of 0.32.0", allow_module_level=True)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, KVConnectorWorkerMetadata
    from vllm.v1.request import Request, RequestStatus

    from tests.vllm.support.real_engine import RealEngine
    from tests.vllm.support.stub_connector import StubDecode, StubPrefill, StubRank

PROMPT = list(range(40))
"""Three blocks, the last one of 8 tokens."""
REMOTE = {"do_remote_prefill": True, "source": "p"}
ASYNC = pytest.mark.parametrize("async_scheduling", [False, True], ids=("sync", "async"))
POLICY = pytest.mark.parametrize("recompute", [False, True], ids=("fail", "recompute"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def rest(engine: RealEngine) -> None:
    for _ in range(60):
        engine.step()
    engine.assert_at_rest()


class Recorded(StubDecode):
    """D's half, with the calls of its hooks. `delays`: whether the end of a request delays the free of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.delays = False
        self.pushes = False

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        result = super().get_num_new_matched_tokens(request, computed)
        self.calls.append(("lookup", request.request_id, computed, *result))
        return result

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        super().update_state_after_alloc(request, blocks, external)
        self.calls.append(("alloc", request.request_id, blocks.get_block_ids(), external))

    def update_connector_output(self, output: Any) -> None:
        self.calls.append(("output", sorted(output.finished_recving or ())))

    def request_finished(self, request: Any, *block_ids: list[int]) -> tuple[bool, Any]:
        super().request_finished(request, *block_ids)
        self.calls.append(("finished", request.request_id, request.status.name, *block_ids))
        return self.delays, None

    def has_pending_push_work(self) -> bool:
        return self.pushes

    def of(self, verb: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == verb]


class Bed:
    """A D, the load of whose requests ends when the test says so. Its KV is as P would have written it."""

    def __init__(self, tp: int = 1, **setting: Any) -> None:
        self.side = Recorded()
        self.ranks = [StubRank() for _ in range(tp)]
        self.engine = RealEngine(self.side, self.ranks, **setting)

    def loading(self, request_id: str = "r", max_tokens: int = 3, prompt: list[int] = PROMPT) -> Request:
        request = self.engine.add_request(request_id, prompt, max_tokens, dict(REMOTE))
        self.steps(1)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def write(self, request_id: str) -> None:
        """What P's WRITE does."""
        (load,) = [load for load in self.ranks[0].loads if load.request_id == request_id]
        prints = self.engine.core.fingerprints[request_id]
        values = prints.up_to(len(prints.prompt))
        for memory in self.engine.memories:
            for layer in memory.layers.values():
                for position, value in enumerate(values):
                    layer[:, load.blocks[0][position // 16], position % 16] = value

    def report(self, request_id: str, failed: bool = False, ranks: int | None = None) -> None:
        if not failed:
            self.write(request_id)
        for rank in self.ranks[:ranks]:
            rank.results.finished_recving.add(request_id)
            if failed:
                rank.results.failed_recving.add(request_id)

    def rest(self) -> None:
        rest(self.engine)

    def unguarded(self) -> None:
        """vLLM's own assertions only."""
        self.engine.connector.update_connector_output = lambda output: None


# Lookups and allocations.


@ASYNC
def test_a_lookup_without_an_answer_is_repeated(async_scheduling: bool) -> None:
    bed = Bed(async_scheduling=async_scheduling)
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
    bed = Bed(num_blocks=5)
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
    bed = Bed()
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    assert bed.side.of("finished") == [("bare", "FINISHED_ABORTED", [])] * 2
    assert not bed.side.of("lookup")
    bed.steps(1)
    bed.rest()


def test_a_second_request_under_the_name_of_one_that_is_left_stops_enginecore() -> None:
    """A client may cause two under one bare id, so the hook must not delay the free of such a request."""
    bed = Bed()
    bed.side.delays = True
    bed.engine.hang_up("never-seen", "bare", dict(REMOTE))
    with pytest.raises(AssertionError, match="duplicate request id"):
        bed.engine.hang_up("never-seen", "bare", dict(REMOTE))


def test_a_request_with_prompt_logprobs_loads_nothing() -> None:
    """vLLM looks it up, and replaces the answer by (0, False)."""
    bed = Bed()
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
    bed = Bed(tp, async_scheduling=async_scheduling)
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
    bed = Bed(tp=2)
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
    bed = Bed(async_scheduling=async_scheduling)
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
    bed = Bed()
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
    bed = Bed()
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
    bed = Bed(tp, recompute=recompute, async_scheduling=async_scheduling)
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
    bed = Bed()
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
    bed = Bed(tp=2)
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
    bed = Bed()
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
    bed = Bed(num_blocks=7)
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
    bed.steps(6)
    bed.rest()


# Preemption, resets, pauses.


@ASYNC
def test_a_request_that_is_preempted_after_its_load_is_looked_up_again(async_scheduling: bool) -> None:
    bed = Bed(async_scheduling=async_scheduling)
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
    bed = Bed()
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
    bed = Bed()
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
    bed = Bed()
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
    bed = Bed()
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
    bed = Bed()
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
    bed = Bed()
    bed.loading()
    bed.engine.pause("abort")
    bed.steps(3)
    assert not bed.engine.parked()
    bed.report("r")
    bed.steps(2)
    assert bed.engine.parked()
    bed.engine.finish_pause()


# P.


class Prefill(StubPrefill):
    def __init__(self) -> None:
        super().__init__(block_size=16)
        self.ends: list[tuple[str, tuple[list[int], ...]]] = []
        self.sent: set[str] = set()
        """Reported by the half in EngineCore, in the update that asks it."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        self.ends.append((request.status.name, block_ids))
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, output: Any) -> None:
        if self.sent:
            output.finished_sending = {*(output.finished_sending or ()), *self.sent}
            self.sent = set()


def prefilled(
    tokens: int = 1, prompt: int = 40, tp: int = 1, **setting: Any
) -> tuple[RealEngine, Prefill, list[StubRank]]:
    """A P whose prompt "p" is computed. Its output ends with the first token, whatever `tokens` are asked for."""
    side, ranks = Prefill(), [StubRank() for _ in range(tp)]
    engine = RealEngine(side, ranks, **setting)
    engine.add_request("p", range(prompt), tokens, {"do_remote_decode": True}, stops_at=1)
    while "p" not in engine.answers:
        engine.step()
    return engine, side, ranks


@ASYNC
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_of_a_prompt_are_kept_until_it_is_sent(tp: int, async_scheduling: bool) -> None:
    engine, _, ranks = prefilled(tp=tp, async_scheduling=async_scheduling)
    for _ in range(5):
        engine.step()
    assert list(engine.requests) == ["p"]
    assert not engine.parked(), "vLLM steps on for it"
    assert sum(engine.references()) == 3
    for rank in ranks:
        rank.results.finished_sending.add("p")
        engine.step()
    rest(engine)


def test_the_half_in_enginecore_may_report_in_the_update_in_which_it_ends() -> None:
    """An update calls `request_finished` first, then `update_connector_output`, and then looks at the sets."""
    side = Prefill()
    engine = RealEngine(side, [StubRank()])
    engine.add_request("p", PROMPT, 1, {"do_remote_decode": True})
    side.sent = {"p"}
    engine.step()
    assert engine.requests == {}
    rest(engine)


@pytest.mark.parametrize("uniproc", [False, True])
def test_a_step_without_reports_calls_no_hook_on_one_gpu(uniproc: bool) -> None:
    """With worker processes, outputs are aggregated, and there always is one. In one process, an empty one is dropped:
    a connector that depends on the call must have its workers report something."""
    bed = Bed(uniproc=uniproc)
    bed.loading()
    bed.side.calls.clear()
    bed.steps(3)
    assert len(bed.side.of("output")) == (0 if uniproc else 3)


class Something(KVConnectorWorkerMetadata):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


def test_metadata_of_a_worker_are_a_report() -> None:
    bed = Bed(uniproc=True)
    bed.ranks[0].build_connector_worker_meta = Something
    bed.loading()
    bed.side.calls.clear()
    bed.steps(3)
    assert len(bed.side.of("output")) == 3


@pytest.mark.parametrize(
    ("tokens", "async_scheduling", "blocks"), [(1, False, 2), (1, True, 2), (5, False, 2), (5, True, 3)]
)
def test_blocks_of_what_was_scheduled_past_the_end(tokens: int, async_scheduling: bool, blocks: int) -> None:
    """A prompt of 32 tokens has two blocks to send. Where more than one output token is allowed, the next one is
    scheduled before the stop token is known, and has a block of its own."""
    _, side, _ = prefilled(tokens, 32, async_scheduling=async_scheduling)
    status, (ids,) = side.ends[0]
    assert status == "FINISHED_STOPPED"
    assert len(ids) == blocks
    assert len(side.products["p"][0]) == 2


def test_vllm_adds_to_the_params_that_are_returned() -> None:
    """What P's hook returns must be a dict, and a dict of the hook's own for each call: vLLM writes into it."""
    engine, _, _ = prefilled()
    assert engine.answers["p"][1]["remote_prefill_cached_tokens"] == 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_prompt_is_aborted(after: int) -> None:
    """Queued, half computed, and finished: then its hook was called before, and is not called again."""
    side = Prefill()
    engine = RealEngine(side, [StubRank()], max_num_batched_tokens=32)
    engine.add_request("p", PROMPT, 1, {"do_remote_decode": True})
    for _ in range(after):
        engine.step()
    engine.abort("p")
    assert [(status, len(ids)) for status, (ids,) in side.ends] == [
        [("FINISHED_ABORTED", 0)],
        [("FINISHED_ABORTED", 2)],
        [("FINISHED_LENGTH_CAPPED", 3)],
    ][after]
    assert list(engine.requests) == ([], [], ["p"])[after]


# Misuse, which stops EngineCore, or leaks.


@pytest.mark.parametrize("report", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("request_id", ["unknown", "running"])
def test_an_id_too_many_stops_enginecore(request_id: str, report: str) -> None:
    bed = Bed()
    bed.engine.add_request("running", PROMPT, 20)
    bed.steps(2)
    bed.unguarded()
    getattr(bed.ranks[0].results, report).add(request_id)
    with pytest.raises(AssertionError):
        bed.steps(1)


def test_a_prompt_that_is_reported_sent_twice_stops_enginecore() -> None:
    engine, _, ranks = prefilled()
    engine.connector.update_connector_output = lambda output: None
    ranks[0].results.finished_sending.add("p")
    engine.step()
    ranks[0].results.finished_sending.add("p")
    engine.add_request("other", PROMPT, 5)
    with pytest.raises(AssertionError):
        engine.step()


def test_a_load_that_is_reported_sent_is_freed_while_it_is_written() -> None:
    """vLLM accepts it if the request was aborted; the bed refuses it."""
    bed = Bed()
    bed.loading()
    bed.engine.abort("r")
    bed.ranks[0].results.finished_sending.add("r")
    with pytest.raises(AssertionError, match="no end of sending is waited for"):
        bed.steps(1)
    other = Bed()
    other.unguarded()
    other.loading()
    other.engine.abort("r")
    other.ranks[0].results.finished_sending.add("r")
    other.steps(1)
    assert not any(other.engine.references())


def test_a_prompt_that_is_never_reported_leaks() -> None:
    engine, _, _ = prefilled()
    for _ in range(50):
        engine.step()
    assert sum(engine.references()) == 3
    with pytest.raises(AssertionError, match="vLLM waits for finished_sending of \\['p'\\]"):
        engine.assert_at_rest()


def test_kv_that_is_not_of_the_prompt_is_found() -> None:
    bed = Bed()
    bed.loading()
    bed.write("r")
    bed.engine.memories[0].layers["layers.0.1"][:, 2, 3] += 1
    bed.ranks[0].results.finished_recving.add("r")
    bed.steps(1)
    with pytest.raises(AssertionError, match=r"in layers\.0\.1 at position 19 \(block 2\); wrong are 1 of 39"):
        bed.steps(1)


def test_results_are_what_a_worker_of_vllm_reports() -> None:
    """The stub returns vLLM's own class, so a field that vLLM adds is present here."""
    assert type(StubRank().results) is KVConnectorTransferResults

"""What vLLM's Scheduler expects of a connector at P, from the end of a prompt to its being sent."""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

    from tests.vllm.support.decode_bed import ASYNC, PROMPT, DecodeBed, rest
    from tests.vllm.support.prefill_bed import RecordedPrefill, prefilled
    from tests.vllm.support.real_engine import RealEngine
    from tests.vllm.support.stub_connector import StubRank

pytestmark = MARKS


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
    side = RecordedPrefill()
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
    bed = DecodeBed(uniproc=uniproc)
    bed.loading()
    bed.side.calls.clear()
    bed.steps(3)
    assert len(bed.side.of("output")) == (0 if uniproc else 3)


class Something(KVConnectorWorkerMetadata):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


def test_metadata_of_a_worker_are_a_report() -> None:
    bed = DecodeBed(uniproc=True)
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
    side = RecordedPrefill()
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

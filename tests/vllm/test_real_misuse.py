"""What stops EngineCore, leaks blocks or serves foreign KV is detected: by vLLM or by the bed."""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    from tests.vllm.support.decode_bed import PROMPT, DecodeBed
    from tests.vllm.support.prefill_bed import prefilled
    from tests.vllm.support.stub_connector import StubRank

pytestmark = MARKS


@pytest.mark.parametrize("report", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("request_id", ["unknown", "running"])
def test_an_id_too_many_stops_enginecore(request_id: str, report: str) -> None:
    bed = DecodeBed()
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
    bed = DecodeBed()
    bed.loading()
    bed.engine.abort("r")
    bed.ranks[0].results.finished_sending.add("r")
    with pytest.raises(AssertionError, match="no end of sending is waited for"):
        bed.steps(1)
    other = DecodeBed()
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
    bed = DecodeBed()
    bed.loading()
    bed.write("r")
    bed.engine.memories[0].layers["layers.0.1"][:, 2, 3] += 1
    bed.ranks[0].results.finished_recving.add("r")
    bed.steps(1)
    with pytest.raises(AssertionError, match=r"in layers\.0\.1 at position 19 \(block 2\); wrong are 2 of 78"):
        bed.steps(1)


def test_results_are_what_a_worker_of_vllm_reports() -> None:
    """The stub returns vLLM's own class, so a field that vLLM adds is present here."""
    assert type(StubRank().results) is KVConnectorTransferResults

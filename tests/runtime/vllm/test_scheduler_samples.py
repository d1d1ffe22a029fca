"""What the half in EngineCore counts for its metrics and logs: ended leases, blocks in quarantine, missing KV."""

from __future__ import annotations

import pytest

from pdflow.protocol.values import S
from tests.runtime.vllm.support import pair as pairs
from tests.runtime.vllm.support.pair import Pair


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Effects have the connector's own handlers, and not the test's."""
    monkeypatch.setattr(pairs, "RECORDED", ())


def prefilled() -> Pair:
    pair = Pair()
    pair.submit_prefill()
    pair.step(2)
    return pair


def test_a_lease_that_ends_counts_once() -> None:
    pair = prefilled()
    pair.idle(31 * S)
    pair.step(2)
    assert pair.prefill_side.samples.take().expired == 1
    pair.idle(31 * S)
    assert pair.prefill_side.samples.take().expired == 0


def test_a_prompt_that_is_fetched_has_not_expired() -> None:
    pair = prefilled()
    pair.submit_decode()
    pair.step(8)
    pair.idle(31 * S)
    assert pair.prefill_side.samples.take().expired == 0
    pair.assert_at_rest()


def test_blocks_are_in_quarantine_between_the_end_of_a_request_and_that_of_its_write() -> None:
    pair = prefilled()
    references = pair.decode_side.references
    pair.holding = {"WRITE"}
    pair.submit_decode()
    pair.step(3)
    assert (references.blocks, references.quarantined) == (3, 0)
    pair.d.abort("r")
    pair.step(2)
    assert (references.blocks, references.quarantined) == (3, 3)
    pair.holding = set()
    pair.step(3)
    assert (references.blocks, references.quarantined) == (0, 0)
    pair.idle(31 * S)
    pair.assert_at_rest()


def test_a_request_without_kv_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    pair = prefilled()
    pair.idle(31 * S)
    pair.step(2)
    pair.submit_decode()
    pair.step(8)
    assert "request r: no KV from its prefill instance: expired" in caplog.text
    pair.idle(31 * S)
    pair.assert_at_rest()


def test_a_request_that_goes_well_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    pair = prefilled()
    pair.submit_decode()
    pair.step(8)
    assert "gets no KV" not in caplog.text

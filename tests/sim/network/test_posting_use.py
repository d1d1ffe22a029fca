"""How busy ranks are with posting transfers, and when the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdflow
from pdflow import Result, Scenario

SMALL = Path(__file__).parents[1] / "small.toml"
PROMPT, REQUESTS = 64, 50


def posted(per_descriptor_s: float, method: str = "nixl-push") -> Result:
    """One pair of engines at 20 requests a second, of 4 blocks each."""
    edits = {
        "workload.requests": REQUESTS,
        "workload.arrival": {"process": "constant", "rate_rps": 20.0},
        "workload.input_tokens": PROMPT,
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "network.per_descriptor_s": per_descriptor_s,
        "transfer.method": method,
    }
    return pdflow.simulate(Scenario.load(SMALL).with_(edits))


@pytest.mark.parametrize(("method", "rank"), [("nixl-push", "p-0.r0"), ("nixl-pull", "d-0.r0")])
def test_the_side_that_moves_the_bytes_posts(method: str, rank: str) -> None:
    """32 layers of 4 blocks, for every request."""
    result = posted(1e-6, method)
    assert result.totals.posting_ns == {rank: REQUESTS * 32 * 4 * 1000}
    assert result.totals.busiest_lane() == (rank, pytest.approx(REQUESTS * 128e-6 * 1e9 / result.totals.duration_ns))
    assert "posting" not in str(result.table())


def test_a_lane_that_is_nearly_always_busy_is_reported() -> None:
    """128 descriptors take 40 ms, of the 50 between two requests."""
    result = posted(40e-3 / 128)
    assert 0.7 < result.summary["posting_busy_share"] < 1
    [line] = [line for line in str(result.table()).splitlines() if line.startswith("posting")]
    assert "p-0.r0" in line
    assert "larger blocks" in str(result.table())


def test_what_is_not_posted_when_a_run_ends_does_not_count() -> None:
    """Each transfer takes 0.4 s to post, twenty are asked for in a second, and clients leave after 2 s."""
    edits = {
        "workload.requests": 40,
        "workload.arrival": {"process": "constant", "rate_rps": 20.0},
        "workload.client": {"timeout_s": 2.0},
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "network.per_message_s": 0.4,
    }
    result = pdflow.simulate(Scenario.load(SMALL).with_(edits))
    assert 0.9 < result.summary["posting_busy_share"] <= 1

"""What PR #35264 saw: READs that D posts before its steps cost tokens, the more the more often they come."""

from __future__ import annotations

import pytest

from benchmarks.published.read_thread import served, tpot_ms


def test_pull_is_slower_than_push_by_what_its_posting_takes() -> None:
    """46 ms for each of 5 requests a second are 23 % of the thread's time: TPOT is 1 / (1 - 0.23) as long, and that
    is how much was seen. Each engine posts on all its ranks at once."""
    push, pull = (served(5.0, method) for method in ("nixl-push", "nixl-pull"))
    assert tpot_ms(pull) / tpot_ms(push) == pytest.approx(1 / (1 - 5 * 0.046), rel=0.05)
    assert pull.summary["itl_p99_ms"] == pytest.approx(46 + tpot_ms(push), rel=0.05)

"""The simulator gives the rates of EFA that were published, also where they were not fitted."""

from __future__ import annotations

import pytest

from benchmarks.published.slices import FITTED, PUBLISHED, rate


@pytest.mark.parametrize(("method", "slice_kb"), [("nixl-push", 64), ("nixl-push", 1024), ("nixl-pull", 128)])
def test_rates_are_as_published(method: str, slice_kb: int) -> None:
    assert rate(method, slice_kb) == pytest.approx(PUBLISHED[method][slice_kb], rel=0.05)


def test_a_quarter_of_the_rows_is_fitted() -> None:
    assert len(FITTED) * 4 == sum(len(rows) for rows in PUBLISHED.values())

"""Slices lose no byte and spread evenly, and their cost is what was published of it."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from pdflow.network.slices import queue_bytes_per_s, shares

KB = 1024
PUBLISHED = {
    "write": {64: 97.11, 128: 190.82, 256: 324.9, 512: 357.62, 1024: 352.59, 2048: 366.87},
    "read": {64: 96.87, 128: 203.88, 256: 296.19, 512: 289.47, 1024: 301.14, 2048: 302.25},
}
"""GB/s of 16 NICs by slice in KB, GPU to GPU, p5en: Mooncake's design/transfer-engine/efa_transport.md."""
FITTED = {("write", 64), ("write", 2048), ("read", 2048)}


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(1, 64))
def test_shares_are_all_bytes_in_whole_slices_but_one(nbytes: int, slice_bytes: int, nics: int) -> None:
    dealt = shares(nbytes, slice_bytes, nics)
    assert sum(dealt) == nbytes
    assert len(dealt) <= nics
    slices = [-(-share // slice_bytes) for share in dealt]
    assert sum(slices) == max(1, -(-nbytes // slice_bytes)) or nbytes == 0
    assert max(slices) - min(slices) <= 1
    assert sum(share % slice_bytes != 0 for share in dealt) <= 1


def test_nothing_is_split_without_slices() -> None:
    assert shares(10**9, 0, 8) == [10**9]
    assert queue_bytes_per_s(0, 1e-6) is None
    assert queue_bytes_per_s(64 * KB, 0.0) is None


def test_the_rate_by_slice_is_the_published_one() -> None:
    """Three rows of twelve give the queue's time and the wire's two rates; the other nine follow."""
    per_slice_s = 64 * KB / (PUBLISHED["write"][64] / 16 * 1e9)
    errors = []
    for direction, rows in PUBLISHED.items():
        for slice_kb, measured in rows.items():
            queue = queue_bytes_per_s(slice_kb * KB, per_slice_s)
            assert queue is not None
            if (direction, slice_kb) not in FITTED:
                errors.append(abs(min(rows[2048], 16 * queue / 1e9) / measured - 1))
    assert len(errors) == 9
    assert median(errors) < 0.03
    assert max(errors) < 0.13

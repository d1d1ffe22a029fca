"""Pieces as rows: the same bytes move as piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow_runtime.gpu import pieces
from pdflow_runtime.gpu.pieces import copy_rows, gather_rows, rows_of

torch = pytest.importorskip("torch")
SLOTS = 24


def columns(draw: Any, unit: int) -> list[Any]:
    """Pieces whose targets do not overlap, some of no length."""
    targets = draw(st.lists(st.integers(0, SLOTS - 1), min_size=0, max_size=SLOTS, unique=True))
    sources = [draw(st.integers(0, 9 * SLOTS)) for _ in targets]
    lengths = [draw(st.integers(0, 8)) for _ in targets]
    return [np.array(list(column), np.uint64) * unit for column in (sources, [8 * at for at in targets], lengths)]


@given(st.data(), st.sampled_from([1, 2, 12, 512]), st.sampled_from([8, 100, 64 << 20]))
def test_rows_move_what_pieces_say(data: st.DataObject, unit: int, step: int) -> None:
    at, to, sizes = columns(data.draw, unit)
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (18 * SLOTS * unit,), dtype=torch.uint8, generator=generator)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    for begin, there, length in zip(at.tolist(), to.tolist(), sizes.tolist(), strict=True):
        expected[there : there + length] = source[begin : begin + length]
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "STEP_BYTES", max(step, 1024))
        for rows in rows_of(at, to, sizes):
            copy_rows(source, target, rows)
            staged = torch.zeros(len(rows.sources) * rows.nbytes, dtype=torch.uint8)
            gather_rows(source, staged, rows)
            gathered.append(staged)
    assert torch.equal(target, expected)
    whole = [source[begin : begin + length] for begin, length in zip(at.tolist(), sizes.tolist(), strict=True)]
    assert torch.equal(torch.cat([*gathered, source[:0]]), torch.cat([*whole, source[:0]]))


def test_a_long_piece_is_cut_into_rows_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "STEP_BYTES", 1 << 20)
    found = list(rows_of(*(np.array([number], np.uint64) for number in (0, 1 << 22, 4 << 20))))
    assert [len(rows.sources) * rows.nbytes for rows in found] == [1 << 20] * 4
    assert all(rows.nbytes == 1024 for rows in found)

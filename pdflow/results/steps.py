"""The engines' step log: the inter-token latency of every output token, in bounded memory.

An engine in steady decode is advanced many steps at once, and its step time then grows by a constant (one more token
of context per sequence per step), so a log row is an arithmetic progression: it says that `steps` steps were run back
to back from `start_ps`, the first taking `first_step_ps` and each later one `delta_ps` more, and that in each of them
`itl_weight` sequences waited for a token after their first. The distribution of inter-token latency is the weighted
multiset of these step times. It is the same whether steps were logged one by one or in rows: everything computed here
is exact in integers of a picosecond, so rows only change the memory.

Decides nothing about time; does not know which request a token belongs to. Rows are kept in the narrowest integer
columns that hold them (7 million single steps take about 120 MB, not 280) and expanded chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_FOLD_ROWS = 1 << 12
"""Rows that wait as tuples, the cheapest thing to append, to be folded into columns at once."""
_TAIL_ROW_BYTES = 256
"""A tuple of five integers, and its place in a list."""
_CHUNK_STEPS = 1 << 16

Row: TypeAlias = tuple[int, int, int, int, int]
Column: TypeAlias = npt.NDArray[np.integer]
Chunk: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Steps:
    """An append-only log of steps; one for each engine, or one for all (the distribution is the same)."""

    __slots__ = ("_folds", "_tail")

    def __init__(self) -> None:
        self._folds: list[tuple[Column, ...]] = []
        self._tail: list[Row] = []

    def add(self, start_ps: int, first_step_ps: int, delta_ps: int, steps: int, itl_weight: int) -> None:
        """Log `steps` back-to-back steps. `itl_weight` excludes sequences whose first token this step computes."""
        tail = self._tail
        tail.append((start_ps, first_step_ps, delta_ps, steps, itl_weight))
        if len(tail) >= _FOLD_ROWS:
            self._fold()

    def _fold(self) -> None:
        self._folds.append(tuple(_narrow(np.array(column, dtype=np.int64)) for column in zip(*self._tail, strict=True)))
        self._tail = []

    def folds(self) -> Iterator[tuple[Column, ...]]:
        """Yield the rows as columns (start_ps, first_step_ps, delta_ps, steps, itl_weight), in bounded chunks."""
        if self._tail:
            self._fold()
        yield from self._folds

    def chunks(self) -> Iterator[Chunk]:
        """Yield (step times in ps, weights), expanded, at most 65,536 steps at a time, weightless steps left out."""
        for _, first, delta, steps, weight in self.folds():
            for row, nth in _expansion(np.where(weight > 0, steps, 0).astype(np.int64)):
                yield first[row].astype(np.int64) + delta[row].astype(np.int64) * nth, weight[row].astype(np.int64)

    def ends(self) -> Iterator[Chunk]:
        """Yield (instants in ps at which a step ended, weights), expanded like `chunks`."""
        for start, first, delta, steps, weight in self.folds():
            for row, nth in _expansion(np.where(weight > 0, steps, 0).astype(np.int64)):
                done = nth + 1
                times = (
                    start[row].astype(np.int64) + done * first[row] + delta[row].astype(np.int64) * (done * nth // 2)
                )
                yield times, weight[row].astype(np.int64)

    def ending_from(self, instant_ps: int) -> Steps:
        """Return the steps that end at this instant or later; a row that began before is cut."""
        found = Steps()
        for columns in self.folds():
            start, first, delta, steps, weight = (column.astype(np.int64) for column in columns)
            kept = start + steps * first + delta * (steps * (steps - 1) // 2) >= instant_ps
            rows = zip(*(column[kept].tolist() for column in (start, first, delta, steps, weight)), strict=True)
            for row_start, row_first, row_delta, row_steps, row_weight in rows:
                done = 0
                while row_start + row_first < instant_ps:
                    row_start, row_first, done = row_start + row_first, row_first + row_delta, done + 1
                found.add(row_start, row_first, row_delta, row_steps - done, row_weight)
        return found

    def totals(self) -> tuple[int, int]:
        """Return the number of steps, and the sum over them of the sequences that waited for a token of the step."""
        folds = [(steps.astype(np.int64), weight.astype(np.int64)) for _, _, _, steps, weight in self.folds()]
        return sum(int(s.sum()) for s, _ in folds), sum(int((s * w).sum()) for s, w in folds)

    def bounds_ps(self) -> tuple[int, int] | None:
        """Return the shortest and the longest step that some token waited for."""
        low: int | None = None
        high = 0
        for _, first, delta, steps, weight in self.folds():
            kept = (weight > 0) & (steps > 0)
            if kept.any():
                begin = first[kept].astype(np.int64)
                end = begin + delta[kept].astype(np.int64) * (steps[kept].astype(np.int64) - 1)
                least = int(min(begin.min(), end.min()))
                low = least if low is None else min(low, least)
                high = max(high, int(begin.max()), int(end.max()))
        return None if low is None else (low, high)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the log holds."""
        held = sum(
            column.base.nbytes if column.base is not None else column.nbytes for f in self._folds for column in f
        )
        return held + len(self._tail) * _TAIL_ROW_BYTES


def _narrow(column: npt.NDArray[np.int64]) -> Column:
    """Return the same numbers in the smallest integers that hold them; one stored number where all are equal."""
    low, high = int(column.min()), int(column.max())
    if low == high:
        return np.broadcast_to(np.array([low], dtype=np.int64), column.shape)
    kind = np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high))
    return column.astype(kind if kind.kind in "iu" and kind.itemsize < 8 else np.int64)


def _expansion(steps: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
    """Yield (row, number within the row) of every step of every row, in order, in bounded chunks."""
    ends = np.cumsum(steps)
    total = int(ends[-1])
    for low in range(0, total, _CHUNK_STEPS):
        high = min(low + _CHUNK_STEPS, total)
        begin, end = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high, side="left") + 1
        starts = ends[begin:end] - steps[begin:end]
        counts = np.minimum(ends[begin:end], high) - np.maximum(starts, low)
        local = np.repeat(np.arange(end - begin), counts)
        yield local + begin, np.arange(low, high) - starts[local]

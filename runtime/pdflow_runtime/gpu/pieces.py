"""Copies of many pieces by two kernels instead of a call for each: pieces become rows of equal length.

The length of a row is the greatest that divides all offsets and lengths. For KV that is a head's part of a block, or
more: kilobytes. Pieces at odd offsets are moved byte by byte, at the cost of 16 bytes of row numbers for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np

from pdflow_runtime.gpu import driver

STEP_BYTES: Final = 64 << 20
"""The bytes that are copied at once: what takes tens of microseconds on a GPU, and 1 to 2 ms over PCIe."""
MAX_ROWS: Final = 4 << 20
"""The rows that are copied at once: their numbers take 64 MiB."""
_WIDTHS: Final = (8, 4, 2, 1)


class RowCopies(NamedTuple):
    """Rows to copy: their length in bytes, and where each begins, in rows, `[N]` of int64 each."""

    nbytes: int
    sources: Any
    targets: Any


def rows_of(sources: Any, targets: Any, lengths: Any) -> Iterator[RowCopies]:
    """Yield the rows of these pieces, so many as are copied at once. Offsets and lengths in bytes, `[N]` of uint64."""
    filled = lengths > 0
    if not filled.any():
        return
    at, to, sizes = (np.asarray(column[filled], np.int64) for column in (sources, targets, lengths))
    unit = int(np.gcd.reduce(np.concatenate((at, to, sizes))))
    # Otherwise one long piece would be one row, and could be neither cut nor shared by the GPU's processors.
    while unit > STEP_BYTES // 1024 and unit % 2 == 0:
        unit //= 2
    counts = sizes // unit
    ends = np.cumsum(counts)
    step = max(1, min(STEP_BYTES // unit, MAX_ROWS))
    for first in range(0, int(ends[-1]), step):
        last = min(first + step, int(ends[-1]))
        numbers = np.arange(first, last)
        piece = np.searchsorted(ends, numbers, "right")
        within = numbers - (ends[piece] - counts[piece])
        yield RowCopies(unit, at[piece] // unit + within, to[piece] // unit + within)


def copy_rows(source: Any, target: Any, rows: RowCopies) -> None:
    """Copy rows between two tensors of uint8 that the GPU of the target reaches, on torch's current stream."""
    torch: Any = import_module("torch")
    gpu = target.device
    at, to = (torch.from_numpy(numbers).to(gpu, non_blocking=True) for numbers in (rows.sources, rows.targets))
    as_rows(target, rows.nbytes).index_copy_(0, to, as_rows(source, rows.nbytes).index_select(0, at))


def copy_pieces(memory: Any, columns: Any) -> None:
    """Copy pieces within a tensor of uint8, and wait for the end. `columns`: sources, targets and lengths, `[3, N]` of
    uint64. On a GPU in a stream of its own: what the pieces are read from has been written, and waited for."""
    if memory.is_cuda:
        torch: Any = import_module("torch")
        driver.attach(memory.device.index)
        stream = _stream(memory.device.index)
        with torch.cuda.stream(stream):
            for rows in rows_of(*columns):
                copy_rows(memory, memory, rows)
        stream.synchronize()
        return
    for rows in rows_of(*columns):
        copy_rows(memory, memory, rows)


@cache
def _stream(gpu: int) -> Any:
    torch: Any = import_module("torch")
    return torch.cuda.Stream(gpu)


def gather_rows(source: Any, target: Any, rows: RowCopies) -> None:
    """Copy rows to the beginning of a tensor, one behind the other."""
    torch: Any = import_module("torch")
    at = torch.from_numpy(rows.sources).to(target.device, non_blocking=True)
    out = as_rows(target, rows.nbytes)[: len(rows.sources)]
    torch.index_select(as_rows(source, rows.nbytes), 0, at, out=out)


def as_rows(memory: Any, nbytes: int) -> Any:
    """Return the tensor as rows, in the widest words that a row consists of; what is left at its end is left out."""
    torch: Any = import_module("torch")
    aligned = memory.data_ptr() | nbytes
    width = next(size for size in _WIDTHS if aligned % size == 0)
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    whole = len(memory) // nbytes * nbytes
    return memory[:whole].view(dtype).view(-1, nbytes // width)

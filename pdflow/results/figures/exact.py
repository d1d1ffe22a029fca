"""Sums and order statistics of millions of integers, without a rounding error and in bounded memory.

A result file must have the same bytes however its samples were grouped (engines log single steps or rows of many) and
whichever order a SIMD unit adds in. So sums are exact integers and percentiles are picked, not estimated. Knows
nothing of requests or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Chunk: TypeAlias = tuple[Ints, Ints]
"""(values, weights), both int64, values not negative, weights from 1 to 65,535."""

_LIMB_BITS = 14
_FLOAT_BITS = 53
_BUCKETS = 1 << 16
_GATHER_AT_MOST = 1 << 20


@attrs.frozen
class Moments:
    """The size, the sum and the sum of squares of a weighted multiset of integers."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def scaled_variance(self) -> int:
        """The variance times count squared: exact, and never below zero."""
        return self.count * self.squares - self.total * self.total


def moments(values: Ints, weights: Ints | None = None) -> Moments:
    """Exact moments through matrix products of 14-bit limbs, short enough that float64 holds every partial sum."""
    if not len(values):
        return Moments()
    limbs = max(1, -(-int(values.max()).bit_length() // _LIMB_BITS))
    heaviest = 1 if weights is None else int(weights.max())
    at_once = 1 << max(0, _FLOAT_BITS - 2 * _LIMB_BITS - heaviest.bit_length())
    shifts = np.arange(limbs, dtype=np.int64)[:, None] * _LIMB_BITS
    count = total = squares = 0
    for begin in range(0, len(values), min(at_once, _BUCKETS)):
        chunk = slice(begin, begin + min(at_once, _BUCKETS))
        digits = ((values[chunk] >> shifts) & ((1 << _LIMB_BITS) - 1)).astype(np.float64)
        weighted = digits if weights is None else digits * weights[chunk]
        count += digits.shape[1] if weights is None else int(weights[chunk].sum())
        for row, limb_sum in enumerate(weighted.sum(axis=1).tolist()):
            total += int(limb_sum) << (_LIMB_BITS * row)
        for row, products in enumerate((weighted @ digits.T).tolist()):
            for column, product in enumerate(products):
                squares += int(product) << (_LIMB_BITS * (row + column))
    return Moments(count, total, squares)


def nearest_rank(percent: float, samples: int) -> int:
    """Return the index of the smallest sample that this share of them, in %, does not exceed. `percent` is taken as it
    is written: 99.9 is not its nearest binary fraction."""
    return max(-int(-Fraction(str(percent)) * samples // 100), 1) - 1


def at_ranks(
    chunks: Callable[[], Iterable[Chunk]], bounds: tuple[int, int], mass: int, ranks: Sequence[int]
) -> dict[int, int]:
    """Return the values at these ranks (0 is the smallest) of the multiset that `chunks()` yields, as {rank: value}.

    `bounds` are the least and the greatest value, `mass` the sum of the weights. Reads the chunks twice: a histogram
    finds the buckets that hold the ranks, a second pass gathers and sorts those buckets alone. Only if they hold more
    than a million samples (a far outlier has made the buckets coarse) is each of them searched again by itself.
    """
    low, high = bounds
    if mass <= _GATHER_AT_MOST:
        return _pick(_within(chunks(), low, high), dict.fromkeys(ranks, 0), {rank: rank for rank in ranks})
    shift = max(0, (high - low).bit_length() - 16)
    histogram = np.zeros(_BUCKETS, dtype=np.int64)
    for values, weights in _within(chunks(), low, high):
        histogram += np.bincount((values - low) >> shift, weights, _BUCKETS).astype(np.int64)
    below = np.cumsum(histogram)
    bucket_of = {rank: int(np.searchsorted(below, rank, side="right")) for rank in ranks}
    if shift == 0:
        return {rank: low + bucket for rank, bucket in bucket_of.items()}
    needed = np.zeros(_BUCKETS, dtype=np.bool_)
    needed[list(bucket_of.values())] = True
    before = {rank: int(below[bucket] - histogram[bucket]) for rank, bucket in bucket_of.items()}
    if int(histogram[needed].sum()) > _GATHER_AT_MOST:
        found: dict[int, int] = {}
        for bucket in sorted(set(bucket_of.values())):
            inside = {rank - before[rank]: rank for rank in ranks if bucket_of[rank] == bucket}
            edges = (low + (bucket << shift), min(high, low + ((bucket + 1) << shift) - 1))
            picked = at_ranks(chunks, edges, int(histogram[bucket]), list(inside))
            found.update({inside[rank]: value for rank, value in picked.items()})
        return found
    kept_below = np.cumsum(np.where(needed, histogram, 0))
    offsets = {rank: int(kept_below[bucket] - histogram[bucket]) for rank, bucket in bucket_of.items()}
    kept = (
        (values[mask], weights[mask])
        for values, weights in _within(chunks(), low, high)
        for mask in (needed[(values - low) >> shift],)
    )
    return _pick(kept, offsets, {rank: rank - before[rank] for rank in ranks})


def _within(chunks: Iterable[Chunk], low: int, high: int) -> Iterator[Chunk]:
    for values, weights in chunks:
        inside = (values >= low) & (values <= high)
        yield (values, weights) if inside.all() else (values[inside], weights[inside])


def _pick(kept: Iterable[Chunk], offsets: dict[int, int], ranks: dict[int, int]) -> dict[int, int]:
    """Sort what was kept; `ranks[r]` counts from the start of r's bucket, which starts at `offsets[r]` of the kept."""
    pairs = list(kept)
    values, weights = np.concatenate([v for v, _ in pairs]), np.concatenate([w for _, w in pairs])
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weights[order])
    return {
        rank: int(values[order[np.searchsorted(upto, offsets[rank] + inner, side="right")]])
        for rank, inner in ranks.items()
    }

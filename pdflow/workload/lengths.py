"""The lengths of prompts and answers: distributions as functions of a uniform number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import exp

from pdflow.workload.rng import Stream, standard_normal


class Quantiles:
    """A distribution given by its values at some levels from 0 to 1, straight lines between them."""

    __slots__ = ("_base", "_last", "_rise", "levels", "values")

    def __init__(self, levels: Sequence[float], values: Sequence[float]) -> None:
        if len(levels) != len(values) or len(levels) < 2 or levels[0] != 0.0 or levels[-1] != 1.0:
            raise ValueError("quantiles: expected one value for each level, and levels from 0 to 1")
        if any(a >= b for a, b in pairwise(levels)):
            raise ValueError("the levels of quantiles must increase")
        if any(a > b for a, b in pairwise(values)):
            raise ValueError("the values of quantiles must not decrease")
        self.levels = tuple(levels)
        self.values = tuple(values)
        segments = zip(pairwise(levels), pairwise(values), strict=True)
        lines = [(low - (high - low) / (b - a) * a, (high - low) / (b - a)) for (a, b), (low, high) in segments]
        # value = base + rise * u on each segment; a table of 256 starting points spares the bisection
        self._base = [base for base, _ in lines]
        self._rise = [rise for _, rise in lines]
        self._last = [max(i for i in range(len(lines)) if levels[i] <= slot / 256) for slot in range(256)]

    def at(self, u: float) -> float:
        """Return the value below which a share `u` of the distribution lies, 0 < u < 1."""
        levels, segment = self.levels, self._last[int(u * 256)]
        while levels[segment + 1] < u:
            segment += 1
        return self._base[segment] + self._rise[segment] * u

    @property
    def mean(self) -> float:
        """Return the mean of the distribution."""
        segments = zip(pairwise(self.levels), pairwise(self.values), strict=True)
        return sum((b - a) * (low + high) / 2 for (a, b), (low, high) in segments)


def uniform(low: int, high: int, stream: Stream) -> Callable[[], int]:
    """Return a function that draws whole numbers from low to high, both included. A single value uses no random
    numbers."""
    if low == high:
        return lambda: low
    span, below = high - low + 1, stream.below
    return lambda: low + below(span)


def lognormal(median: float, sigma: float, low: int, high: int, stream: Stream) -> Callable[[], int]:
    """Return a function that draws whole numbers whose logarithm is normal, clamped to low and high."""
    top = high / median  # Beyond it nothing need be computed, which might be too large to be.

    def draw() -> int:
        factor = exp(min(sigma * standard_normal(stream), 700.0))
        return high if factor >= top else max(low, round(median * factor))

    return draw


def empirical(tokens: Sequence[int], weights: Sequence[float], stream: Stream) -> Callable[[], int]:
    """Return a function that draws one of these lengths by weight, or equally likely without weights."""
    if not weights:
        below, number = stream.below, len(tokens)
        return lambda: tokens[below(number)]
    kept = [(length, weight) for length, weight in zip(tokens, weights, strict=True) if weight > 0]
    lengths, ends = [length for length, _ in kept], list(accumulate(weight for _, weight in kept))
    total, uniform_ = ends[-1], stream.uniform
    return lambda: lengths[min(bisect_right(ends, uniform_() * total), len(lengths) - 1)]

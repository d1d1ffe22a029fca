"""The distribution of one quantity over requests or tokens: mean, deviation and percentiles, in milliseconds.

Computed as `vllm bench serve` does with numpy (population deviation, percentiles linear between the two nearest
samples), but from exact integers, so that the bytes do not depend on the order of the samples. Of nothing, every
figure is 0, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures.exact import Chunk, Ints, Moments, at_ranks, moments, nearest_rank
from pdflow.results.steps import Steps

NS_PER_MS = 1_000_000
PS_PER_MS = 1_000_000_000
Percent: TypeAlias = int | Fraction
QUOTED = (50, 90, 99)
"""The percentiles that a spread names."""


@attrs.frozen
class Spread:
    """The mean, deviation and percentiles of `count` samples; the median is `p50_ms`."""

    count: int = 0
    mean_ms: float = 0.0
    std_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, in order."""
        return attrs.asdict(self)


def of_ints(values: Ints, per_ms: int = NS_PER_MS) -> Spread:
    """Return the spread of whole numbers not below 0; `per_ms` of their unit make a millisecond."""
    if not len(values):
        return Spread()
    ordered = np.sort(values)
    at = {rank: int(ordered[rank]) for rank in _ranks_for(len(ordered))}
    return _exact(moments(ordered), at, int(ordered[-1]), per_ms)


def of_floats(values: npt.NDArray[np.float64], per_ms: int = NS_PER_MS) -> Spread:
    """Return the spread of fractions (TPOT is one); sums are exactly rounded."""
    count = len(values)
    if not count:
        return Spread()
    ordered = np.sort(values)
    samples: list[float] = ordered.tolist()
    mean = math.fsum(samples) / count
    std = math.sqrt(math.fsum(np.square(ordered - mean).tolist()) / count)
    p50, p90, p99 = _between(samples, QUOTED)
    return Spread(count, mean / per_ms, std / per_ms, p50 / per_ms, p90 / per_ms, p99 / per_ms, samples[-1] / per_ms)


def percentiles(values: Ints | npt.NDArray[np.float64], percents: Sequence[Percent]) -> list[float]:
    """Return any percentiles, in the samples' unit; none if there are no samples."""
    ordered: list[float] = np.sort(values).tolist()
    return _between(ordered, percents) if ordered else []


def of_steps(logs: Sequence[Steps]) -> Spread:
    """Return the spread of inter-token latency over every output token but the first of each request."""

    bounds = _bounds_ps(logs)
    if bounds is None:
        return Spread()
    chunks = partial(_chunks, logs)
    whole = sum((moments(values, weights) for values, weights in chunks()), Moments())
    at = at_ranks(chunks, bounds, whole.count, _ranks_for(whole.count))
    return _exact(whole, at, bounds[1], PS_PER_MS)


def step_percentile_ps(logs: Sequence[Steps], percent: float) -> int | None:
    """Return a percentile of inter-token latency, over the same tokens, by the nearest rank; None if there are none."""
    bounds = _bounds_ps(logs)
    if bounds is None:
        return None
    mass = sum(log.totals()[1] for log in logs)
    rank = nearest_rank(percent, mass)
    return at_ranks(partial(_chunks, logs), bounds, mass, [rank])[rank]


def _chunks(logs: Sequence[Steps]) -> Iterator[Chunk]:
    for log in logs:
        yield from log.chunks()


def _bounds_ps(logs: Sequence[Steps]) -> tuple[int, int] | None:
    """Return the shortest and the longest step of all logs that some token waited for."""
    bounds = [found for log in logs if (found := log.bounds_ps()) is not None]
    return (min(low for low, _ in bounds), max(high for _, high in bounds)) if bounds else None


def _between(samples: Sequence[float], percents: Sequence[Percent]) -> list[float]:
    positions = _positions(len(samples), percents)
    return [samples[rank] + (samples[upper] - samples[rank]) * float(rest / 100) for rank, upper, rest in positions]


def _positions(count: int, percents: Sequence[Percent] = QUOTED) -> Iterator[tuple[int, int, Percent]]:
    """Yield for each percentile the rank of the sample at or below, of the one above, and the hundredths between."""
    for percent in percents:
        rank, rest = divmod(percent * (count - 1), 100)
        yield rank, min(rank + 1, count - 1), rest


def _ranks_for(count: int) -> list[int]:
    return sorted({rank for below, above, _ in _positions(count) for rank in (below, above)})


def _exact(whole: Moments, at: dict[int, int], greatest: int, per_ms: int) -> Spread:
    """Make a Spread of exact sums, with a single correctly rounded division at the end of each figure."""
    p50, p90, p99 = (
        float((at[rank] * (100 - rest) + at[upper] * rest) / (100 * per_ms))
        for rank, upper, rest in _positions(whole.count)
    )
    std = math.sqrt(whole.scaled_variance) / (whole.count * per_ms)
    return Spread(whole.count, whole.total / (whole.count * per_ms), std, p50, p90, p99, greatest / per_ms)

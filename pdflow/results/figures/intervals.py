"""Confidence intervals of figures: Student's interval of a mean over runs, and resampling within a run.

Requests of one run are not independent: one long queue makes a thousand of them slow together. So what is resampled
is not requests but blocks of consecutive ones, as in the method of batch means (Law, Simulation Modeling and Analysis,
section 9.5), with the percentile bootstrap over the blocks (Efron and Tibshirani 1993, section 13.3). Two runs that
served the same requests are resampled together, so that what all of the traffic does to both cancels out.

Such an interval says how much the figure would move had another stretch of the same traffic been measured. It knows
nothing of other seeds' rare events, or of how wrong the cost model is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.workload.rng import Rng

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 1000
MOST_BLOCKS: Final = 50
"""Enough for a distribution over blocks, few enough that one block outlasts most queues."""
FEWEST_BLOCKS: Final = 10
"""The fewest blocks that an interval is computed over."""
PERCENTS: Final = (50, 90, 99)

# fmt: off
_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
"""The 97.5 % quantile of Student's t with 1, 2, ... 30 degrees of freedom; any book of tables."""


@attrs.frozen
class Interval:
    """A confidence interval, from low to high."""

    low: float
    high: float


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: tabulated to 30 degrees of freedom, then from the normal one.

    The expansion is Abramowitz and Stegun 26.7.5 to its third term, right to the three decimals of the table.
    """
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def of_mean(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the mean of independent, roughly normal values; None of fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile(count - 1) * deviation / math.sqrt(count)
    return Interval(mean - half, mean + half)


def of_difference(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Return the interval of the second mean less the first, both of independent runs: Welch's, with Satterthwaite's
    degrees of freedom rounded down. None where one side is a single run."""
    if len(before) < 2 or len(after) < 2:
        return None
    means = [math.fsum(values) / len(values) for values in (before, after)]
    less = [len(values) - 1 for values in (before, after)]
    squared_errors = [
        math.fsum((value - mean) ** 2 for value in values) / freedom / len(values)
        for values, mean, freedom in zip((before, after), means, less, strict=True)
    ]
    change, variance = means[1] - means[0], sum(squared_errors)
    if not variance:
        return Interval(change, change)
    freedom = variance**2 / sum(
        squared_error**2 / each for squared_error, each in zip(squared_errors, less, strict=True)
    )
    half = t_quantile(max(1, math.floor(freedom + 1e-9))) * math.sqrt(variance)
    return Interval(change - half, change + half)


def resampled_blocks(requests: int, name: str) -> Counts:
    """Draw how often each resample takes each block, shape [RESAMPLES, blocks]. The same name gives the same draws."""
    blocks = min(requests, MOST_BLOCKS)
    below = Rng(0).stream(f"bootstrap/{name}").below
    drawn = np.array([below(blocks) for _ in range(RESAMPLES * blocks)], dtype=np.int64).reshape(RESAMPLES, blocks)
    drawn += np.arange(RESAMPLES)[:, None] * blocks
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * blocks).reshape(RESAMPLES, blocks)


def means(values: Floats, taken: Counts) -> Floats:
    """Return the mean in each resample. NaN in `values` is a request that does not count; the mean of none is NaN."""
    blocks = taken.shape[1]
    block, counts = _block_of(len(values), blocks), ~np.isnan(values)
    sums = np.bincount(block[counts], values[counts], blocks)
    sizes = np.bincount(block[counts], minlength=blocks)
    with np.errstate(invalid="ignore"):
        found: Floats = (taken * sums).sum(axis=1) / (taken * sizes).sum(axis=1)
    return found


def percentiles(values: Floats, taken: Counts) -> Floats:
    """Return PERCENTS in each resample, shape [RESAMPLES, len(PERCENTS)], linear between two samples as in `spread`."""
    found = np.full((len(taken), len(PERCENTS)), np.nan)
    counts = ~np.isnan(values)
    kept, block = values[counts], _block_of(len(values), taken.shape[1])[counts]
    order = np.argsort(kept, kind="stable")
    ordered, block = kept[order], block[order]
    for row, weights in enumerate(taken):
        upto = np.cumsum(weights[block])
        if not len(upto) or not upto[-1]:
            continue
        last = int(upto[-1]) - 1
        positions = np.array([percent * last / 100 for percent in PERCENTS])
        below = np.floor(positions)
        at = ordered[np.searchsorted(upto, below, side="right")]
        above = ordered[np.searchsorted(upto, np.minimum(below + 1, last), side="right")]
        found[row] = at + (above - at) * (positions - below)
    return found


def of_resamples(values: Floats) -> Interval | None:
    """Return the middle 95 % of the resamples' values, NaN left out."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(low, high)


def _block_of(requests: int, blocks: int) -> Counts:
    """Return the block of each request: consecutive requests together, in blocks as equal as possible."""
    return np.arange(requests, dtype=np.int64) * blocks // max(requests, 1)

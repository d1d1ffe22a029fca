"""The arrival process of a trace, as figures: rate, clock steps, batches, and the rate's variation on several scales.

Fitted is the index of dispersion of counts (variance / mean) on scales from 10 ms to hours, as far as the trace is ten
times as long. A rate whose levels are redrawn every w seconds has an autocovariance that falls from v to 0 over w;
window lengths and variances are those whose dispersion is nearest the trace's in least squares of logarithms. What is
more even than a Poisson process comes out as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from pdflow.protocol.values import S
from pdflow.workload.fitting.simplex import gamma_quantile, least

LEVELS = (
    *(0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85),
    *(0.9, 0.925, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 1.0),
)
"""The levels at which a distribution's values are kept."""
SCALES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0)
WINDOWS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0, 21600.0)
"""Windows of rate levels. Those of more than 600 s only if the trace has four of them."""
BATCH_S = 0.01
"""Arrivals nearer than this to one another may be of one batch."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def quantiles(values: Sequence[float] | Floats | Ints, digits: int = 0) -> list[float]:
    """Return a sample's values at LEVELS, rounded."""
    rounded = np.round(np.quantile(np.asarray(values, dtype=float), LEVELS), digits)
    return [float(value) if digits else int(value) for value in rounded]


def fit_arrivals(at_ns: Ints) -> dict[str, Any]:
    """Compute rate, step, batches and levels of arrivals that don't all come at once."""
    gaps = np.diff(at_ns)
    step_ns = clock_step_ns(gaps)
    span_ns = int(at_ns[-1] - at_ns[0]) + (step_ns or int(gaps.mean()))
    span, step_s = span_ns / S, step_ns / S
    rate = float(len(at_ns) / span)
    scales = [round(scale * S) for scale in SCALES_S if scale <= span / 10]
    if step_ns:  # whole steps, and bins that begin between two of them
        scales = sorted({max(1, round(scale / step_ns)) * step_ns for scale in scales})
        at_ns = at_ns + step_ns // 2
    measured = np.array([dispersion(at_ns, scale, span_ns) for scale in scales])
    # Arrivals within a few ms of one another are batches: geometric ones of continuation b have dispersion
    # (1 + b) / (1 - b), and the finest scale sees nothing else.
    batch = 0.0 if step_ns or not scales else max(0.0, float((measured[0] - 1) / (measured[0] + 1)))
    gaps_s = np.diff(at_ns / S)
    close = gaps_s[gaps_s < BATCH_S]
    batch = batch if batch > 0.05 and len(close) else 0.0
    levels = fit_levels(np.array(scales) / S, measured, rate, (1 + batch) / (1 - batch), step_s, span)
    return {
        "rate_rps": round(rate, 4) or rate,
        "step_ns": step_ns,
        "batch_probability": round(batch, 4),
        "batch_gap_s": quantiles(close, 6) if batch else [0.0] * len(LEVELS),
        "level": [
            {"window_s": window, "relative_rate": gamma_quantiles(variance)} for window, variance in levels if variance
        ],
    }


def clock_step_ns(gaps: Ints) -> int:
    """Return the trace's clock step, if most arrivals share an instant and the others are whole steps apart; else 0."""
    apart = gaps[gaps > 0]
    if (gaps == 0).mean() <= 0.5 or not len(apart):
        return 0
    step = int(np.sort(apart)[(len(apart) - 1) // 2])
    off = np.abs(apart / step - np.round(apart / step))
    return step if (off < 0.01).mean() > 0.9 else 0


def dispersion(at_ns: Ints, scale_ns: int, span_ns: int) -> float:
    """Return variance over mean of the counts in windows; only windows that are not empty take memory."""
    windows = span_ns // scale_ns
    window = at_ns // scale_ns
    counts = np.unique(window[window < windows], return_counts=True)[1].astype(float)
    mean = counts.sum() / windows
    variance = (((counts - mean) ** 2).sum() + (windows - len(counts)) * mean**2) / windows
    return float(variance / mean)


def fit_levels(
    scales: Floats, measured: Floats, rate: float, floor: float, step_s: float, span_s: float
) -> list[tuple[float, float]]:
    """Return (window, variance) of the two levels whose product has a dispersion nearest the measured one."""
    if not len(scales):
        return []
    best: tuple[float, list[tuple[float, float]]] = (np.inf, [])
    goal = np.log(np.maximum(measured, 1e-3))
    windows = [window for window in WINDOWS_S if window <= max(600.0, span_s / 4)]
    lags = (np.arange(400) + 0.5) / 400 * scales[:, None]
    for fast, slow in product(windows, windows):
        if fast >= slow or fast < step_s:
            continue
        shares = tuple(np.maximum(0, 1 - lags / window) for window in (fast, slow))

        def miss(logs: Floats, pair: tuple[Floats, ...] = shares) -> float:
            model = floor + rate * spread(scales, lags, pair, np.exp(logs))
            return float(np.sum((np.log(model) - goal) ** 2))

        found, missed = least(miss, np.log([0.05, 0.05]), -12.0, 1.5)
        if missed < best[0] - 1e-9:
            variances = [float(v) if v > 1e-4 else 0.0 for v in np.exp(found)]
            best = (missed, [(slow, variances[1]), (fast, variances[0])])
    return best[1]


def spread(scales: Floats, lags: Floats, shares: tuple[Floats, ...], variances: Floats) -> Floats:
    """Return the variance of the relative rate, averaged over each scale, times the scale; `shares` is what is left of
    each level's variance at each lag."""
    together = np.ones_like(lags)
    for share, variance in zip(shares, variances, strict=True):
        together *= 1 + variance * share
    averaged: Floats = 2 * np.mean((1 - lags / scales[:, None]) * (together - 1), axis=1) * scales
    return averaged


def gamma_quantiles(variance: float) -> list[float]:
    """Return quantiles of a gamma distribution of mean 1, cut at its 99.9 % point and scaled back to mean 1 as straight
    lines have it."""
    shape = 1 / variance
    values = np.array([gamma_quantile(shape, min(level, 0.999)) / shape for level in LEVELS])
    levels = np.array(LEVELS)
    mean = np.sum(np.diff(levels) * (values[1:] + values[:-1]) / 2)
    return [float(value) for value in np.round(values / mean, 5)]

"""Minimisation of a function of a few numbers, and quantiles of the gamma distribution, so that fitting needs no scipy.

Nelder and Mead (1965) with their coefficients, started and stopped as scipy's `minimize` does, so that figures that
were fitted with it stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Point: TypeAlias = npt.NDArray[np.float64]
TOLERANCE = 1e-4
"""Tolerance of point and value: the search ends when neither differs by more within the simplex."""


EVALUATIONS = 200
"""The most evaluations of the function per number that it takes; the search ends with the last of them."""


class _SpentError(Exception):
    """All evaluations have been made."""


def least(function: Callable[[Point], float], start: Point, low: float, high: float) -> tuple[Point, float]:
    """Return the minimum between bounds, as far as it can be found from `start`, and the function's value there."""
    size = len(start)
    left = EVALUATIONS * size

    def counted(point: Point) -> float:
        nonlocal left
        if not left:
            raise _SpentError
        left -= 1
        return function(point)

    corners = np.tile(np.clip(start, low, high), (size + 1, 1))
    for axis in range(size):
        corners[axis + 1, axis] = 1.05 * corners[0, axis] or 0.00025
    corners = np.clip(np.where(corners > high, 2 * high - corners, corners), low, high)
    values = np.array([counted(corner) for corner in corners])
    corners, values = _sorted(corners, values)
    with suppress(_SpentError):
        while max(np.abs(corners[1:] - corners[0]).max(), np.abs(values[1:] - values[0]).max()) > TOLERANCE:
            if not _replace_worst(counted, corners, values, low, high):
                for row in range(1, size + 1):
                    corners[row] = np.clip(corners[0] + 0.5 * (corners[row] - corners[0]), low, high)
                    values[row] = counted(corners[row])
            corners, values = _sorted(corners, values)
    corners, values = _sorted(corners, values)
    return corners[0], float(values[0])


def _replace_worst(function: Callable[[Point], float], corners: Point, values: Point, low: float, high: float) -> bool:
    """Reflect, stretch or pull in the worst corner; False if nothing of that is better."""
    centre, worst = corners[:-1].sum(axis=0) / (len(corners) - 1), corners[-1].copy()

    def at(step: float) -> tuple[Point, float]:
        point = np.clip((1 + step) * centre - step * worst, low, high)
        return point, function(point)

    mirrored, value = at(1.0)
    if value < values[0]:
        further, beyond = at(2.0)
        corners[-1], values[-1] = (further, beyond) if beyond < value else (mirrored, value)
        return True
    if value < values[-2]:
        corners[-1], values[-1] = mirrored, value
        return True
    outside = value < values[-1]
    nearer, inner = at(0.5 if outside else -0.5)
    if inner <= value if outside else inner < values[-1]:
        corners[-1], values[-1] = nearer, inner
        return True
    return False


def _sorted(corners: Point, values: Point) -> tuple[Point, Point]:
    order = np.argsort(values)
    return corners[order], values[order]


def gamma_quantile(shape: float, level: float) -> float:
    """Return the value below which a share `level` of a gamma distribution of that shape and of scale 1 lies."""
    if level <= 0.0:
        return 0.0
    low, high = 0.0, shape + 1.0
    while _gamma_share(shape, high) < level:
        high *= 2.0
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _gamma_share(shape, middle) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _gamma_share(shape: float, x: float) -> float:
    """Compute the regularised incomplete gamma function P: by series, beyond the mean by continued fraction (Lentz)."""
    if x <= 0.0:
        return 0.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        term = total = 1.0 / shape
        above = shape
        while term > total * 1e-17:
            above += 1.0
            term *= x / above
            total += term
        return scale * total
    b = x + 1.0 - shape
    c, d = 1e300, 1.0 / b
    fraction, k = d, 0
    while True:
        k += 1
        a = k * (shape - k)
        b += 2.0
        d = 1.0 / (a * d + b or 1e-300)
        c = b + a / c or 1e-300
        fraction *= d * c
        if abs(d * c - 1.0) < 1e-16:
            return 1.0 - scale * fraction

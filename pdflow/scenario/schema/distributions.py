"""The distributions that a scenario can name: of lengths in tokens, times in seconds, numbers of turns.


How each is drawn is `pdflow/workload/draws.py`.
"""

from __future__ import annotations

from math import inf
from typing import TypeAlias

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, DELAY, NOT_EMPTY, POSITIVE, SCALE, SHAPE, TURNS, field_doc


@attrs.frozen(kw_only=True)
class FixedLength:
    """Every request has the same length. A plain integer means this distribution."""

    tokens: int = field(metadata=field_doc("length in tokens", AT_LEAST_ONE))

    @property
    def low(self) -> int:
        """The least length that can be drawn."""
        return self.tokens

    @property
    def high(self) -> int:
        """The greatest length that can be drawn."""
        return self.tokens


@attrs.frozen(kw_only=True)
class UniformLength:
    """Whole numbers from low to high, both included, with equal probability."""

    low: int = field(metadata=field_doc("shortest length in tokens", AT_LEAST_ONE))
    high: int = field(metadata=field_doc("longest length in tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class LognormalLength:
    """Lognormal lengths (many short, a few very long), clipped to low and high."""

    median: float = field(metadata=field_doc("median length in tokens", POSITIVE))
    sigma: float = field(
        metadata=field_doc("standard deviation of the logarithm; with 1 the p95 is 5.2 times the median", SHAPE)
    )
    low: int = field(default=1, metadata=field_doc("shortest length in tokens", AT_LEAST_ONE))
    high: int = field(metadata=field_doc("longest length in tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class EmpiricalLength:
    """Lengths drawn from a list of observed ones."""

    tokens: tuple[int, ...] = field(
        metadata=field_doc("the observed lengths, such as the values of a histogram", NOT_EMPTY)
    )
    weights: tuple[float, ...] = field(
        default=(), metadata=field_doc("relative frequency of each value; default: all equal")
    )

    def __attrs_post_init__(self) -> None:
        _check_histogram("tokens", self.tokens, self.weights)

    @property
    def low(self) -> int:
        """The least length that can be drawn."""
        return min(self.tokens)

    @property
    def high(self) -> int:
        """The greatest length that can be drawn."""
        return max(self.tokens)


Length: TypeAlias = FixedLength | UniformLength | LognormalLength | EmpiricalLength


@attrs.frozen(kw_only=True)
class FixedTime:
    """Always the same time. A plain number means this distribution."""

    time_s: float = field(metadata=field_doc("the time", DELAY))


@attrs.frozen(kw_only=True)
class UniformTime:
    """Times from low_s to high_s with equal probability."""

    low_s: float = field(metadata=field_doc("shortest time", DELAY))
    high_s: float = field(metadata=field_doc("longest time", DELAY))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low_s, self.high_s, "_s")


@attrs.frozen(kw_only=True)
class ExponentialTime:
    """Exponentially distributed times."""

    mean_s: float = field(metadata=field_doc("mean time", SCALE))


@attrs.frozen(kw_only=True)
class LognormalTime:
    """Lognormal times (many short, a few very long), clipped to low_s and high_s."""

    median_s: float = field(metadata=field_doc("median time", SCALE))
    sigma: float = field(
        metadata=field_doc("standard deviation of the logarithm; with 1 the p95 is 5.2 times the median", SHAPE)
    )
    low_s: float = field(default=0.0, metadata=field_doc("shortest time", DELAY))
    high_s: float = field(metadata=field_doc("longest time", DELAY))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low_s, self.high_s, "_s")


Time: TypeAlias = FixedTime | UniformTime | ExponentialTime | LognormalTime


@attrs.frozen(kw_only=True)
class FixedTurns:
    """Every session has the same number of turns. A plain integer means this distribution."""

    turns: int = field(metadata=field_doc("number of turns", TURNS))

    @property
    def high(self) -> int:
        """The greatest number that can be drawn."""
        return self.turns


@attrs.frozen(kw_only=True)
class UniformTurns:
    """From low to high turns, both included, with equal probability."""

    low: int = field(metadata=field_doc("smallest number of turns", TURNS))
    high: int = field(metadata=field_doc("largest number of turns, included", TURNS))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class GeometricTurns:
    """After each turn the session continues with the same probability, up to high turns."""

    mean: float = field(metadata=field_doc("mean number of turns, before the limit high applies", TURNS))
    high: int = field(metadata=field_doc("largest number of turns", TURNS))


@attrs.frozen(kw_only=True)
class EmpiricalTurns:
    """Numbers of turns drawn from a list of observed ones."""

    turns: tuple[int, ...] = field(
        metadata=field_doc("the observed numbers of turns, such as the values of a histogram", NOT_EMPTY)
    )
    weights: tuple[float, ...] = field(
        default=(), metadata=field_doc("relative frequency of each value; default: all equal")
    )

    def __attrs_post_init__(self) -> None:
        _check_histogram("turns", self.turns, self.weights)

    @property
    def high(self) -> int:
        """The greatest number that can be drawn."""
        return max(self.turns)


Turns: TypeAlias = FixedTurns | UniformTurns | GeometricTurns | EmpiricalTurns


def _in_order(low: float, high: float, unit: str = "") -> None:
    if low > high:
        raise ValueError(f"high{unit} is {high:g}, expected at least low{unit}, which is {low:g}")


def _check_histogram(name: str, values: tuple[int, ...], weights: tuple[float, ...]) -> None:
    if any(value < 1 for value in values):
        raise ValueError(f"{name} contains {min(values)}, expected numbers of at least 1")
    if weights and len(weights) != len(values):
        raise ValueError(f"weights has {len(weights)} numbers, expected one for each of {len(values)} {name}")
    if weights and (min(weights) < 0 or not 0 < sum(weights) < inf):
        raise ValueError("weights: expected numbers of at least 0 that are not all 0")

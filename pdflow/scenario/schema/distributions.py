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
    """Every request has the same length. A bare integer in the file means this."""

    tokens: int = field(metadata=field_doc("tokens", AT_LEAST_ONE))

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
    """Whole numbers from low to high, both included, equally likely."""

    low: int = field(metadata=field_doc("least tokens", AT_LEAST_ONE))
    high: int = field(metadata=field_doc("most tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class LognormalLength:
    """Lengths whose logarithm is normal, many short and a few very long ones, cut off at low and high."""

    median: float = field(metadata=field_doc("half of all lengths are below it", POSITIVE))
    sigma: float = field(metadata=field_doc("standard deviation of the logarithm: 1 has a p95 of 5.2 medians", SHAPE))
    low: int = field(default=1, metadata=field_doc("least tokens", AT_LEAST_ONE))
    high: int = field(metadata=field_doc("most tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class EmpiricalLength:
    """Lengths that have been seen, drawn again."""

    tokens: tuple[int, ...] = field(metadata=field_doc("the lengths, such as a histogram's", NOT_EMPTY))
    weights: tuple[float, ...] = field(default=(), metadata=field_doc("how often each comes; equally often if absent"))

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
    """Always the same time. A bare number in the file means this."""

    time_s: float = field(metadata=field_doc("how long", DELAY))


@attrs.frozen(kw_only=True)
class UniformTime:
    """Any time from low_s to high_s, equally likely."""

    low_s: float = field(metadata=field_doc("the least", DELAY))
    high_s: float = field(metadata=field_doc("the most", DELAY))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low_s, self.high_s, "_s")


@attrs.frozen(kw_only=True)
class ExponentialTime:
    """Times without memory: what has passed says nothing of what is left."""

    mean_s: float = field(metadata=field_doc("the mean", SCALE))


@attrs.frozen(kw_only=True)
class LognormalTime:
    """Times whose logarithm is normal, many short and a few very long ones, cut off at low_s and high_s."""

    median_s: float = field(metadata=field_doc("half of all times are below it", SCALE))
    sigma: float = field(metadata=field_doc("standard deviation of the logarithm: 1 has a p95 of 5.2 medians", SHAPE))
    low_s: float = field(default=0.0, metadata=field_doc("the least", DELAY))
    high_s: float = field(metadata=field_doc("the most", DELAY))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low_s, self.high_s, "_s")


Time: TypeAlias = FixedTime | UniformTime | ExponentialTime | LognormalTime


@attrs.frozen(kw_only=True)
class FixedTurns:
    """Every session has as many turns. A bare integer in the file means this."""

    turns: int = field(metadata=field_doc("turns", TURNS))

    @property
    def high(self) -> int:
        """The greatest number that can be drawn."""
        return self.turns


@attrs.frozen(kw_only=True)
class UniformTurns:
    """From low to high turns, both included, equally likely."""

    low: int = field(metadata=field_doc("least turns", TURNS))
    high: int = field(metadata=field_doc("most turns, included", TURNS))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class GeometricTurns:
    """After each turn a session goes on with the same probability, up to high turns."""

    mean: float = field(metadata=field_doc("mean turns, but for the cut at high", TURNS))
    high: int = field(metadata=field_doc("most turns", TURNS))


@attrs.frozen(kw_only=True)
class EmpiricalTurns:
    """Numbers of turns that have been seen, drawn again."""

    turns: tuple[int, ...] = field(metadata=field_doc("the numbers, such as a histogram's", NOT_EMPTY))
    weights: tuple[float, ...] = field(default=(), metadata=field_doc("how often each comes; equally often if absent"))

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
        raise ValueError(f"{name} holds {min(values)}, expected numbers of at least 1")
    if weights and len(weights) != len(values):
        raise ValueError(f"weights has {len(weights)} numbers, expected one for each of {len(values)} {name}")
    if weights and (min(weights) < 0 or not 0 < sum(weights) < inf):
        raise ValueError("weights are expected to be at least 0, and not all 0")

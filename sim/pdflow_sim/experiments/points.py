"""The points that a sweep runs, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, TypeAlias

Point: TypeAlias = dict[str, Any]
"""Edits by dotted key, as `Scenario.with_` takes them."""


def points_of(asked: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return every combination of a grid's values, the last key changing fastest; or the points that are listed.

    Raises TypeError for values that are no list: the letters of a text are not what anybody means.
    """
    if not isinstance(asked, Mapping):
        points = list(asked)
        for point in points:
            if not isinstance(point, Mapping):
                raise TypeError(f"a point is {point!r}, expected edits by dotted key, as in {{'slo.ttft_ms': 500}}")
        return [dict(point) for point in points]
    for key, values in asked.items():
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise TypeError(f"{key} is {values!r}, expected a list of values, as in [{values!r}]")
    return [dict(zip(asked, values, strict=True)) for values in product(*asked.values())]

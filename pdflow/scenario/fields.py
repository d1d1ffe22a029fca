"""What a scenario key says of itself: one sentence, and the bounds of its value.

The converter, the JSON Schema and the documentation all read this, so that a bound stands in one place. Bounds are data,
not attrs validators: attrs runs those only once every field of a class has structured, and would hide the second error
behind the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Bound:
    """An interval of numbers, or a least length of a text or list; `finite` refuses inf (nan never passes)."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    min_length: int | None = None
    finite: bool = True

    def complaint(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if self.min_length is not None and len(value) < self.min_length:
            return "is empty, expected at least one character or element"
        if isinstance(value, float) and math.isnan(value):
            return "is not a number, expected " + self.expected()
        if isinstance(value, float) and math.isinf(value) and self.finite:
            return f"is {value}, expected " + self.expected()
        if not isinstance(value, (int, float)):
            return None
        low = (self.above is not None and value <= self.above) or (self.at_least is not None and value < self.at_least)
        high = self.at_most is not None and value > self.at_most
        return f"is {value}, expected " + self.expected() if low or high else None

    def expected(self) -> str:
        """The interval in words: "a number above 0 and at most 1"."""
        parts = []
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.at_least is not None:
            parts.append(f"of at least {self.at_least:g}")
        if self.at_most is not None:
            parts.append(f"at most {self.at_most:g}")
        return " and ".join(["a number " + parts[0], *parts[1:]]) if parts else "a finite number"


POSITIVE = Bound(above=0)
NOT_NEGATIVE = Bound(at_least=0)
AT_LEAST_ONE = Bound(at_least=1)
FRACTION = Bound(above=0, at_most=1)
RATE_OR_UNLIMITED = Bound(above=0, finite=False)
NOT_EMPTY = Bound(min_length=1)
FINITE = Bound()


def about(doc: str, bound: Bound | None = None, *, key: str | None = None, preset: bool = False) -> Mapping[str, Any]:
    """Metadata of an attrs field.

    `key` is the TOML key where it differs from the attribute's name (`from` is a Python keyword); `preset` marks a
    value that a preset supplies, which a file therefore need not.
    """
    return {"doc": doc, "bound": bound, "key": key, "preset": preset}


def key_of(field: attrs.Attribute[Any]) -> str:
    """The TOML key of an attrs field."""
    return field.metadata.get("key") or field.name

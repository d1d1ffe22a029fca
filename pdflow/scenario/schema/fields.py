"""The metadata of a scenario key: one sentence, and the bounds of its value.

The converter and the JSON Schema both read this, so that a bound stands in one place. Bounds are data, not attrs
validators: attrs runs those only once every field of a class has structured, and would hide the second error behind
the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class Bound:
    """An interval of numbers, or a least length of a text or list. Neither nan nor inf is in any."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    min_length: int | None = None

    def holds(self, value: Any) -> bool:
        """True if `value` is within; a value that is neither number nor sized is."""
        if self.min_length is not None:
            return len(value) >= self.min_length
        if not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def expected(self) -> str:
        """Return the interval in words: "a number above 0 and at most 1"."""
        if self.min_length is not None:
            return "a value that is not empty"
        bounds = []
        if self.above is not None:
            bounds.append(f"above {_plain(self.above)}")
        if self.at_least is not None:
            bounds.append(f"of at least {_plain(self.at_least)}")
        if self.at_most is not None:
            bounds.append(f"at most {_plain(self.at_most)}")
        return " and ".join(["a number " + bounds[0], *bounds[1:]]) if bounds else "a finite number"


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


WholeOrAuto: TypeAlias = int | Literal["auto"]
"""A number, or whatever follows from the rest of the scenario."""

POSITIVE = Bound(above=0)
NOT_NEGATIVE = Bound(at_least=0)
AT_LEAST_ONE = Bound(at_least=1)
FRACTION = Bound(above=0, at_most=1)
PERCENTAGE = Bound(above=0, at_most=100)
NOT_EMPTY = Bound(min_length=1)
DELAY = Bound(at_least=0, at_most=1e6)
"""Seconds. Beyond eleven days a few thousand of them in a row would leave the 64 bits of an instant."""
TIMER = Bound(at_least=1e-6, at_most=1e6)
"""Seconds of something that comes again and again: below a nanosecond it would never let the clock move on."""
SCALE = Bound(at_least=1e-6, at_most=1e6)
SHAPE = Bound(at_least=0.01, at_most=1000)
"""The shape of a distribution: beyond these bounds it is a point, or all but never anything."""
SPAN = Bound(at_least=1, at_most=1e9)
"""Seconds over which something swings."""
TURNS = Bound(at_least=1, at_most=1000)
"""Turns of one session, which is drawn as a whole."""
ENGINES = Bound(at_least=1, at_most=10_000)
NICS = Bound(at_least=1, at_most=64)
KV_TOKENS = Bound(at_least=1, at_most=1e9)
"""KV tokens of one engine; more than a billion are bytes mistaken for tokens."""


def field_doc(
    doc: str, bound: Bound | None = None, *, key: str | None = None, preset: bool = False, rate: bool = False
) -> Mapping[str, Any]:
    """Return the metadata of an attrs field.

    `key` is the TOML key where it differs from the attribute's name (`from` is a Python keyword); `preset` marks a
    value that a preset supplies, which a file therefore need not; `rate` a bandwidth, of which `inf` means unlimited
    and becomes None, and any other number whole bytes per second.
    """
    return {"doc": doc, "bound": bound, "key": key, "preset": preset, "rate": rate}


def key_of(field: attrs.Attribute[Any]) -> str:
    """Return the TOML key of an attrs field."""
    return field.metadata.get("key") or field.name


def seconds_to_ns(seconds: float) -> int:
    """Convert a duration in seconds to whole nanoseconds, rounded to the nearest."""
    return round(seconds * 1_000_000_000)

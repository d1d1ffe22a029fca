"""The quantities of a run that change over time and are in no record: rates of links, KV blocks that engines use.

Recorded only on request, change by change, in two integers each; `timeline` and the page read it.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple, TypeAlias

import attrs
import numpy as np

from pdflow.results.records import IntColumn

MOST: Final = 2**63 - 1
"""The greatest value of a column: any rate beyond is recorded as this."""

Changes: TypeAlias = tuple[IntColumn, IntColumn]
"""The instants in ns at which a quantity changes, and what it is from each of them on; 0 before the first."""


class TimeSeries:
    """A quantity over time, in whole numbers: each value holds from its instant, in ns, until the next."""

    __slots__ = ("instants", "values")

    def __init__(self) -> None:
        self.instants = array("q")
        self.values = array("q")

    def record(self, instant: int, value: int) -> None:
        """Record that the quantity is `value` from this instant on, not before the last one. 0 before the first."""
        instants, values = self.instants, self.values
        value = min(value, MOST)
        if instants and instants[-1] == instant:
            instants.pop()
            values.pop()
        if value != (values[-1] if values else 0):
            instants.append(instant)
            values.append(value)

    def curve(self) -> Changes:
        """Return the recorded changes."""
        return np.array(self.instants, dtype=np.int64), np.array(self.values, dtype=np.int64)


class LinkCourse(NamedTuple):
    """The bytes per second of one direction of a link, all its flows together."""

    name: str
    capacity_bytes_per_s: int
    rate: TimeSeries


@attrs.frozen
class Recording:
    """The recorded quantities of one run. Links without a limit have no rate."""

    links: tuple[LinkCourse, ...] = ()
    kv_blocks: dict[str, TimeSeries] = attrs.field(factory=dict)
    """By engine: the blocks of its pool that are not free."""

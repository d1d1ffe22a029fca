"""Random draws of a fault plan: when its faults begin and end, and which messages and operations they hit.

The numbers come from streams that are passed in, one for each fault, and for each engine of a fault that happens to
engines: another fault, or another engine, never moves those that were there before. A stream is drawn from once for
everything that it might hit, whatever else happens to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from pdflow.faults.plan import FaultTimes
from pdflow.protocol.values import Instant, S


class Numbers(Protocol):
    """A stream of random numbers."""

    def uniform(self) -> float:
        """Return a number strictly between 0 and 1."""
        ...

    def exponential(self, mean: float) -> float: ...

    def below(self, n: int) -> int: ...


Streams: TypeAlias = Callable[[str], Numbers]
"""Returns the stream of a name, from its beginning."""

Window: TypeAlias = tuple[Instant, Instant | None]
"""Begin and end of a time window, the end not included; None is for good."""


def windows(when: FaultTimes, numbers: Numbers) -> Iterator[Window]:
    """Yield the windows in which a fault acts, in order and without overlap; endless where it recurs.

    A rate is that of beginnings while the fault does not act.
    """
    begin = when.at_ns
    if when.rate_per_s is not None:
        while True:
            begin += max(1, round(numbers.exponential(S / when.rate_per_s)))
            yield _window(begin, when.for_ns)
            begin += when.for_ns or 0
    yield _window(begin, when.for_ns)
    while when.every_ns is not None:
        begin += when.every_ns
        yield _window(begin, when.for_ns)


def _window(begin: Instant, for_ns: int | None) -> Window:
    return begin, None if for_ns is None else begin + for_ns

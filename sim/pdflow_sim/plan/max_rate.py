"""The highest rate at which a design meets its service level, by bisection.

Many designs are searched together, in rounds of one probe each, so that all processes have work, and a design that is
sure to be far below the best of its kind is left where it is. The result lies between the last rate that met and the
first that did not, where the straight line between their scales (in logarithms) crosses 1: closer than the bracket,
and the same for two designs that differ by less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.probes import UNCHANGED, Change, Outcome, Probe, Prober

LEAST_SHARE: Final = 1 / 256
"""A design that meets its service level not even at this share of the first rate is taken to meet it at none."""
GREATEST_SHARE: Final = 4096.0
_MUCH_LOWER: Final = 1.8
_NO_NEARER: Final = 0.97
_FIRST_STEP: Final = 2.0
"""From the first rate to the next while nothing is known; a rate that failed at a scale that is known says more."""


@attrs.define
class RateSearch:
    """The search for the highest rate of one design with one seed. `tolerance` is the relative width to end with."""

    design: Design
    requests: int
    first_rate: float
    tolerance: float
    nth: int = 0
    change: Change = UNCHANGED
    first_step: float = _FIRST_STEP
    above: bool = False
    """Whether the search ends if the first rate does not meet: it is known that a lower one is not worth it."""
    met: tuple[float, float] | None = None
    """The highest rate that met so far, and its scale."""
    missed: tuple[float, float] | None = None
    """The lowest rate that did not."""
    dropped: bool = False
    """Ended early: too far below another."""
    error: str | None = None
    _misses: list[tuple[float, float]] = attrs.field(factory=list)
    """Every rate that missed, with its scale."""

    def next_probe(self) -> Probe | None:
        """Return the probe to run next, None at the end."""
        rate = None if self.dropped or self.error is not None else self._next_rate()
        return None if rate is None else Probe(self.design, rate, self.requests, self.nth, self.change)

    def _next_rate(self) -> float | None:
        if self.met is None and self.missed is None:
            return self.first_rate
        if self.missed is None:
            assert self.met is not None
            higher = self.met[0] * (1 + (self.first_step - 1) * self._steps(self.met[0] / self.first_rate))
            return higher if higher <= self.first_rate * GREATEST_SHARE else None
        if self.met is None:
            if self.above or self._hopeless:
                return None
            lower = self.missed[0] / (1 + (self.first_step - 1) * self._steps(self.first_rate / self.missed[0]))
            return lower if lower >= self.first_rate * LEAST_SHARE else None
        low, high = self.met[0], self.missed[0]
        return math.sqrt(low * high) if high > low * (1 + self.tolerance) else None

    def _steps(self, gone: float) -> float:
        """Return the factor on the first step: each is twice as long as the one before."""
        return max(1.0, 2.0 * math.log(gone) / math.log(self.first_step)) if gone > 1 else 1.0

    @property
    def _hopeless(self) -> bool:
        """Whether a much lower rate was hardly nearer to the service level: even an idle cluster misses it."""
        rate, scale = self.missed or (0.0, math.inf)
        return any(scale > _NO_NEARER * worse and rate < higher / _MUCH_LOWER for higher, worse in self._misses)

    def note(self, probe: Probe, outcome: Outcome) -> None:
        """Take in the outcome of a probe."""
        if outcome.error is not None:
            self.error = outcome.error
        elif outcome.meets:
            self.met = (probe.rate, outcome.scale)
        else:
            self._misses.append((probe.rate, outcome.scale))
            self.missed = (probe.rate, outcome.scale)

    @property
    def rate(self) -> float:
        """The highest rate, as far as it is known: 0 if none met."""
        if self.met is None:
            return 0.0
        low, scale = self.met
        if self.missed is None:
            return low
        high, worse = self.missed
        if not (scale > 0 and math.isfinite(worse)) or worse <= scale:
            return low
        crossing = min(1.0, max(0.0, -math.log(scale) / math.log(worse / scale)))
        return low * math.exp(crossing * math.log(high / low))

    @property
    def most(self) -> float:
        """A rate that the design cannot exceed, as far as is known."""
        return math.inf if self.missed is None else self.missed[0]


def search_together(
    prober: Prober,
    searches: Sequence[RateSearch],
    *,
    worth: Callable[[Design, float], float] = lambda design, rate: rate,
    drop_below: float = 0.0,
) -> None:
    """Carry on all searches to their end. `worth` is of a design at a rate, the higher the better; a search whose worth
    cannot reach `drop_below` of the best of the design's kind is dropped. Raises OutOfTimeError."""
    while True:
        active = [(search, probe) for search in searches if (probe := search.next_probe()) is not None]
        if not active:
            return
        for (search, probe), outcome in zip(active, prober.run([probe for _, probe in active]), strict=True):
            search.note(probe, outcome)
        if drop_below:
            best: dict[str, float] = {}
            for search in searches:
                reached = worth(search.design, search.met[0]) if search.met else 0.0
                best[search.design.kind] = max(best.get(search.design.kind, 0.0), reached)
            for search in searches:
                most = worth(search.design, search.most)
                search.dropped = search.dropped or most < drop_below * best[search.design.kind]

"""The highest rate at which a design meets its service level, by bisection.

Many designs are searched together, in rounds of one probe each, so that all processes have work, and a design that is
sure to be far below the best of its kind is left where it is. The result lies between the last rate that met and the
first that did not, where the straight line between their scales (in logarithms) crosses 1: closer than the bracket,
and the same for two designs that differ by less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import attrs

from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.probes import UNCHANGED, Change, DesignProbe, Prober, ProbeResult

LEAST_SHARE: Final = 1 / 256
"""A design that meets its service level not even at this share of the first rate is taken to meet it at none."""
GREATEST_SHARE: Final = 1024.0
"""At so many times the scenario's own rate the service level is taken to be no bound."""
_OVERLOADED: Final = 0.7
"""A run that completes less than this share of its rate was overloaded; its last answers take some of the rest."""
_MUCH_LOWER: Final = 1.8
_NO_NEARER: Final = 0.97
_LONGEST_STEP: Final = 4.0
_FIRST_STEP: Final = 2.0
"""From the first rate to the next while nothing is known; a rate that failed at a scale that is known says more."""


class Tried(NamedTuple):
    """A probe that was run, and its scale."""

    probe: DesignProbe
    scale: float

    @property
    def rate(self) -> float:
        """The rate that was tried."""
        return self.probe.rate


@attrs.define
class RateSearch:
    """The search for the highest rate of one design with one seed. `tolerance` is the relative width to end with.

    A run has `requests` requests, and more where they would arrive within a few times the time that an answer takes:
    a thousand requests at once fit into batches that a steady stream at that rate overflows.
    """

    design: Design
    requests: int
    first_rate: float
    tolerance: float
    nth: int = 0
    change: Change = UNCHANGED
    first_step: float = _FIRST_STEP
    above: bool = False
    """Whether the search ends if the first rate does not meet: it is known that a lower one is not worth it."""
    met: Tried | None = None
    """The highest rate that met so far."""
    missed: Tried | None = None
    """The lowest rate that did not."""
    dropped: bool = False
    """Ended early: too far below another."""
    error: str | None = None
    answer_s: float = 0.0
    """How long an answer took from its first token on in the last run."""
    served: float = 0.0
    """Requests per second that were completed in the last run."""
    _misses: list[Tried] = attrs.field(factory=list)

    def next_probe(self, prober: Prober) -> DesignProbe | None:
        """Return the probe to run next, None at the end."""
        rate = None if self.dropped or self.error is not None else self._next_rate()
        if rate is None:
            return None
        if rate > prober.traffic.rate * GREATEST_SHARE:
            return None
        requests = prober.enough_requests(rate, self.requests, self.answer_s)
        return DesignProbe(self.design, rate, requests, self.nth, self.change)

    def _next_rate(self) -> float | None:
        if self.met is None and self.missed is None:
            return self.first_rate
        if self.missed is None:
            assert self.met is not None
            return self.met.rate * self._step(self.met.rate / self.first_rate)
        if self.met is None:
            if self.above or self._hopeless:
                return None
            lower = self.missed.rate / self._step(self.first_rate / self.missed.rate)
            if 0 < self.served < _OVERLOADED * self.missed.rate:
                lower = min(lower, self.served)  # What it could do is about what it did.
            return lower if lower >= self.first_rate * LEAST_SHARE else None
        low, high = self.met.rate, self.missed.rate
        return math.sqrt(low * high) if high > low * (1 + self.tolerance) else None

    def _step(self, gone: float) -> float:
        """Return the factor to the next rate while nothing is known on one side: longer after each."""
        longer = max(1.0, 2.0 * math.log(gone) / math.log(self.first_step)) if gone > 1 else 1.0
        return min(1 + (self.first_step - 1) * longer, _LONGEST_STEP)

    @property
    def _hopeless(self) -> bool:
        """Whether a much lower rate was hardly nearer to the service level: even an idle cluster misses it. If all
        requests arrive at once, their times do not depend on the rate either, so that does not count."""
        missed = self.missed
        if missed is None or self.served < _OVERLOADED * missed.rate:
            return False
        return any(
            missed.scale > _NO_NEARER * worse.scale and missed.rate < worse.rate / _MUCH_LOWER for worse in self._misses
        )

    def note(self, probe: DesignProbe, outcome: ProbeResult) -> None:
        """Take in the outcome of a probe."""
        if outcome.error is not None:
            self.error = outcome.error
        elif outcome.meets:
            self.met = Tried(probe, outcome.scale)
        else:
            self.missed = Tried(probe, outcome.scale)
            self._misses.append(self.missed)
        self.answer_s = outcome.answer_s
        self.served = outcome.figures.get("requests_per_s") or 0.0
        if not outcome.meets and 0 < self.served < _OVERLOADED * probe.rate:
            self.first_rate = min(self.first_rate, self.served)

    @property
    def rate(self) -> float:
        """The highest rate, as far as it is known: 0 if none met."""
        if self.met is None:
            return 0.0
        low, scale = self.met.rate, self.met.scale
        if self.missed is None:
            return low
        high, worse = self.missed.rate, self.missed.scale
        if not (scale > 0 and math.isfinite(worse)) or worse <= scale:
            return low
        crossing = min(1.0, max(0.0, -math.log(scale) / math.log(worse / scale)))
        return low * math.exp(crossing * math.log(high / low))

    @property
    def most(self) -> float:
        """A rate that the design cannot exceed, as far as is known."""
        return math.inf if self.missed is None else self.missed.rate


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
        active = [(search, probe) for search in searches if (probe := search.next_probe(prober)) is not None]
        if not active:
            return
        try:
            prober.run([probe for _, probe in active])
        finally:
            # If the time is over, or Ctrl-C came, some of them have ended all the same.
            for search, probe in active:
                if probe in prober.outcomes:
                    search.note(probe, prober.outcomes[probe])
        if drop_below:
            best: dict[str, float] = {}
            for search in searches:
                reached = worth(search.design, search.met.rate) if search.met else 0.0
                best[search.design.kind] = max(best.get(search.design.kind, 0.0), reached)
            for search in searches:
                reach = worth(search.design, search.most)
                search.dropped = search.dropped or reach < drop_below * best[search.design.kind]


def search_seeds(
    prober: Prober, designs: Sequence[Design], *, requests: int, seeds: int, tolerance: float
) -> list[list[RateSearch]]:
    """Return the searches of each design with so many seeds, all of them to their ends."""
    searches = [
        [RateSearch(design, requests, prober.traffic.rate, tolerance, nth) for nth in range(seeds)]
        for design in designs
    ]
    search_together(prober, [search for of_design in searches for search in of_design])
    return searches

"""Goodput and attainment of the SLO, of all requests and of each class.

A request is good if it meets every bound of its class; a class that [slo.class] does not name has the bounds of [slo].
A request of one token meets any bound on TPOT and ITL. A bound on ITL is on a percentile of the request's own
inter-token latencies, by the nearest rank: with the 99th, at least 99 % of them are within it. Attainment is good
requests over all that ended, failed and cancelled ones too, for they did not get what the SLO promises; a request that
an interruption cut off has not ended and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.figures.spread import Spread
from pdflow.results.records import IntColumn
from pdflow.results.totals import NS_PER_S, share


class SloTargets(Protocol):
    """The bounds that a request must meet, None for no bound; a scenario's [slo] table is one."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def itl_ms(self) -> float | None: ...
    @property
    def itl_percentile(self) -> float: ...
    @property
    def e2e_ms(self) -> float | None: ...


def bounds_ms(
    slo: SloTargets | None, class_slos: Mapping[str, SloTargets], metric: Literal["ttft", "tpot", "itl"]
) -> list[tuple[str, float]]:
    """Return the bounds on a latency, each with a label: that of [slo], then those of classes that have their own."""
    named = [("SLO", slo), *((f"SLO of {name}", bounds) for name, bounds in class_slos.items())]
    found = [(label, getattr(bounds, f"{metric}_ms")) for label, bounds in named if bounds is not None]
    return [(f"{label} {bound:g} ms", bound) for label, bound in found if bound is not None]


@attrs.frozen(kw_only=True)
class SloMetrics:
    """The goodput and attainment of one SLO. `by_metric` has the share that meets each of its bounds alone."""

    good: int
    goodput_rps: float
    attainment: float
    by_metric: dict[str, float]


@attrs.frozen(kw_only=True)
class ClassMetrics:
    """The figures of one class of requests. Latencies are those of completed requests."""

    requests: int
    completed: int
    ttft: Spread
    tpot: Spread
    e2e: Spread
    bounds: SloTargets | None
    slo: SloMetrics | None
    """None if the class has no bounds."""


@attrs.frozen(kw_only=True, eq=False)
class Served:
    """The completed requests, column by column."""

    arrival: IntColumn
    first: IntColumn
    last: IntColumn
    output: IntColumn
    itl: IntColumn | None = None
    """The percentile of its inter-token latencies that the SLO of each bounds; None if none has a bound."""
    stalled: IntColumn | None = None
    """The sum of those beyond the bound; None as well."""

    def of(self, chosen: npt.NDArray[np.bool_]) -> Served:
        """Return the requests that `chosen` selects."""
        return Served(
            arrival=self.arrival[chosen],
            first=self.first[chosen],
            last=self.last[chosen],
            output=self.output[chosen],
            itl=None if self.itl is None else self.itl[chosen],
            stalled=None if self.stalled is None else self.stalled[chosen],
        )

    @property
    def stalled_share(self) -> float | None:
        """The share of the time after their first token for which requests waited longer for a token than the SLO's
        bound; None if none has one."""
        return None if self.stalled is None else share(int(self.stalled.sum()), int((self.last - self.first).sum()))

    @property
    def tpot_ns(self) -> npt.NDArray[np.float64]:
        """The time per output token after the first, of requests with more than one."""
        many = self.output > 1
        return (self.last - self.first)[many] / (self.output[many] - 1)


NO_BOUND: Final = 2**62
"""Longer than any run, in ns and in ps."""
_UNITS: Final = {"ttft": 10**6, "tpot": 10**9, "itl": 10**6, "e2e": 10**6}
"""Units per ms in which each latency is compared: TPOT in ps, the others in ns."""


def evaluate_slo(
    slo: SloTargets | None,
    served: Served,
    ended: int,
    duration_ns: int,
    of_class: Sequence[SloTargets | None] = (),
    codes: IntColumn | None = None,
) -> SloMetrics | None:
    """Compute how far the bounds of `attained_by_metric` were met; None if there are none."""
    attained = attained_by_metric(slo, served, of_class, codes)
    if not attained:
        return None
    good = int(np.count_nonzero(np.logical_and.reduce(list(attained.values()))))
    return SloMetrics(
        good=good,
        goodput_rps=share(good * NS_PER_S, duration_ns),
        attainment=share(good, ended),
        by_metric={name: share(int(np.count_nonzero(those)), ended) for name, those in attained.items()},
    )


def attained_by_metric(
    slo: SloTargets | None,
    served: Served,
    of_class: Sequence[SloTargets | None] = (),
    codes: IntColumn | None = None,
) -> dict[str, npt.NDArray[np.bool_]]:
    """Return, for each metric that any request has a bound on, which requests meet theirs.

    With `codes`, request i is held against `of_class[codes[i]]`, else against `slo`. In whole picoseconds (int64 holds
    100 days of them): exact, with the bound itself still good.
    """
    bounds: dict[str, int | IntColumn] = {}
    for name, unit in _UNITS.items():
        each = [_whole(one, name, unit) for one in (of_class if codes is not None else [slo])]
        if any(bound != NO_BOUND for bound in each):
            bounds[name] = each[0] if codes is None else np.array(each, dtype=np.int64)[codes]
    return {name: _measured(name, served) <= bound for name, bound in bounds.items()}


def _measured(name: str, served: Served) -> IntColumn:
    if name == "ttft":
        return served.first - served.arrival
    if name == "e2e":
        return served.last - served.arrival
    if name == "itl":
        assert served.itl is not None, "inter-token latencies were not measured, though an SLO bounds them"
        return served.itl
    rounded_up: IntColumn = -((served.first - served.last) * 1_000 // np.maximum(served.output - 1, 1))
    return rounded_up


def _whole(slo: SloTargets | None, name: str, units_per_ms: int) -> int:
    milliseconds = None if slo is None else getattr(slo, f"{name}_ms")
    return NO_BOUND if milliseconds is None else whole(milliseconds, units_per_ms)


def whole(milliseconds: float, units_per_ms: int) -> int:
    """Convert a bound in ms, as written in the scenario (0.1 is a tenth, not its nearest binary fraction), to whole
    units."""
    return min(int(Fraction(str(milliseconds)) * units_per_ms), NO_BOUND - 1)


@attrs.frozen(eq=False)
class Classes:
    """The class of each request: `codes` are indices into `names`."""

    names: list[str]
    codes: IntColumn

    @staticmethod
    def of(column: Sequence[str], requests: int) -> Classes:
        """Return the classes in a column that may end before the last request; the rest are of the class without a
        name."""
        padded = [*column, *[""] * (requests - len(column))]
        names = sorted(set(padded))
        index_of = {name: index for index, name in enumerate(names)}
        return Classes(names, np.array([index_of[name] for name in padded], dtype=np.int64))

    def bounds(self, slo: SloTargets | None, class_slos: Mapping[str, SloTargets]) -> list[SloTargets | None]:
        """Return the bounds of each class."""
        return [class_slos.get(name, slo) for name in self.names]

    def metrics(
        self,
        bounds: Sequence[SloTargets | None],
        served: Served,
        done: npt.NDArray[np.bool_],
        over: npt.NDArray[np.bool_],
        duration_ns: int,
    ) -> dict[str, ClassMetrics]:
        """Compute the figures of each class. `done` and `over` say which requests were completed, and which ended."""
        found = {}
        for index, name in enumerate(self.names):
            mine = self.codes == index
            theirs = served.of(mine[done])
            found[name] = ClassMetrics(
                requests=int(np.count_nonzero(mine)),
                completed=len(theirs.arrival),
                ttft=spread.of_ints(theirs.first - theirs.arrival),
                tpot=spread.of_floats(theirs.tpot_ns),
                e2e=spread.of_ints(theirs.last - theirs.arrival),
                bounds=bounds[index],
                slo=evaluate_slo(bounds[index], theirs, int(np.count_nonzero(mine & over)), duration_ns),
            )
        return found

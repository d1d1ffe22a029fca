"""What a fault did to the requests that arrived after it: TTFT before and after, failures, and the time to recover.

A request is well served if it completed with a TTFT within the bound: the SLO's, or, without one, the 99th percentile
of TTFT before the fault. The time after a fault is divided into intervals of equal length. The cluster has recovered at
the end of the last one in which significantly more requests than before were not well served: more than chance explains
at three standard deviations.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.figures.slo import SloTargets
from pdflow.results.figures.spread import Spread
from pdflow.results.records import IntColumn, Records
from pdflow.results.totals import NS_PER_S, FaultTotals

WINDOW_NS: Final = 60 * NS_PER_S
"""How long before a fault and after it requests are compared."""
INTERVAL_REQUESTS: Final = 20
"""Requests of one interval, at the rate before the fault."""
MOST: Final = 100
"""Faults that are judged: the first ones."""


@attrs.frozen(kw_only=True)
class Aftermath:
    """One fault and the requests around it. TTFT is of completed requests."""

    fault: FaultTotals
    ttft_before: Spread
    ttft_after: Spread
    arrived: int
    """Requests that arrived in the window after it began."""
    failed: int
    """Of these, the ones that failed."""
    recovered_ns: int | None
    """Time from its beginning until requests were served as before; None: not before the next fault or the end of the
    run, or too few requests arrived before it."""


def aftermaths(
    records: Records, faults: Sequence[FaultTotals], slo: SloTargets | None, since_ns: int
) -> list[Aftermath]:
    """Judge each fault by the requests that arrived from `since_ns`, the warm-up's end, on."""
    if not faults:
        return []
    arrival = np.array(records.arrival_ns, dtype=np.int64)
    first = np.array(records.first_token_ns, dtype=np.int64)
    completed = np.array([outcome == "completed" for outcome in records.outcome])
    failed = np.array([outcome == "failed" for outcome in records.outcome])
    found = []
    for fault in faults[:MOST]:
        begin = fault.begin_ns
        later = [other.begin_ns for other in faults if other.begin_ns > begin]
        before = (arrival >= max(since_ns, begin - WINDOW_NS)) & (arrival < begin)
        after = (arrival >= begin) & (arrival < begin + WINDOW_NS)
        ttft_before = spread.of_ints((first - arrival)[before & completed])
        bound_ms = slo.ttft_ms if slo is not None and slo.ttft_ms is not None else ttft_before.p99_ms
        well = completed & (first - arrival <= bound_ms * 1e6)
        until = min(later, default=int(arrival.max()) + 1) if len(arrival) else begin
        found.append(
            Aftermath(
                fault=fault,
                ttft_before=ttft_before,
                ttft_after=spread.of_ints((first - arrival)[after & completed]),
                arrived=int(after.sum()),
                failed=int((after & failed).sum()),
                recovered_ns=_recovered_ns(arrival, well, before, begin, until),
            )
        )
    return found


def _recovered_ns(
    arrival: IntColumn, well: npt.NDArray[np.bool_], before: npt.NDArray[np.bool_], begin: int, until: int
) -> int | None:
    """Return the end of the last interval in which requests were served worse than before, since `begin`."""
    number = int(before.sum())
    if number < INTERVAL_REQUESTS or until <= begin:
        return None
    missed = 1 - float(well[before].mean())
    length = max(1, int(begin - arrival[before].min()) * INTERVAL_REQUESTS // number)
    chosen = (arrival >= begin) & (arrival < until)
    interval = (arrival[chosen] - begin) // length
    count = int(interval.max()) + 1 if len(interval) else 0
    arrived = np.bincount(interval, minlength=count)
    bad = np.bincount(interval, weights=~well[chosen], minlength=count)
    worse = [
        at for at in range(count) if bad[at] > arrived[at] * missed + 3 * sqrt(arrived[at] * missed * (1 - missed)) + 1
    ]
    if not worse:
        return 0
    return None if worse[-1] == count - 1 else (worse[-1] + 1) * length

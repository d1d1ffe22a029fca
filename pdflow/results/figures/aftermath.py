"""What a fault did to requests: TTFT before and after it, failures, and the time to recover.

A request is well served if it completed with a TTFT within the bound: the SLO's, or, without one, the 99th percentile
of TTFT before the fault. The time after a fault is divided into intervals of equal length. In each, the number of
requests that were not well served is compared with the share before the fault: it is worse if it exceeds the expected
number by three standard deviations and one request. The cluster has recovered at the end of the last worse interval.

Cancelled and unfinished requests are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.figures.slo import SloTargets
from pdflow.results.figures.spread import Spread
from pdflow.results.records import Records
from pdflow.results.totals import NS_PER_S, FaultTotals

WINDOW_NS: Final = 60 * NS_PER_S
"""How long before a fault and after it requests are compared."""
INTERVAL_REQUESTS: Final = 20
"""Requests of one interval, at the rate before the fault."""
LEAST_INTERVAL_NS: Final = NS_PER_S // 10
MOST: Final = 100
"""Faults that are judged: the first ones."""


@attrs.frozen(kw_only=True)
class Aftermath:
    """One fault and the requests around it. TTFT is of completed requests."""

    fault: FaultTotals
    ttft_before: Spread
    """Of requests whose first token came before the fault."""
    ttft_after: Spread
    """Of requests that arrived after it began or waited for their first token then."""
    affected: int
    """Requests that were in flight when it began, or arrived in the window after it and before the next fault."""
    failed: int
    """Of these, the ones that failed."""
    recovered_ns: int | None
    """Time from its beginning until requests were served as before; None: not before the next fault or the end of the
    run, or there are too few requests to tell."""


def aftermaths(
    records: Records, faults: Sequence[FaultTotals], slo: SloTargets | None, since_ns: int
) -> list[Aftermath]:
    """Judge the first `MOST` faults. Requests that arrived before `since_ns`, the warm-up's end, count nowhere."""
    if not faults or not len(records):
        return []
    requests = _Requests.of(records, since_ns)
    bound_ms = None if slo is None else slo.ttft_ms
    begins = [fault.begin_ns for fault in faults]
    found = []
    for fault in faults[:MOST]:
        earlier = max([begin for begin in begins if begin < fault.begin_ns], default=0)
        later = min([begin for begin in begins if begin > fault.begin_ns], default=requests.end_ns)
        found.append(requests.around(fault, earlier, later, bound_ms))
    return found


@attrs.frozen(eq=False)
class _Requests:
    """The requests of a run, column by column."""

    arrival: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    completed: npt.NDArray[np.bool_]
    failed: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, records: Records, since_ns: int) -> Self:
        columns = (records.arrival_ns, records.first_token_ns, records.last_token_ns)
        arrival, first, last = (np.array(column, dtype=np.int64) for column in columns)
        completed = np.array([outcome == "completed" for outcome in records.outcome], dtype=bool)
        failed = np.array([outcome == "failed" for outcome in records.outcome], dtype=bool)
        judged = (arrival >= since_ns) & (completed | failed)
        return cls(arrival[judged], first[judged], last[judged], completed[judged], failed[judged])

    @property
    def end_ns(self) -> int:
        """An instant after the last arrival."""
        return int(self.arrival.max(initial=0)) + 1

    def around(self, fault: FaultTotals, earlier: int, later: int, bound_ms: float | None) -> Aftermath:
        """Judge a fault by the requests before it and until the next one. `earlier`, `later`: when those faults act."""
        begin, arrival, ttft = fault.begin_ns, self.arrival, self.first - self.arrival
        past = (arrival >= begin - WINDOW_NS) & (arrival < begin)
        before = past & self.completed & (self.first < begin)
        in_flight = past & (arrival >= earlier) & (self.failed | (self.last >= begin))
        after = (arrival >= begin) & (arrival < min(begin + WINDOW_NS, later))
        waiting = in_flight & (self.first >= begin)
        ttft_before = spread.of_ints(ttft[before])
        bound_ns = (ttft_before.p99_ms if bound_ms is None else bound_ms) * 1e6
        well = self.completed & (ttft <= bound_ns)
        return Aftermath(
            fault=fault,
            ttft_before=ttft_before,
            ttft_after=spread.of_ints(ttft[(after | waiting) & self.completed]),
            affected=int((after | in_flight).sum()),
            failed=int(((after | in_flight) & self.failed).sum()),
            recovered_ns=self._recovered_ns(well, past, before, begin, later),
        )

    def _recovered_ns(
        self,
        well: npt.NDArray[np.bool_],
        past: npt.NDArray[np.bool_],
        before: npt.NDArray[np.bool_],
        begin: int,
        until: int,
    ) -> int | None:
        """Return the end of the last interval in which requests were served worse than before, since `begin`. The rate
        of `past` requests makes the intervals, and those of them that were served `before` are the measure."""
        chosen = (self.arrival >= begin) & (self.arrival < until)
        if before.sum() < INTERVAL_REQUESTS or not chosen.any() or not well[before].any():
            return None
        missed = 1 - float(well[before].mean())
        length = max(LEAST_INTERVAL_NS, int(begin - self.arrival[past].min()) * INTERVAL_REQUESTS // int(past.sum()))
        interval = (self.arrival[chosen] - begin) // length
        at, of = np.unique(interval, return_inverse=True)
        arrived, bad = np.bincount(of), np.bincount(of, weights=~well[chosen])
        worse = at[bad > arrived * missed + 3 * np.sqrt(arrived * missed * (1 - missed)) + 1]
        if not len(worse):
            return 0
        return None if worse[-1] == at[-1] else int(worse[-1] + 1) * length

"""Every request's own inter-token latencies, read back from the step logs of the engines that decoded it, and what an
SLO asks of them.

Only --save-detailed and a bound on ITL ask for them, so nothing is recorded per token during a run: the log says when
each step of an engine ended, the record in which steps a request got its tokens. Instants are rounded up to whole
nanoseconds as those of the records are, so the latencies of a request add up to its last token less its first, to the
nanosecond. What a token takes to the client is the same for all of them; where the first came from the prefill engine,
the second one's wait holds the whole transfer. After a preemption a wait lasts until the prompt has been computed
again. An answer that was resumed has tokens of several engines; the wait between two of them is a latency as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdflow.results.figures.exact import nearest_rank
from pdflow.results.figures.slo import SloTargets, whole
from pdflow.results.figures.spread import NS_PER_MS
from pdflow.results.records import NEVER, EngineTokens, Records
from pdflow.results.steps import Steps
from pdflow.results.totals import NS_PER_S, PS_PER_NS

Instants = npt.NDArray[np.int64]


def itls_s(records: Records, logs: Mapping[str, Steps]) -> Iterator[list[float]]:
    """Yield each request's ITLs in s: `itls_ns`, as lists."""
    for waits in itls_ns(records, logs):
        yield [int(wait) / NS_PER_S for wait in waits]


def itls_ns(records: Records, logs: Mapping[str, Steps]) -> Iterator[Instants]:
    """Yield each request's ITLs in ns, in the order of the workload: n-1 for a completed one of n tokens, else none.

    `logs` has the log of each decode engine under the name that the records use: every step, in order, and nothing
    else. A request whose `token_steps` were not recorded has none.
    """
    engines: dict[str, StepEnds] = {}
    columns = (
        records.outcome,
        records.decode_engine,
        records.output_tokens,
        records.token_steps,
        records.first_token_ns,
        records.last_token_ns,
    )

    def ends_of(engine: str) -> StepEnds:
        if engine not in engines:
            engines[engine] = StepEnds(logs[engine])
        return engines[engine]

    for request, (outcome, engine, tokens, steps, first_ns, last_ns) in enumerate(zip(*columns, strict=True)):
        if outcome != "completed" or engine is None or tokens < 2 or steps is None:
            yield np.empty(0, np.int64)
            continue
        step_ends = ends_of(engine).of_steps(step_numbers(steps))
        if request in records.earlier:
            step_ends = np.concatenate(
                [*(_token_ends(earlier, ends_of) for earlier in records.earlier[request]), step_ends]
            )
        waits = np.diff(step_ends)
        if len(waits) < tokens - 1:
            second = int(step_ends[0]) + last_ns - int(step_ends[-1]) - first_ns
            waits = np.concatenate(([second], waits))
        yield waits


def _token_ends(earlier: EngineTokens, ends_of: Callable[[str], StepEnds]) -> Instants:
    """Return when an engine generated these tokens of an answer that another one continued."""
    logged = ends_of(earlier.engine).of_steps(step_numbers(earlier.steps))
    return np.concatenate([logged, np.array(earlier.ends_ns, np.int64)])


def step_numbers(runs: tuple[int, ...]) -> Instants:
    """Return the numbers of the steps runs[0] to runs[1], runs[2] to runs[3], and so on."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(a, b + 1) for a, b in zip(runs[::2], runs[1::2], strict=True)])


def bounds_itl(slo: SloTargets | None, class_slos: Mapping[str, SloTargets]) -> bool:
    """Return whether any request has a bound on its inter-token latencies."""
    return any(targets is not None and targets.itl_ms is not None for targets in (slo, *class_slos.values()))


def judge_itls(
    records: Records, itls: Iterable[Instants], slo: SloTargets | None, class_slos: Mapping[str, SloTargets]
) -> None:
    """Fill the records' columns of inter-token latencies from each request's own, in ns.

    A request without a bound gets the maximum, and nothing beyond it. One of a single token has waited for none.
    """
    records.itl_ns, records.itl_max_ns, records.stalled_ns = [], [], []
    bounds = {name: _Bound.of(targets) for name, targets in class_slos.items()}
    default = _Bound.of(slo)
    for request, waits in enumerate(itls):
        bound = bounds.get(records.class_of(request), default)
        nothing = 0 if records.outcome[request] == "completed" else NEVER
        itl = greatest = stalled = nothing
        if len(waits):
            greatest = itl = int(waits.max())
            if bound is not None:
                rank = nearest_rank(bound.percentile, len(waits))
                itl = int(np.partition(waits, rank)[rank])
                stalled = int(waits[waits > bound.itl_ns].sum())
        records.itl_ns.append(itl)
        records.itl_max_ns.append(greatest)
        records.stalled_ns.append(stalled)


class _Bound(NamedTuple):
    """An SLO's bound on ITL, exactly as it is written."""

    itl_ns: int
    percentile: float

    @staticmethod
    def of(targets: SloTargets | None) -> _Bound | None:
        if targets is None or targets.itl_ms is None:
            return None
        return _Bound(whole(targets.itl_ms, NS_PER_MS), targets.itl_percentile)


class StepEnds:
    """The end of each step of one engine."""

    __slots__ = ("_before", "_delta", "_first", "_start", "_weight")

    def __init__(self, log: Steps) -> None:
        folds = [np.stack([c.astype(np.int64) for c in columns]) for columns in log.folds()]
        columns = np.concatenate(folds or [np.empty((5, 0), np.int64)], axis=1)
        self._start, self._first, self._delta, steps, self._weight = columns
        self._before = np.cumsum(steps) - steps
        """The number of steps before each row."""

    def waiting_in(self, numbers: Instants) -> Instants:
        """Return how many sequences waited for a token of each of these steps."""
        found: Instants = self._weight[np.searchsorted(self._before, numbers, side="right") - 1]
        return found

    def of_steps(self, numbers: Instants) -> Instants:
        """Return the ends of these steps, in ns rounded up."""
        row = np.searchsorted(self._before, numbers, side="right") - 1
        nth = numbers - self._before[row]
        done = nth + 1
        ends_ps = self._start[row] + done * self._first[row] + self._delta[row] * (done * nth // 2)
        ends_ns: Instants = -(-ends_ps // PS_PER_NS)
        return ends_ns

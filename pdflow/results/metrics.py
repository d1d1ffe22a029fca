"""From records to the figures people quote: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput, stages.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, calculate_metrics): TTFT is first token minus
arrival; TPOT is (last token - first token) / (output tokens - 1), of requests with more than one; ITL is over all
tokens but first ones; only completed requests count in latencies and token totals; a request is good if it meets
every SLO given (a request of one token meets any TPOT). Where vLLM has no word (SLO attainment, stages) this file
decides: attainment is good requests over all that ended, failed and cancelled ones too, for they did not get what the
SLO promises; a request that an interruption cut off has not ended and counts nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results import spread
from pdflow.results.records import STAGES, IntColumn, Records, stage_durations_ns
from pdflow.results.spread import Spread
from pdflow.results.steps import Steps
from pdflow.results.totals import NS_PER_S, share

PS_PER_S = 10**12
UNFINISHED = "unfinished"
NO_REASON = "unstated"


class Slo(Protocol):
    """What a request must meet; None is no demand. A scenario's [slo] table is one."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


@attrs.frozen(kw_only=True)
class SloMetrics:
    """How far the SLO was met. `by_metric` has the share that meets each demand alone, for the demands made."""

    good: int
    goodput_rps: float
    attainment: float
    by_metric: dict[str, float]


@attrs.frozen(kw_only=True)
class Metrics:
    """The headline figures of one run."""

    requests: int
    outcomes: dict[str, int]
    """completed, failed, cancelled, unfinished: each present, 0 or more."""
    reasons: dict[str, dict[str, int]]
    """For failed and cancelled: how often each reason, most frequent first."""
    attempts: int
    duration_ns: int
    input_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    stages: dict[str, Spread]
    """Durations over the completed requests, so that the means add up to TTFT's mean."""
    slo: SloMetrics | None
    """None if the scenario demands nothing."""
    peak_output_tokens_per_s: int
    peak_concurrent_requests: int

    def per_second(self, amount: int) -> float:
        """`amount` over the run's duration."""
        return share(amount * NS_PER_S, self.duration_ns)

    @property
    def completed(self) -> int:
        """Requests that got all their tokens."""
        return self.outcomes["completed"]


def measure(records: Records, steps: Sequence[Steps], duration_ns: int, slo: Slo | None = None) -> Metrics:
    """Every figure of a run: its records, its engines' step logs, from instant 0 to its last request's end."""
    outcome = np.array([_OUTCOME_CODES[word] for word in records.outcome], dtype=np.int8)
    done = outcome == _OUTCOME_CODES["completed"]
    arrival, first, last = (
        np.array(column, dtype=np.int64)[done]
        for column in (records.arrival_ns, records.first_token_ns, records.last_token_ns)
    )
    assert ((arrival <= first) & (first <= last)).all(), "a completed request without its tokens' times"
    output = np.array(records.output_tokens, dtype=np.int64)[done]
    many = output > 1
    durations = stage_durations_ns(records)[:, done]
    return Metrics(
        requests=len(records),
        outcomes={_WORDS[code]: int(np.count_nonzero(outcome == code)) for code in range(len(_WORDS))},
        reasons=_reasons(records),
        attempts=sum(records.attempts),
        duration_ns=duration_ns,
        input_tokens=int(np.array(records.input_tokens, dtype=np.int64)[done].sum()),
        output_tokens=int(output.sum()),
        ttft=spread.of_ints(first - arrival),
        tpot=spread.of_floats((last - first)[many] / (output[many] - 1)),
        itl=spread.of_steps(steps),
        e2e=spread.of_ints(last - arrival),
        stages={stage: spread.of_ints(durations[row]) for row, stage in enumerate(STAGES)},
        slo=_judge(
            slo, arrival, first, last, output, int(np.count_nonzero(outcome != _OUTCOME_CODES[None])), duration_ns
        ),
        peak_output_tokens_per_s=_peak_tokens(arrival, first, steps),
        peak_concurrent_requests=_peak_requests(arrival, last),
    )


_WORDS = ("completed", "failed", "cancelled", UNFINISHED)
_OUTCOME_CODES: dict[str | None, int] = {"completed": 0, "failed": 1, "cancelled": 2, None: 3}


def _reasons(records: Records) -> dict[str, dict[str, int]]:
    counts = Counter(
        (outcome, reason or NO_REASON)
        for outcome, reason in zip(records.outcome, records.reason, strict=True)
        if outcome == "failed" or outcome == "cancelled"
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        outcome: {reason: count for (of, reason), count in ranked if of == outcome}
        for outcome in ("failed", "cancelled")
    }


def _judge(
    slo: Slo | None,
    arrival: IntColumn,
    first: IntColumn,
    last: IntColumn,
    output: IntColumn,
    ended: int,
    duration_ns: int,
) -> SloMetrics | None:
    """In whole picoseconds (int64 holds 100 days of them): exact, with the bound itself still good."""
    demands: dict[str, npt.NDArray[np.bool_]] = {}
    if slo is not None and slo.ttft_ms is not None:
        demands["ttft"] = first - arrival <= _whole(slo.ttft_ms, 10**6)
    if slo is not None and slo.tpot_ms is not None:
        rounded_up = -((first - last) * 1_000 // np.maximum(output - 1, 1))
        demands["tpot"] = rounded_up <= _whole(slo.tpot_ms, 10**9)
    if slo is not None and slo.e2e_ms is not None:
        demands["e2e"] = last - arrival <= _whole(slo.e2e_ms, 10**6)
    if not demands:
        return None
    good = int(np.count_nonzero(np.logical_and.reduce(list(demands.values()))))
    return SloMetrics(
        good=good,
        goodput_rps=share(good * NS_PER_S, duration_ns),
        attainment=share(good, ended),
        by_metric={name: share(int(np.count_nonzero(met)), ended) for name, met in demands.items()},
    )


def _whole(milliseconds: float, units_per_ms: int) -> int:
    """A bound in ms as written in the scenario (0.1 means a tenth, not its nearest binary fraction), in whole units."""
    return min(int(Fraction(str(milliseconds)) * units_per_ms), 2**62)


def _peak_tokens(arrival: IntColumn, first: IntColumn, steps: Sequence[Steps]) -> int:
    """Most output tokens within a whole second, counted from the first arrival, first tokens included.

    As vLLM counts, except that tokens of requests that fail later are in: the step log does not know whose they are.
    """
    if not len(arrival):
        return 0
    origin = int(arrival.min())
    buckets = np.bincount((first - origin) // NS_PER_S)
    for log in steps:
        for times, weights in log.ends():
            seconds = np.maximum((times - origin * 1_000) // PS_PER_S, 0)
            more = np.bincount(seconds, weights).astype(np.int64)
            if len(more) > len(buckets):
                buckets, more = more, buckets
            buckets[: len(more)] += more
    return int(buckets.max())


def _peak_requests(arrival: IntColumn, last: IntColumn) -> int:
    """Most completed requests in the system at once, over half-open intervals: one ends before the next arrives."""
    if not len(arrival):
        return 0
    starts, ends = np.sort(arrival), np.sort(last)
    inside = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    return int(inside.max())

"""The headline figures of a run's records: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput, stages.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, calculate_metrics): TTFT is first token minus
arrival; TPOT is (last token - first token) / (output tokens - 1), of requests with more than one; ITL is over all
tokens but first ones; only completed requests count in latencies and token totals. Where vLLM has no word, this file
decides (stages), or `slo.py` (attainment, classes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.figures.slo import Classes, ClassMetrics, Served, SloMetrics, SloTargets, evaluate_slo
from pdflow.results.figures.spread import Spread
from pdflow.results.records import IntColumn, Records, stage_durations_ns, stages_seen
from pdflow.results.steps import Steps
from pdflow.results.totals import NS_PER_S, PS_PER_NS, share

PS_PER_S = 10**12
UNFINISHED = "unfinished"
NO_REASON = "unstated"


@attrs.frozen(kw_only=True)
class Metrics:
    """The headline figures of one run."""

    requests: int
    warming: int
    """Requests that arrived during the warm-up: in no other figure."""
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
    request_itl: Spread
    """The percentile of its own ITLs that each request's SLO bounds; of nothing if none does."""
    stalled_share: float | None
    """The share of the time after their first token for which requests waited longer for a token than their SLO's bound
    on ITL. None if there is none."""
    e2e: Spread
    stages: dict[str, Spread]
    """Durations over the completed requests, so that the means add up to TTFT's mean. Empty if none recorded."""
    slo: SloMetrics | None
    """None if the scenario demands nothing."""
    classes: dict[str, ClassMetrics]
    """By name; "" has those without one. Empty for a workload without classes."""
    peak_output_tokens_per_s: int
    peak_concurrent_requests: int
    wrong_kv: int | None
    """Completed requests that were decoded with KV that is not all their prompt's; None where that cannot happen."""

    def per_second(self, amount: int) -> float:
        """Return `amount` over the run's duration."""
        return share(amount * NS_PER_S, self.duration_ns)

    @property
    def completed(self) -> int:
        """Requests that got all their tokens."""
        return self.outcomes["completed"]


def measure(
    records: Records,
    steps: Sequence[Steps],
    duration_ns: int,
    slo: SloTargets | None = None,
    class_slos: Mapping[str, SloTargets] | None = None,
    warmup_ns: int = 0,
) -> Metrics:
    """Compute every figure of a run from its records and step logs, from the warm-up's end to its last request's.

    Requests that arrive before the warm-up's end are in no figure, nor is the time until then. The step logs do not
    know whose a token is, so ITL and the most tokens in a second are over the tokens that came since.
    """
    everything, records = records, records.arriving_from(warmup_ns)
    if warmup_ns:
        steps = [log.ending_from(warmup_ns * PS_PER_NS) for log in steps]
        duration_ns = max(0, duration_ns - warmup_ns)
    outcome = _outcome_codes(records)
    done = outcome == _OUTCOME_CODES["completed"]
    served = completed(records)
    arrival, first, last = served.arrival, served.first, served.last
    over = outcome != _OUTCOME_CODES[None]
    classes = Classes.of(records.classes, len(records)) if records.classes else None
    bounds = [] if classes is None else classes.bounds(slo, class_slos or {})
    durations = stage_durations_ns(records)[:, done]
    return Metrics(
        requests=len(records),
        warming=len(everything) - len(records),
        outcomes={_OUTCOMES[code]: int(np.count_nonzero(outcome == code)) for code in range(len(_OUTCOMES))},
        reasons=_reasons(records),
        attempts=sum(records.attempts),
        duration_ns=duration_ns,
        input_tokens=int(np.array(records.input_tokens, dtype=np.int64)[done].sum()),
        output_tokens=int(served.output.sum()),
        ttft=spread.of_ints(first - arrival),
        tpot=spread.of_floats(served.tpot_ns),
        itl=spread.of_steps(steps),
        request_itl=Spread() if served.itl is None else spread.of_ints(served.itl[served.output > 1]),
        stalled_share=served.stalled_share,
        e2e=spread.of_ints(last - arrival),
        stages={stage: spread.of_ints(durations[row]) for row, stage in enumerate(stages_seen(records))},
        slo=evaluate_slo(
            slo,
            served,
            int(np.count_nonzero(over)),
            duration_ns,
            bounds,
            None if classes is None else classes.codes[done],
        ),
        classes={} if classes is None else classes.metrics(bounds, served, done, over, duration_ns),
        peak_output_tokens_per_s=_peak_tokens(arrival, first, steps),
        peak_concurrent_requests=_peak_requests(arrival, last),
        wrong_kv=None if records.wrong_kv is None else sum(bool(done[request]) for request in records.wrong_kv),
    )


def completed(records: Records) -> Served:
    """Return the requests that count in latencies, in the order of the workload."""
    done = _outcome_codes(records) == _OUTCOME_CODES["completed"]
    arrival, first, last, output = (
        np.array(column, dtype=np.int64)[done]
        for column in (records.arrival_ns, records.first_token_ns, records.last_token_ns, records.output_tokens)
    )
    assert ((arrival <= first) & (first <= last)).all(), "a completed request has no token times"
    itl, stalled = (
        np.array(column, dtype=np.int64)[done] if column else None for column in (records.itl_ns, records.stalled_ns)
    )
    return Served(arrival=arrival, first=first, last=last, output=output, itl=itl, stalled=stalled)


_OUTCOMES = ("completed", "failed", "cancelled", UNFINISHED)
_OUTCOME_CODES: dict[str | None, int] = {"completed": 0, "failed": 1, "cancelled": 2, None: 3}


def _outcome_codes(records: Records) -> npt.NDArray[np.int8]:
    return np.array([_OUTCOME_CODES[outcome] for outcome in records.outcome], dtype=np.int8)


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


def _peak_tokens(arrival: IntColumn, first: IntColumn, steps: Sequence[Steps]) -> int:
    """Return the most output tokens within a whole second, counted from the first arrival, first tokens included.

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
    """Return the most completed requests in the system at once, over half-open intervals: one that ends when another
    arrives is gone."""
    if not len(arrival):
        return 0
    starts, ends = np.sort(arrival), np.sort(last)
    inside = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    return int(inside.max())

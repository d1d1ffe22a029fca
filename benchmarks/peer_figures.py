"""The figures of a case in two simulators, reckoned from their rows: nothing is run or printed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from benchmarks.peer_runs import (
    ADMITTED,
    ARRIVED,
    FIRST,
    KV_BYTES_PER_TOKEN,
    LAST,
    MOVED,
    PREFILLED,
    QUEUED,
    UNLIMITED,
    Case,
    Floats,
    Run,
    offered,
    traffic,
)

STAGES = {
    "queue at P": (ARRIVED, QUEUED),
    "prefill": (QUEUED, PREFILLED),
    "until D has blocks": (PREFILLED, ADMITTED),
    "transfer, first step of D": (ADMITTED, FIRST),
}


def overloaded(case: Case, load: float) -> Case:
    """The same with NICs such that the traffic, through one of them, is `load` times what it can carry."""
    nbytes, seconds = offered(traffic(case))
    return attrs.evolve(case, bandwidth=round(nbytes / seconds / load))


def title(case: Case) -> str:
    """A case in one line."""
    nic = "NICs without limit" if case.bandwidth == UNLIMITED else f"NICs of {case.bandwidth / 1e9:.3g} GB/s"
    return f"{case.title}: {case.prefills}P+{case.decodes}D, {case.requests:,} at {case.rate_rps:g}/s, {nic}"


def spread(values: Floats) -> list[float]:
    """Mean, p50, p90, p99."""
    return [float(values.mean()), *(float(np.percentile(values, rank)) for rank in (50, 90, 99))]


def figures(case: Case, run: Run) -> dict[str, Any]:
    """The headline figures of a run, all reckoned here from its rows but ITL, which is the simulator's own word."""
    rows, drawn = run.rows, traffic(case)
    output = np.array([request.output_tokens for request in drawn])
    seconds = (rows[:, LAST].max() - rows[0, ARRIVED]) / 1e3
    return {
        "version": run.version,
        "TTFT ms": spread(run.ttft),
        "TPOT ms": spread((rows[:, LAST] - rows[:, FIRST]) / (output - 1)),
        "ITL ms": list(run.itl),
        "E2E ms": spread(run.e2e),
        "requests/s": len(rows) / seconds,
        "output tokens/s": float(output.sum()) / seconds,
        "stages ms": {name: float((rows[:, end] - rows[:, begin]).mean()) for name, (begin, end) in STAGES.items()},
    }


def apart(runs: Mapping[str, Run]) -> dict[str, float] | None:
    """How far TTFT is apart, request by request; None if the peer is missing."""
    if len(runs) < 2:
        return None
    ours, theirs = runs.values()
    if not np.allclose(ours.rows[:, ARRIVED], theirs.rows[:, ARRIVED], rtol=0.0, atol=1e-5):
        raise SystemExit("the two did not read the same arrivals")
    by = ours.ttft - theirs.ttft
    return {
        "same": float((np.abs(by) < 1e-5).mean()),
        "over_1_ms": float((np.abs(by) > 1.0).mean()),
        "most_ms": float(np.abs(by).max()),
        "mean_ms": float(by.mean()),
        "e2e_most_ms": float(np.abs(ours.e2e - theirs.e2e).max()),
    }


def tenths(values: Floats) -> list[float]:
    """Means of the first tenth, the second, ... in order of arrival."""
    return [float(tenth.mean()) for tenth in np.array_split(values, 10)]


def last_over_first(found: Mapping[str, Any]) -> float:
    """How much longer the last tenth waits than the first."""
    return float(found["tenths_ms"][-1] / found["tenths_ms"][0])


def under_way(rows: Floats) -> list[int]:
    """How many transfers have begun and not ended when the last request of each tenth arrives."""
    instants = [tenth[-1] for tenth in np.array_split(rows[:, ARRIVED], 10)]
    return [int((rows[:, ADMITTED] <= at).sum() - (rows[:, MOVED] <= at).sum()) for at in instants]


def delivered(case: Case, run: Run) -> dict[str, Any]:
    """What reached a decode engine that receives everything, while requests arrived and afterwards.

    `of_nic`: KV of completed requests that was there when the last request arrived, as a multiple of what its NIC
    carries in that time. Above 1 is impossible.
    """
    drawn, rows = traffic(case), run.rows
    arrivals = np.array([request.arrival_ns - drawn[0].arrival_ns for request in drawn]) / 1e6
    tokens = np.array([request.input_tokens for request in drawn])[np.searchsorted(arrivals, rows[:, ARRIVED] - 1e-4)]
    end = arrivals[-1]
    nbytes = int(tokens[rows[:, MOVED] <= end].sum()) * KV_BYTES_PER_TOKEN
    return {
        "completed": run.completed,
        "in_time": int((rows[:, LAST] <= end).sum()),
        "requests/s": run.completed / float(rows[:, LAST].max()) * 1e3 if len(rows) else 0.0,
        "TTFT ms": spread(run.ttft) if len(rows) else None,
        "of_nic": nbytes / (case.bandwidth * end / 1e3),
    }

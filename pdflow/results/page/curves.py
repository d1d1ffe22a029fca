"""The numbers behind the page's curves, with a bounded number of points each.

A distribution is drawn through its percentiles, so that what the tables quote lies on it. What changes all the time
(how many wait, which GPUs work) is drawn as its mean over equal slices of the run, with the highest in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.figures.exact import Ints
from pdflow.results.figures.metrics import completed
from pdflow.results.figures.spread import NS_PER_MS
from pdflow.results.files.timeline import CounterLevel, Stamps, summed
from pdflow.results.finished import FinishedRun
from pdflow.results.recording import Changes, Recording
from pdflow.results.records import Records

SLICES: Final = 160
PERCENTS: Final = range(101)
LINKS_SHOWN: Final = 2
"""The links nearest to their capacity."""

LEVELS: Final = {
    ("prefill", "waiting"): "waiting for prefill",
    ("prefill", "computing"): "in prefill",
    ("transfer", "under way"): "KV on its way",
    ("decode", "waiting"): "waiting for decode",
    ("decode", "loading"): "loading KV at decode",
    ("decode", "decoding"): "decoding",
    ("aggregated", "waiting"): "waiting",
    ("aggregated", "computing"): "in prefill or decoding",
}
"""The levels that count requests, in the order in which a request passes them."""

_AT_WORK: Final = frozenset({"computing", "decoding"})
"""The levels of an engine that has a step to do as long as they are above 0."""


class Curve(NamedTuple):
    """The mean and the maximum of a quantity in each slice of the run."""

    name: str
    means: list[float]
    highest: list[float]


def distributions_ms(records: Records) -> dict[str, list[float]]:
    """Return the percentiles 0 to 100 of TTFT and of TPOT over the completed requests, and of what the SLO bounds of
    their ITLs, if it does; no percentiles of none."""
    served = completed(records)
    samples: dict[str, Ints | npt.NDArray[np.float64]] = {
        "TTFT": served.first - served.arrival,
        "TPOT": served.tpot_ns,
    }
    if served.itl is not None:
        samples["request ITL"] = served.itl[served.output > 1]
    return {
        name: [value / NS_PER_MS for value in spread.percentiles(values, PERCENTS)] for name, values in samples.items()
    }


def over_time(result: FinishedRun, recording: Recording | None = None) -> tuple[list[Curve], list[Curve]]:
    """Return curves over time: requests in each stage, over all engines of a kind; and shares of each role's GPUs that
    are at work and, as far as recorded, of its KV blocks in use and of the busiest links' capacity in use.

    An engine is at work while a request of which the records say so computes on it: of requests that were tried again,
    the last attempt.
    """
    recording = recording or Recording()
    stamps, totals = Stamps(result.records), result.totals
    counts: dict[tuple[str, str], list[CounterLevel]] = {}
    work: dict[str, CounterLevel] = {}
    blocks: dict[str, list[Changes]] = {}
    roles = {engine.name: engine.role for engine in totals.engines}
    for process, kind in stamps.processes():
        if kind != "transfer" and process in recording.kv_blocks:
            blocks.setdefault(roles.get(process, kind), []).append(recording.kv_blocks[process].curve())
        for level in stamps.levels(process, kind):
            counts.setdefault((kind, level.name), []).append(level)
            if level.name in _AT_WORK:
                work[process] = level
    requests = [
        _curve(name, _together(counts[key]).curve(), totals.duration_ns)
        for key, name in LEVELS.items()
        if key in counts
    ]
    shares = []
    for role in totals.roles():
        engines = [engine for engine in totals.engines if engine.role == role]
        spans = [_above_nothing(work[engine.name], engine.gpus) for engine in engines if engine.name in work]
        # Steps whose requests were all taken back stand in no record: no curve, rather than one that says "never".
        if any(len(span.starts) for span in spans) or (spans and not totals.gpu_busy_share(role)):
            gpus = sum(engine.gpus for engine in engines)
            shares.append(_curve(f"{role} GPUs at work", _together(spans).curve(), totals.duration_ns, gpus))
    for role, curves in blocks.items():
        held = sum(engine.kv_blocks for engine in totals.engines if engine.role == role)
        shares.append(_curve(f"{role} KV blocks in use", _all_of(curves), totals.duration_ns, held))
    recorded = {link.name: link for link in recording.links}
    for used in totals.busiest_links(LINKS_SHOWN):
        if (link := recorded.get(used.name)) is not None:
            shares.append(_curve(f"link {link.name}", link.rate.curve(), totals.duration_ns, link.capacity_bytes_per_s))
    return requests, shares


def _above_nothing(level: CounterLevel, weight: int) -> CounterLevel:
    """Return the intervals in which a level is above 0, with that weight."""
    instants, values = level.curve()
    above = values > 0
    begins = np.flatnonzero(above & ~np.concatenate(([False], above[:-1])))
    ends = np.flatnonzero(~above & np.concatenate(([False], above[:-1])))
    return CounterLevel(level.name, instants[begins], instants[ends], np.full_like(begins, weight))


def _together(levels: Sequence[CounterLevel]) -> CounterLevel:
    _, starts, ends, weights = zip(*levels, strict=True)
    return CounterLevel(levels[0].name, np.concatenate(starts), np.concatenate(ends), np.concatenate(weights))


def _all_of(curves: Sequence[Changes]) -> Changes:
    steps = [np.diff(values, prepend=0) for _, values in curves]
    return summed(np.concatenate([instants for instants, _ in curves]), np.concatenate(steps))


def _curve(name: str, changes: Changes, duration_ns: int, whole: int = 1) -> Curve:
    """Return a quantity as a curve, in shares of `whole`."""
    instants, values = changes
    if duration_ns < SLICES or not len(instants):
        return Curve(name, [0.0] * SLICES, [0.0] * SLICES)
    edges = np.array([duration_ns * index // SLICES for index in range(SLICES + 1)], dtype=np.int64)
    area = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(instants).astype(np.float64))))
    at = np.searchsorted(instants, edges, side="right") - 1
    # A link's bytes per second times a run's ns are more than an int64 holds.
    held = np.where(at >= 0, values[at], 0).astype(np.float64)
    upto = np.where(at >= 0, area[at] + held * (edges - instants[at]), 0.0)
    means = np.diff(upto) / np.diff(edges) / whole
    highest = [
        max(now, int(values[low + 1 : high + 1].max(initial=0))) / whole
        for now, (low, high) in zip(held[:-1].tolist(), pairwise(at.tolist()), strict=True)
    ]
    return Curve(name, means.tolist(), highest)

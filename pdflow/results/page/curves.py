"""The numbers behind the page's curves, with a bounded number of points each.

A distribution is drawn through its percentiles, so that what the tables quote lies on it. What changes all the time
(how many wait, which GPUs work) is drawn as its mean over equal slices of the run, with the highest in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from pdflow.results import spread
from pdflow.results.metrics import completed
from pdflow.results.records import Records
from pdflow.results.result import Result
from pdflow.results.spread import NS_PER_MS
from pdflow.results.timeline import Level, Stamps

SLICES: Final = 160
PERCENTS: Final = range(101)

_NAMES: Final = {
    ("prefill", "waiting"): "waiting for prefill",
    ("prefill", "computing"): "in prefill",
    ("transfer", "under way"): "KV on its way",
    ("decode", "waiting"): "waiting for decode",
    ("decode", "loading"): "loading KV at decode",
    ("decode", "decoding"): "decoding",
    ("aggregated", "waiting"): "waiting",
    ("aggregated", "computing"): "in prefill or decoding",
}
"""The levels that count requests; in the order of a request's life."""

_AT_WORK: Final = frozenset({"computing", "decoding"})
"""The levels of an engine that has a step to do as long as they are above 0."""


class Curve(NamedTuple):
    """A quantity over time: of each slice of the run, the mean and the highest."""

    name: str
    means: list[float]
    highest: list[float]


def distributions_ms(records: Records) -> dict[str, list[float]]:
    """Of TTFT and TPOT: the percentiles 0 to 100 of the completed requests; none of nothing."""
    served = completed(records)
    ttft = spread.percentiles(served.first - served.arrival, PERCENTS)
    tpot = spread.percentiles(served.tpot_ns, PERCENTS)
    return {name: [value / NS_PER_MS for value in values] for name, values in (("TTFT", ttft), ("TPOT", tpot))}


def over_time(result: Result) -> tuple[list[Curve], list[Curve]]:
    """How many requests are where, over all engines of a kind; and the share of each role's GPUs that are at work.

    An engine is at work while a request of which the records say so computes on it: of requests that were tried again,
    the last attempt.
    """
    stamps, totals = Stamps(result.records), result.totals
    counts: dict[tuple[str, str], list[Level]] = {}
    work: dict[str, Level] = {}
    for process, kind in stamps.processes():
        for level in stamps.levels(process, kind):
            counts.setdefault((kind, level.name), []).append(level)
            if level.name in _AT_WORK:
                work[process] = level
    requests = [
        _curve(name, _together(counts[key]), totals.duration_ns) for key, name in _NAMES.items() if key in counts
    ]
    busy = []
    for role in totals.roles():
        engines = [engine for engine in totals.engines if engine.role == role]
        spans = [_above_nothing(work[engine.name], engine.gpus) for engine in engines if engine.name in work]
        if spans:
            gpus = sum(engine.gpus for engine in engines)
            busy.append(_curve(f"{role} GPUs at work", _together(spans), totals.duration_ns, gpus))
    return requests, busy


def _above_nothing(level: Level, weight: int) -> Level:
    """When it is above 0, as spans of that weight."""
    instants, values = level.curve()
    above = values > 0
    begins = np.flatnonzero(above & ~np.concatenate(([False], above[:-1])))
    ends = np.flatnonzero(~above & np.concatenate(([False], above[:-1])))
    return Level(level.name, instants[begins], instants[ends], np.full_like(begins, weight))


def _together(levels: Sequence[Level]) -> Level:
    _, starts, ends, weights = zip(*levels, strict=True)
    return Level(levels[0].name, np.concatenate(starts), np.concatenate(ends), np.concatenate(weights))


def _curve(name: str, level: Level, duration_ns: int, whole: int = 1) -> Curve:
    """The level is 0 before its first change, and each value holds until the next instant. Shares of `whole`."""
    instants, values = level.curve()
    if duration_ns < SLICES or not len(instants):
        return Curve(name, [0.0] * SLICES, [0.0] * SLICES)
    edges = np.array([duration_ns * place // SLICES for place in range(SLICES + 1)], dtype=np.int64)
    area = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(instants).astype(np.float64))))
    at = np.searchsorted(instants, edges, side="right") - 1
    held = np.where(at >= 0, values[at], 0)
    upto = np.where(at >= 0, area[at] + held * (edges - instants[at]), 0.0)
    means = np.diff(upto) / np.diff(edges) / whole
    highest = [
        max(now, int(values[low + 1 : high + 1].max(initial=0))) / whole
        for now, (low, high) in zip(held[:-1].tolist(), pairwise(at.tolist()), strict=True)
    ]
    return Curve(name, means.tolist(), highest)

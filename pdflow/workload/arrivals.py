"""Arrival processes: iterators over instants in ns, never decreasing, without end.

Each keeps its place as an exact integer or fraction and rounds it once per request, so no error accumulates over a long
run. What arrives is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import count, repeat
from math import log, pi, sin

import attrs

from pdflow.protocol.values import Instant, S
from pdflow.workload.lengths import Quantiles
from pdflow.workload.request import WHEN_ONE_ENDS
from pdflow.workload.rng import Rng, Stream, standard_gamma

FINE_BITS = 20
"""Instants are kept in 2**-20 ns between roundings."""


def poisson(rate_rps: float, stream: Stream) -> Iterator[Instant]:
    """Yield independent arrivals, with exponential gaps. The first comes after one gap."""
    fine, scale, uniform = 0, (S << FINE_BITS) / rate_rps, stream.uniform
    while True:
        fine += int(-log(uniform()) * scale)
        yield fine >> FINE_BITS


def gamma(rate_rps: float, burstiness: float, stream: Stream) -> Iterator[Instant]:
    """Yield arrivals with independent gaps of a gamma distribution of shape `burstiness`, as vLLM's benchmark does."""
    fine, scale = 0, (S << FINE_BITS) / (rate_rps * burstiness)
    while True:
        fine += int(standard_gamma(burstiness, stream) * scale)
        yield fine >> FINE_BITS


def ramp(from_rps: float, to_rps: float, over_s: float, stream: Stream) -> Iterator[Instant]:
    """Return independent arrivals at a rate that goes linearly from one value to another, and stays there."""

    def rate(at_s: float) -> float:
        return to_rps if at_s >= over_s else from_rps + (to_rps - from_rps) * at_s / over_s

    return _thinned(rate, max(from_rps, to_rps), stream)


def diurnal(mean_rps: float, swing: float, period_s: float, stream: Stream) -> Iterator[Instant]:
    """Return independent arrivals at the rate mean_rps * (1 + swing * sin(2 pi t / period_s))."""

    def rate(at_s: float) -> float:
        return mean_rps * (1.0 + swing * sin(2.0 * pi * at_s / period_s))

    return _thinned(rate, mean_rps * (1.0 + swing), stream)


def _thinned(rate: Callable[[float], float], most_rps: float, stream: Stream) -> Iterator[Instant]:
    """Yield Poisson arrivals at the greatest rate, each kept with probability rate / greatest (Lewis, Shedler 1979)."""
    for at in poisson(most_rps, stream):
        if stream.uniform() * most_rps < rate(at / S):
            yield at


def constant(rate_rps: float) -> Iterator[Instant]:
    """Yield arrival k at k / rate_rps seconds, k from 0, rounded down. The rate is exactly its decimal digits."""
    rate = Fraction(repr(rate_rps))
    step, per = S * rate.denominator, rate.numerator
    for k in count():
        yield k * step // per


def closed(concurrency: int) -> Iterator[Instant]:
    """Yield the arrivals of a closed loop: each client sends one request at 0, every other one when its last has
    ended."""
    yield from repeat(0, concurrency)
    yield from repeat(WHEN_ONE_ENDS)


@attrs.frozen
class RateLevel:
    """A multiplier of the rate (mean 1) that is drawn anew every `window_s` seconds."""

    window_s: float
    relative_rate: Quantiles


def modulated(
    rate_rps: float,
    levels: Sequence[RateLevel],
    batch_probability: float,
    batch_gap_s: Quantiles,
    step_ns: int,
    rng: Rng,
) -> Iterator[Instant]:
    """Return Poisson arrivals whose rate is a product of levels: bursts on several scales of time.

    An arrival is followed by another of the same batch with `batch_probability`, after a gap of `batch_gap_s`; the rate
    is that of all arrivals, batched ones included. `step_ns` above 0 rounds every instant down to such a step, as some
    traces do.
    """
    arrivals = _modulated(rate_rps * (1.0 - batch_probability), levels, rng)
    if batch_probability:
        arrivals = _batched(arrivals, batch_probability, batch_gap_s, rng.stream("batches"))
    if step_ns:
        return (at - at % step_ns for at in arrivals)
    return arrivals


def _modulated(rate_rps: float, levels: Sequence[RateLevel], rng: Rng) -> Iterator[Instant]:
    """Yield unit-rate arrivals, each moved to the instant at which the integral of the rate reaches it, window by
    window."""
    uniform = rng.stream("arrivals").uniform
    draws = [rng.stream(f"level-{i}").uniform for i in range(len(levels))]
    spans = [int(level.window_s * S) << FINE_BITS for level in levels]
    ends = [0] * len(levels)
    relative = [1.0] * len(levels)
    fine, work = 0, -log(uniform())  # `work` in mean arrivals, until the next one
    while True:
        per_tick = rate_rps / (S << FINE_BITS)
        for i, level in enumerate(levels):
            if ends[i] <= fine:
                ends[i] += spans[i]
                relative[i] = level.relative_rate.at(draws[i]())
            per_tick *= relative[i]
        end = min(ends) if ends else fine + (3600 * S << FINE_BITS)
        while per_tick > 0.0 and work <= (end - fine) * per_tick:
            fine += int(work / per_tick)
            yield fine >> FINE_BITS
            work = -log(uniform())
        work -= (end - fine) * per_tick
        fine = end


def _batched(starts: Iterator[Instant], probability: float, gap_s: Quantiles, stream: Stream) -> Iterator[Instant]:
    """Add the other arrivals of its batch after each arrival. Batches that overlap are merged in order of time."""
    following: list[Instant] = []
    for start in starts:
        while following and following[0] <= start:
            yield following.pop(0)
        yield start
        at = start
        while stream.uniform() < probability:
            at += int(gap_s.at(stream.uniform()) * S)
            following.append(at)
        following.sort()

"""Functions that draw from a scenario's distributions: lengths, times, turns, arrivals, clients that hang up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log

from pdflow.protocol.values import Instant, S
from pdflow.scenario.schema.distributions import (
    EmpiricalLength,
    EmpiricalTurns,
    ExponentialTime,
    FixedTime,
    FixedTurns,
    GeometricTurns,
    Length,
    LognormalLength,
    LognormalTime,
    Time,
    Turns,
)
from pdflow.scenario.schema.workload import (
    Arrival,
    Client,
    ClosedArrival,
    ConstantArrival,
    DiurnalArrival,
    GammaArrival,
    RampArrival,
)
from pdflow.workload import arrivals
from pdflow.workload.lengths import empirical, lognormal, uniform
from pdflow.workload.request import NEVER
from pdflow.workload.rng import Rng, Stream, standard_normal


def length(distribution: Length, stream: Stream) -> Callable[[], int]:
    """Return a function that draws a length in tokens."""
    match distribution:
        case LognormalLength():
            return lognormal(distribution.median, distribution.sigma, distribution.low, distribution.high, stream)
        case EmpiricalLength():
            return empirical(distribution.tokens, distribution.weights, stream)
    return uniform(distribution.low, distribution.high, stream)


def turns(distribution: Turns, stream: Stream) -> Callable[[], int]:
    """Return a function that draws the number of turns of a session."""
    match distribution:
        case FixedTurns():
            return uniform(distribution.turns, distribution.turns, stream)
        case GeometricTurns():
            return geometric(distribution.mean, distribution.high, stream)
        case EmpiricalTurns():
            return empirical(distribution.turns, distribution.weights, stream)
    return uniform(distribution.low, distribution.high, stream)


def geometric(mean: float, high: int, stream: Stream) -> Callable[[], int]:
    """Return a function that draws whole numbers from 1 on, each followed by the next with the same probability; those
    beyond `high` become `high`."""
    if mean == 1.0:
        return lambda: 1
    rate = -log(1.0 - 1.0 / mean)
    return lambda: min(high, 1 + int(-log(stream.uniform()) / rate))


def time_ns(distribution: Time, stream: Stream) -> Callable[[], int]:
    """Return a function that draws times, in whole ns."""
    match distribution:
        case FixedTime(time_s=time_s):
            fixed = round(time_s * S)
            return lambda: fixed
        case ExponentialTime(mean_s=mean_s):
            return lambda: round(stream.exponential(mean_s) * S)
        case LognormalTime(median_s=median_s, sigma=sigma, low_s=low_s, high_s=high_s):

            def draw() -> int:
                factor = exp(min(sigma * standard_normal(stream), 700.0))
                return round(min(max(low_s, median_s * factor), high_s) * S)

            return draw
    low_s, span_s = distribution.low_s, distribution.high_s - distribution.low_s
    return lambda: round((low_s + span_s * stream.uniform()) * S)


def leaving(client: Client, rng: Rng) -> Callable[[], int]:
    """Return a function that draws after how many ns a client hangs up by itself; NEVER for one that does not."""
    if client.cancel_probability is None or client.cancel_after_s is None:
        return lambda: NEVER
    share, leaves = client.cancel_probability, rng.stream("cancel").uniform
    when = time_ns(client.cancel_after_s, rng.stream("cancel-after"))

    def draw() -> int:
        # Both are drawn for everybody, so that a larger share sends more clients away and moves none.
        at = when()
        return at if leaves() < share else NEVER

    return draw


def instants(arrival: Arrival, rng: Rng) -> Iterator[Instant]:
    """Return the instants at which requests, or sessions, begin."""
    match arrival:
        case ClosedArrival():
            return arrivals.closed(arrival.concurrency)
        case ConstantArrival():
            return arrivals.constant(arrival.rate_rps)
        case GammaArrival():
            return arrivals.gamma(arrival.rate_rps, arrival.burstiness, rng.stream("arrivals"))
        case RampArrival():
            return arrivals.ramp(arrival.from_rps, arrival.to_rps, arrival.over_s, rng.stream("arrivals"))
        case DiurnalArrival():
            return arrivals.diurnal(arrival.rate_rps, arrival.swing, arrival.period_s, rng.stream("arrivals"))
    return arrivals.poisson(arrival.rate_rps, rng.stream("arrivals"))

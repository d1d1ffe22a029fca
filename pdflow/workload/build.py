"""From [workload] to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from pdflow.protocol.values import Instant
from pdflow.scenario.schema import (
    Arrival,
    ClosedArrival,
    ConstantArrival,
    DiurnalArrival,
    EmpiricalLength,
    GammaArrival,
    Length,
    LognormalLength,
    RampArrival,
    Trace,
    Workload,
)
from pdflow.workload import arrivals
from pdflow.workload.lengths import empirical, lognormal, uniform
from pdflow.workload.readers import load_model, read_trace
from pdflow.workload.request import Request
from pdflow.workload.rng import Rng, Stream


def requests(workload: Workload, seed: int, base_dir: Path) -> Iterator[Request]:
    """The requests of a [workload] table, in order of arrival; without end if it neither counts them nor names a trace.

    A relative trace path starts at `base_dir`, the scenario file's folder. Raises TraceError, when the last request has
    been drawn, if lines of the trace are bad.
    """
    if workload.trace is not None:
        drawn = _from_trace(workload.trace, base_dir)
    elif workload.like is not None:
        model = load_model(workload.like)
        rate = workload.rate_rps
        if rate is None and workload.rate_scale is not None:
            rate = model.rate_rps * workload.rate_scale
        drawn = model.requests(seed, rate)
    else:
        if workload.arrival is None or workload.input_tokens is None or workload.output_tokens is None:
            raise ValueError(
                "a workload needs a trace, a model that it is like, or an arrival process and both lengths"
            )
        drawn = _synthetic(workload.arrival, workload.input_tokens, workload.output_tokens, Rng(seed))
    return drawn if workload.requests is None else islice(drawn, workload.requests)


def _from_trace(trace: Trace, base_dir: Path) -> Iterator[Request]:
    rows = read_trace(base_dir / trace.path, trace.format)
    if trace.time_scale == 1.0:
        return rows
    # times are below 2**53 ns for a hundred days, so the product is the nearest number to the exact one
    scale = trace.time_scale
    return (Request(r.index, round(r.arrival_ns * scale), r.input_tokens, r.output_tokens, r.prefix) for r in rows)


def _synthetic(arrival: Arrival, input_tokens: Length, output_tokens: Length, rng: Rng) -> Iterator[Request]:
    prompt = _lengths(input_tokens, rng.stream("input"))
    answer = _lengths(output_tokens, rng.stream("output"))
    for index, at in enumerate(_instants(arrival, rng)):
        yield Request(index, at, prompt(), answer())


def _lengths(length: Length, stream: Stream) -> Callable[[], int]:
    match length:
        case LognormalLength():
            return lognormal(length.median, length.sigma, length.low, length.high, stream)
        case EmpiricalLength():
            return empirical(length.tokens, length.weights, stream)
    return uniform(length.low, length.high, stream)


def _instants(arrival: Arrival, rng: Rng) -> Iterator[Instant]:
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

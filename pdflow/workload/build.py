"""The requests of a [workload] table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from pdflow.scenario.schema.distributions import Length
from pdflow.scenario.schema.workload import Arrival, Client, ConstantArrival, GammaArrival, Trace, Workload
from pdflow.workload import draws
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request
from pdflow.workload.rng import Rng
from pdflow.workload.traces.readers import load_model, read_trace
from pdflow.workload.traces.traces import sliced


def requests(workload: Workload, seed: int, base_dir: Path) -> Iterator[Request]:
    """Return the requests of a [workload] table, in order of arrival; without end if it has no count and no trace.

    Those of a table with sessions are `sessions.sessions`. Relative paths start at `base_dir`, the scenario file's
    folder. Raises TraceError, when the last request has been drawn, if lines of the trace are bad, and ModelFileError
    if a model file is none.
    """
    if workload.trace is not None:
        drawn = _from_trace(workload.trace, workload.arrival, seed, base_dir)
    elif workload.like is not None:
        drawn = load_model(workload.like, base_dir).requests(seed, rate_of(workload, base_dir))
    else:
        if workload.arrival is None or workload.input_tokens is None or workload.output_tokens is None:
            raise ValueError("a workload needs trace, like, or arrival with input_tokens and output_tokens")
        drawn = _synthetic(workload.arrival, workload.input_tokens, workload.output_tokens, Rng(seed))
    if (workload.input_factor, workload.output_factor) != (1.0, 1.0):
        drawn = _lengthened(drawn, workload.input_factor, workload.output_factor)
    if workload.client is not None and workload.client.cancel_after_s is not None:
        drawn = _some_leaving(drawn, workload.client, Rng(seed))
    return drawn if workload.requests is None else islice(drawn, workload.requests)


def rate_of(workload: Workload, base_dir: Path) -> float | None:
    """Return the requests per second that the scenario asks for; None with a trace, a closed loop or sessions."""
    if workload.sessions is not None:
        return None
    if workload.arrival is not None:
        return workload.arrival.rate_rps
    if workload.like is None or workload.rate_rps is not None:
        return workload.rate_rps
    return load_model(workload.like, base_dir).rate_rps * (workload.rate_scale or 1.0)


def burstiness_of(arrival: Arrival | None) -> float | None:
    """Return the burstiness of `vllm bench serve`: the shape of gamma gaps; None, for infinite, where they are even."""
    if isinstance(arrival, GammaArrival):
        return arrival.burstiness
    return None if isinstance(arrival, ConstantArrival) else 1.0


def _from_trace(trace: Trace, arrival: Arrival | None, seed: int, base_dir: Path) -> Iterator[Request]:
    """Return a trace's requests; with an arrival process, at its instants instead of their own."""
    rows = sliced(read_trace(trace, base_dir, seed, timed=arrival is None), trace)
    if arrival is None:
        return rows
    instants = draws.instants(arrival, Rng(seed))
    return (
        Request(row.index, at, row.input_tokens, row.output_tokens, row.prefix, row.class_)
        for row, at in zip(rows, instants, strict=False)
    )


def _lengthened(drawn: Iterator[Request], input_factor: float, output_factor: float) -> Iterator[Request]:
    """Yield the requests with other lengths. What they share stays the same, up to the end of the prompt."""
    for row in drawn:
        tokens = max(1, round(row.input_tokens * input_factor))
        yield msgspec.structs.replace(
            row,
            input_tokens=tokens,
            output_tokens=max(1, round(row.output_tokens * output_factor)),
            prefix=row.prefix[: -(-tokens // PREFIX_BLOCK_TOKENS)],
        )


def _some_leaving(drawn: Iterator[Request], client: Client, rng: Rng) -> Iterator[Request]:
    leaves_ns = draws.leaving(client, rng)
    for row in drawn:
        yield msgspec.structs.replace(row, leaves_ns=leaves_ns())


def _synthetic(arrival: Arrival, input_tokens: Length, output_tokens: Length, rng: Rng) -> Iterator[Request]:
    prompt = draws.length(input_tokens, rng.stream("input"))
    answer = draws.length(output_tokens, rng.stream("output"))
    for index, at in enumerate(draws.instants(arrival, rng)):
        yield Request(index, at, prompt(), answer())

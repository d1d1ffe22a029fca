"""The scenario's own requests, at a rate at which its engines are busy for a given share of their time.

Hops and messages take longer where cores have more to do than nothing: they are measured while such traffic goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Final

import attrs

from pdflow.cost.step import PS_PER_S, StepCost
from pdflow.protocol.values import S
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.schema.workload import PoissonArrival
from pdflow.workload.build import requests
from pdflow.workload.request import Request
from pdflow.workload.sessions import sessions

DRAWN: Final = 200
"""Requests, of whose lengths the load is the mean."""
TOGETHER: Final = 4
"""Sequences of a decode step, where that is not known."""


def drawn(scenario: ResolvedScenario, count: int, rate_rps: float) -> list[Request]:
    """Return the first `count` requests of the scenario, as if each came by itself. TraceError if lines of a trace are
    bad."""
    workload = scenario.workload
    if workload.sessions is None:
        arrival = PoissonArrival(rate_rps=rate_rps)
        own = attrs.evolve(workload, requests=count, arrival=arrival)
        return list(islice(requests(own, scenario.seed, scenario.base_dir), count))
    turns = (turn for session in sessions(workload, scenario.seed) for turn in session.turns)
    return [
        Request(number, round(number * S / rate_rps), turn.input_tokens, turn.output_tokens)
        for number, turn in enumerate(islice(turns, count))
    ]


def rate_at(scenario: ResolvedScenario, costs: Mapping[str, StepCost], share: float) -> float:
    """Return the requests per second at which the engines of the busiest pool are busy for this share of their time."""
    sample = drawn(scenario, DRAWN, 1.0)
    return share / max(busy_s(pool, costs[pool.name], sample) / pool.replicas for pool in scenario.pools)


def busy_s(pool: Pool, cost: StepCost, sample: Sequence[Request]) -> float:
    """Return the time for which a request occupies one engine of the pool, in the mean."""
    does = {"prefill": (_prefill_ps,), "decode": (_decode_ps,)}.get(pool.role, (_prefill_ps, _decode_ps))
    return fmean(sum(duration_ps(cost, request) for duration_ps in does) for request in sample) / PS_PER_S


def _prefill_ps(cost: StepCost, request: Request) -> float:
    tokens = request.input_tokens
    return cost.step_sums_ps(tokens, tokens * (tokens + 1) // 2, 0, 0)


def _decode_ps(cost: StepCost, request: Request) -> float:
    context = request.input_tokens + request.output_tokens // 2
    return request.output_tokens * cost.decode_step_ps(TOGETHER, TOGETHER * context) / TOGETHER

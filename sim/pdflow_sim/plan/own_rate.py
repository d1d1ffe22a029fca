"""`pdflow.max_rate`: the highest rate of a scenario's own cluster, whatever its pools are."""

from __future__ import annotations

import math

from pdflow.errors import PdflowError
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import OWN
from pdflow_sim.plan.max_rate import search_seeds
from pdflow_sim.plan.probes import Prober
from pdflow_sim.plan.request import level_of
from pdflow_sim.plan.traffic import Traffic

_TOLERANCE = 0.02


def max_rate(scenario: Scenario, slo: str | None, *, seeds: int, requests: int | None, jobs: int) -> float:
    """Return the mean over seeds of the highest rate that meets the service level. Raises ScenarioError."""
    traffic = Traffic.of(scenario, requests)
    with WorkerPool(jobs) as pool:
        prober = Prober(traffic, level_of(scenario, slo), pool)
        [searches] = search_seeds(prober, [OWN], requests=traffic.requests, seeds=seeds, tolerance=_TOLERANCE)
    for search in searches:
        if search.error is not None:
            raise PdflowError(search.error)
    return math.fsum(search.rate for search in searches) / seeds

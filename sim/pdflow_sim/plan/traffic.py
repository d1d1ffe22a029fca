"""The traffic that a plan is for: the scenario's own, at any multiple of its rate and with any number of requests."""

from __future__ import annotations

import itertools
from typing import Any, Final

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.workload import ClosedArrival, RampArrival
from pdflow.workload.build import rate_of, requests

NS_PER_S: Final = 10**9
MOST_REQUESTS: Final = 20_000
"""Of a workload that can have any number."""


@attrs.frozen
class Traffic:
    """The scenario's workload. `rate` is its own, in `unit`s per second; `requests` how many it has."""

    scenario: Scenario
    rate: float
    unit: str
    requests: int
    most_requests: int
    """The most requests of a run: a trace has no more than it has."""

    @staticmethod
    def of(scenario: Scenario, requests: int | None = None) -> Traffic:
        """Read the workload of a scenario; `requests` instead of as many as it has. Raises ScenarioError for one whose
        rate cannot be changed."""
        traffic = Traffic._own(scenario)
        return traffic if requests is None else attrs.evolve(traffic, requests=requests)

    @staticmethod
    def _own(scenario: Scenario) -> Traffic:
        workload, path = scenario.resolved.workload, scenario.resolved.path
        if isinstance(workload.arrival, ClosedArrival):
            message = "a closed loop has no rate to plan for; choose an arrival process with a rate, such as poisson"
            raise ScenarioError([Problem(path, "workload.arrival", message)])
        if workload.sessions is not None and workload.arrival is not None:
            return Traffic(scenario, workload.arrival.rate_rps, "sessions", workload.requests or 0, MOST_REQUESTS)
        rate = rate_of(workload, scenario.folder)
        count = workload.requests
        if rate is None or count is None:
            arrivals = [row.arrival_ns for row in itertools.islice(_drawn(scenario), count)]
            if len(arrivals) < 2 or arrivals[-1] == arrivals[0]:
                raise ScenarioError([Problem(path, "workload", "has no two requests, so no rate to plan for")])
            count = len(arrivals)
            rate = rate or (count - 1) * NS_PER_S / (arrivals[-1] - arrivals[0])
        most = count if workload.trace is not None else MOST_REQUESTS
        return Traffic(scenario, rate, "requests", count, max(count, most))

    def edits(self, rate: float, requests: int) -> dict[str, Any]:
        """Return the edits for the same traffic at another rate, with its first `requests` requests."""
        workload = self.scenario.resolved.workload
        factor = rate / self.rate
        edits: dict[str, Any] = {"workload.requests": requests}
        arrival = workload.arrival
        if isinstance(arrival, RampArrival):
            edits |= {f"workload.arrival.{key}": getattr(arrival, key) * factor for key in ("from_rps", "to_rps")}
        elif arrival is not None:
            edits["workload.arrival.rate_rps"] = arrival.rate_rps * factor if arrival.rate_rps else rate
        elif workload.like is not None:
            edits |= {"workload.rate_rps": rate, "workload.rate_scale": None}
        elif workload.trace is not None:
            edits["workload.trace.time_scale"] = workload.trace.time_scale / factor
        return edits


def _drawn(scenario: Scenario) -> Any:
    return requests(scenario.resolved.workload, scenario.seed, scenario.folder)

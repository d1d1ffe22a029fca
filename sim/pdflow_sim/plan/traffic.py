"""The traffic that a plan is for: the scenario's own, at any multiple of its rate and with any number of requests."""

from __future__ import annotations

import itertools
from typing import Any, Final

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.workload import ClosedArrival, DiurnalArrival, RampArrival
from pdflow.workload.build import rate_of, requests

NS_PER_S: Final = 10**9
MOST_REQUESTS: Final = 20_000
"""Of a workload that can have any number."""


_NOT_PLANNED: Final = {
    ClosedArrival: "a closed loop has no rate to plan for",
    RampArrival: "a rate that changes during the run has no highest value to search",
    DiurnalArrival: "a rate that changes during the run has no highest value to search",
}


@attrs.frozen
class Traffic:
    """The scenario's workload. `rate` is its own, in requests per second; `requests` how many it has."""

    scenario: Scenario
    rate: float
    requests: int
    most_requests: int
    """The most requests of a run: a trace has no more than it has."""

    @staticmethod
    def of(scenario: Scenario, requests: int | None = None) -> Traffic:
        """Read the workload of a scenario; `requests` instead of as many as it has. Raises ScenarioError for one whose
        rate cannot be changed."""
        traffic = Traffic._own(scenario)
        most = traffic.most_requests
        return traffic if requests is None else attrs.evolve(traffic, requests=min(requests, most))

    @staticmethod
    def _own(scenario: Scenario) -> Traffic:
        workload, path = scenario.resolved.workload, scenario.resolved.path
        for kind, why in _NOT_PLANNED.items():
            if isinstance(workload.arrival, kind):
                message = f"{why}; choose an arrival process with one rate, such as poisson"
                raise ScenarioError([Problem(path, "workload.arrival", message)])
        if workload.sessions is not None:
            message = "cannot be planned for: a run would have to outlast the users' pauses; use arrival or a trace"
            raise ScenarioError([Problem(path, "workload.sessions", message)])
        rate = rate_of(workload, scenario.folder)
        count = workload.requests
        if rate is None or count is None:
            arrivals = [row.arrival_ns for row in itertools.islice(_drawn(scenario), count)]
            if len(arrivals) < 2 or arrivals[-1] == arrivals[0]:
                raise ScenarioError([Problem(path, "workload", "has no two requests, so no rate to plan for")])
            count = len(arrivals)
            rate = rate or (count - 1) * NS_PER_S / (arrivals[-1] - arrivals[0])
        most = count if workload.trace is not None else MOST_REQUESTS
        return Traffic(scenario, rate, count, max(count, most))

    def edits(self, rate: float, requests: int) -> dict[str, Any]:
        """Return the edits for the same traffic at another rate, with its first `requests` requests."""
        workload = self.scenario.resolved.workload
        factor = rate / self.rate
        edits: dict[str, Any] = {"workload.requests": requests}
        arrival = workload.arrival
        if arrival is not None:
            edits["workload.arrival.rate_rps"] = arrival.rate_rps * factor if arrival.rate_rps else rate
        elif workload.like is not None:
            edits |= {"workload.rate_rps": rate, "workload.rate_scale": None}
        elif workload.trace is not None:
            edits["workload.trace.time_scale"] = workload.trace.time_scale / factor
        return edits


def _drawn(scenario: Scenario) -> Any:
    return requests(scenario.resolved.workload, scenario.seed, scenario.folder)

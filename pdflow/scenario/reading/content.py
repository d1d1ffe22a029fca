"""The content of a scenario that its hash is computed from, independent of the path of its file."""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.scenario.schema.scenario import ResolvedScenario


def content_of(scenario: ResolvedScenario) -> dict[str, Any]:
    """Return the scenario's values, without those of faults, clients, warm-up and the router that it leaves out."""
    content = attrs.asdict(attrs.evolve(scenario, path=""))
    del content["notes"]
    if not scenario.faults:
        del content["faults"], content["fault_table"]
    for key in ("sessions", "client", "warmup_s"):
        if not content["workload"][key]:
            del content["workload"][key]
    if not scenario.scales:
        del content["scales"]
    router_values = {key: value for key, value in content["router"].items() if value is not None}
    content["router"] = {**router_values, "max_attempts": scenario.router.attempts}
    return content

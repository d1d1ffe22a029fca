"""What makes a scenario this one and no other, to be hashed: what it says, wherever it lies."""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.scenario.schema.scenario import ResolvedScenario


def content_of(scenario: ResolvedScenario) -> dict[str, Any]:
    """Its values, without whatever it leaves unsaid of faults, clients, warm-up and the router."""
    content = attrs.asdict(attrs.evolve(scenario, path=""))
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

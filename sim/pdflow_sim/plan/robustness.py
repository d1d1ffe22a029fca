"""What a design survives: a lost engine, more traffic, a slow network, step times that are not as modelled.

Each is one run at the rate that the design is meant for, held against the same service level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.edits import faster_network
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.probes import UNCHANGED, Change, DesignProbe, Prober, ProbeResult

DRIFT: Final = 1.2
STEPS: Final = 1.25
_LOST_AFTER: Final = 0.4
"""An engine is lost when this share of the requests has arrived."""


@attrs.frozen
class Stress:
    """One thing that goes wrong; `lost` is the engine whose loss it is."""

    name: str
    change: Change = UNCHANGED
    rate_factor: float = 1.0
    lost: str = ""


@attrs.frozen
class StressResult:
    """What happened under a stress; None as the outcome if the design has no engine to lose."""

    stress: Stress
    outcome: ProbeResult | None

    @property
    def meets(self) -> bool:
        """Whether the service level was met all the same."""
        return self.outcome is not None and self.outcome.meets


def stresses_of(scenario: ResolvedScenario, duration_s: float) -> Iterator[Stress]:
    """Yield what a design is put under; `scenario` is the design's own, of which arrivals take `duration_s`."""
    yield Stress("as planned")
    for pool in scenario.pools:
        letter = {"prefill": "one P", "decode": "one D", "aggregated": "one engine"}[pool.role]
        crash = {"kind": "crash", "engine": f"{pool.name}-0", "at_s": round(_LOST_AFTER * duration_s, 3)}
        yield Stress(f"{letter} lost", Change({"fault": [crash]}), lost=pool.name)
    yield Stress("20 % more requests", rate_factor=DRIFT)
    workload = scenario.workload
    yield Stress("prompts 20 % longer", Change({"workload.input_factor": workload.input_factor * DRIFT}))
    yield Stress("answers 20 % longer", Change({"workload.output_factor": workload.output_factor * DRIFT}))
    slower = faster_network(scenario.network, 0.5)
    if slower and any(pool.role == "decode" for pool in scenario.pools):
        yield Stress("network at half speed", Change(slower))
    yield Stress("steps 25 % slower", step_times(scenario, STEPS))
    yield Stress("steps 25 % faster", step_times(scenario, 1 / STEPS))


def step_times(scenario: ResolvedScenario, factor: float) -> Change:
    """Return the change that makes all steps of all engines longer by a factor."""
    return Change({f"pool.{pool.name}.step_time_factor": pool.step_time_factor * factor for pool in scenario.pools})


def put_under_stress(prober: Prober, rows: Mapping[Design, tuple[float, int]]) -> dict[Design, list[StressResult]]:
    """Return what happens to each design under each stress; `rows` has the rate and the requests of each."""
    stresses: dict[Design, list[Stress]] = {}
    probes: dict[tuple[Design, str], DesignProbe] = {}
    for design, (rate, requests) in rows.items():
        scenario = prober.scenario_of(DesignProbe(design, rate, requests)).resolved
        stresses[design] = list(stresses_of(scenario, requests / rate))
        for stress in stresses[design]:
            if not stress.lost or _can_lose(scenario, stress):
                more = math.ceil(requests * stress.rate_factor)
                probes[design, stress.name] = DesignProbe(design, rate * stress.rate_factor, more, 0, stress.change)
    outcomes = dict(zip(probes, prober.run(list(probes.values())), strict=True))
    return {
        design: [StressResult(stress, outcomes.get((design, stress.name))) for stress in those]
        for design, those in stresses.items()
    }


def _can_lose(scenario: ResolvedScenario, stress: Stress) -> bool:
    return any(pool.name == stress.lost and pool.replicas > 1 for pool in scenario.pools)

"""Clusters with one resource that is too small by construction: the plan must name it, and its first lever mend it.

    python -m benchmarks.planning.planted

Prints a line for each, and exits with 1 if any resource is not named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs

from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import Planner, PlanRequest
from pdflow_sim.plan.space import Space

GPU: Final = "h100-sxm"
BASE: Final[Mapping[str, Any]] = {
    "scenario": {"name": "planted", "seed": 1},
    "model": {"preset": "llama-3.1-8b"},
    "transfer": {"method": "nixl-push"},
    "network": {"preset": "rdma-400g"},
    "router": {"policy": "least-loaded", "dispatch": "concurrent"},
}
LEVEL: Final = "ttft=2s@p95,itl=50ms@p99"


@attrs.frozen
class Case:
    """One cluster: what is too small, and the resources that may be named for it."""

    name: str
    expected: tuple[str, ...]
    prefill: int
    decode: int
    input_tokens: int
    output_tokens: int
    edits: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def scenario(self) -> Scenario:
        """The cluster under Poisson arrivals."""
        pools = [
            {"name": role, "role": role, "replicas": replicas, "gpu": GPU}
            for role, replicas in (("prefill", self.prefill), ("decode", self.decode))
        ]
        workload = {
            "requests": 600,
            "arrival": {"process": "poisson", "rate_rps": 4.0},
            "input_tokens": {"dist": "uniform", "low": self.input_tokens // 2, "high": self.input_tokens * 3 // 2},
            "output_tokens": {"dist": "uniform", "low": self.output_tokens // 2, "high": self.output_tokens * 3 // 2},
        }
        return Scenario.from_dict({**BASE, "workload": workload, "pool": pools}).with_(self.edits)


CASES: Final = (
    Case("posting lane", ("posting of descriptors",), 4, 2, 2000, 64, {"network.per_descriptor_s": 40e-6}),
    Case("10 GB/s links", ("network bandwidth",), 8, 1, 8000, 16, {"network.bandwidth_bytes_per_s": 10 * 10**9}),
    Case("too few D", ("the number of D",), 6, 1, 1000, 600),
    Case("KV memory of D", ("KV memory of D",), 6, 2, 4000, 400, {"pool.decode.kv_tokens": 40_000}),
)


def planned(case: Case) -> PlanOutcome:
    """Return the plan of a case's own cluster."""
    space = Space((GPU,), tp=(), xpyd=False, ep=False, kinds=("disaggregated",))
    request = PlanRequest(
        level=ServiceLevel.parse(LEVEL), gpus=case.prefill + case.decode, space=space, options=(), seeds=1, robust=False
    )
    return Planner(case.scenario, request, WorkerPool(2)).run()


def main() -> int:
    """Plan each case, and print what is named."""
    named = 0
    for case in CASES:
        outcome = planned(case)
        best, levers = outcome.best, outcome.levers
        assert best is not None
        found = levers[0].lever.resource in case.expected
        named += found
        gains = ", ".join(f"{it.lever.name} {it.gain:+.0%}" for it in levers[:3])
        print(f"{case.name:<15} {'named' if found else 'NOT NAMED'}: {best.rate:.2f}/s; {gains}")
    print(f"{named} of {len(CASES)}")
    return 0 if named == len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What finalists are put under stress with, and what would help them."""

from __future__ import annotations

from pathlib import Path

import pdflow
from pdflow.results.figures.service_level import ServiceLevel
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import Design, EngineShape, PoolShape
from pdflow_sim.plan.levers import levers_of
from pdflow_sim.plan.max_rate import RateSearch, search_together
from pdflow_sim.plan.probes import Prober
from pdflow_sim.plan.robustness import put_under_stress, stresses_of
from pdflow_sim.plan.traffic import Traffic

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINE = EngineShape("h100-sxm")
DESIGN = Design((PoolShape("prefill", ENGINE, 2), PoolShape("decode", ENGINE, 1)))


def test_a_design_at_its_limit_does_not_survive_a_fifth_more_requests() -> None:
    scenario = pdflow.load(EXAMPLES / "conversation.toml", {"workload.requests": 300})
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(scenario), ServiceLevel.parse("ttft=4s@p90"), pool)
        search = RateSearch(DESIGN, 300, 1.0, 0.02)
        search_together(prober, [search])
        assert search.met is not None
        requests = search.met.probe.requests
        found = put_under_stress(prober, {DESIGN: (search.met.rate, requests)})[DESIGN]
    met = {result.stress.name: result.meets for result in found}
    assert met["as planned"]
    assert not met["20 % more requests"]
    assert not met["prompts 20 % longer"]
    assert not met["steps 25 % slower"]
    assert met["steps 25 % faster"]
    [lost] = [result for result in found if result.stress.name == "one D lost"]
    assert lost.outcome is None, "there is no other D"
    [lost] = [result for result in found if result.stress.name == "one P lost"]
    assert lost.outcome is not None
    assert "ttft_p99_after_ms" in lost.outcome.figures


def test_a_network_that_is_limited_by_its_links_alone_has_a_lever_and_a_stress() -> None:
    scenario = pdflow.load(EXAMPLES / "shared-link.toml").resolved
    assert scenario.network.bandwidth_bytes_per_s is None
    [link] = scenario.network.links
    [lever] = [lever for lever in levers_of(DESIGN, scenario) if lever.resource == "network bandwidth"]
    [stress] = [stress for stress in stresses_of(scenario, 10.0) if stress.name == "network at half speed"]
    assert link.bandwidth_bytes_per_s is not None
    assert lever.change.edits["network.links"][0]["bandwidth_bytes_per_s"] == 2 * link.bandwidth_bytes_per_s
    assert stress.change.edits["network.links"][0]["bandwidth_bytes_per_s"] == link.bandwidth_bytes_per_s // 2

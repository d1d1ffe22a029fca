"""The highest rate within a service level: by queueing theory, and what a search does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdflow
from pdflow.results.figures.service_level import ServiceLevel
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.designs import OWN
from pdflow_sim.plan.max_rate import RateSearch, search_together
from pdflow_sim.plan.probes import Prober
from pdflow_sim.plan.traffic import Traffic

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = Path(__file__).parents[1] / "small.toml"


def test_the_highest_rate_of_a_queue_is_that_of_pollaczek_and_khinchine() -> None:
    """M/D/1 with s = 0.1 s: the mean TTFT is s + rho s / (2 (1 - rho)), which is 200 ms at rho = 2/3."""
    rate = pdflow.max_rate(EXAMPLES / "md1.toml", "ttft=200ms@mean", requests=3_000)
    assert rate == pytest.approx(20 / 3, rel=0.06)


def test_no_rate_meets_what_an_idle_cluster_misses_and_few_runs_find_it() -> None:
    scenario = pdflow.load(SMALL)
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(scenario), ServiceLevel.parse("ttft=19ms@p50"), pool)
        search = RateSearch(OWN, 40, 50.0, 0.02)
        search_together(prober, [search])
    assert search.rate == 0
    assert len(prober.outcomes) <= 4


def test_a_search_ends_within_its_tolerance_of_a_rate_that_misses() -> None:
    scenario = pdflow.load(SMALL)
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(scenario, 200), ServiceLevel.parse("ttft=60ms@p90"), pool)
        search = RateSearch(OWN, 200, 10.0, 0.02)
        search_together(prober, [search])
    assert search.met is not None
    assert search.missed is not None
    assert search.met.scale <= 1 < search.missed.scale
    assert search.met.rate <= search.rate <= search.missed.rate <= search.met.rate * 1.02


def test_runs_outlast_the_answers_however_few_requests_are_asked_for() -> None:
    """Few requests that arrive at once wait for less than the bound, and any rate would seem to be served."""
    scenario = pdflow.load(SMALL).with_({"workload.output_tokens": 100, "pool.d.max_num_seqs": 4, "pool.d.replicas": 1})
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(scenario), ServiceLevel.parse("e2e=5s@p90"), pool)
        search = RateSearch(OWN, 4, 2.0, 0.05)
        search_together(prober, [search])
    # Four sequences of 100 steps of 5 ms each: 8 requests per second.
    assert search.rate < 12
    assert search.met is not None
    assert search.met.probe.requests > 4


def test_a_probe_is_run_once() -> None:
    scenario = pdflow.load(SMALL)
    with WorkerPool(1) as pool:
        prober = Prober(Traffic.of(scenario), ServiceLevel.parse("ttft=60ms@p90"), pool)
        for _ in range(2):
            search_together(prober, [RateSearch(OWN, 40, 10.0, 0.02)])
            runs = len(prober.outcomes)
    assert prober.requests == sum(probe.requests for probe in prober.outcomes)
    assert len(prober.outcomes) == runs


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"workload.arrival": {"process": "closed", "concurrency": 4}}, "a closed loop has no rate to plan for"),
        (
            {"workload.arrival": {"process": "ramp", "from_rps": 1.0, "to_rps": 8.0, "over_s": 60.0}},
            "a rate that changes during the run",
        ),
        ({"workload.arrival": {"process": "diurnal", "rate_rps": 4.0}}, "a rate that changes during the run"),
        (
            {"workload.sessions": {"turns": 3, "think_s": 5.0, "new_tokens": 20}},
            "a run would have to outlast the users' pauses",
        ),
    ],
)
def test_traffic_without_one_rate_is_refused_with_what_to_do(edits: dict[str, object], message: str) -> None:
    with pytest.raises(pdflow.ScenarioError, match=message):
        pdflow.max_rate(pdflow.load(SMALL).with_(edits), "ttft=1s")


def test_a_first_rate_far_above_what_can_be_served_is_no_reason_to_give_up() -> None:
    """All requests arrive at once, and wait as long at half of that rate."""
    scenario = pdflow.load(EXAMPLES / "md1.toml", {"workload.arrival.rate_rps": 1000.0})
    assert pdflow.max_rate(scenario, "ttft=200ms@mean", requests=2_000) == pytest.approx(20 / 3, rel=0.08)


def test_requests_of_the_warm_up_do_not_make_a_rate_seem_to_be_served() -> None:
    scenario = pdflow.load(SMALL, {"workload.warmup_s": 1.0})
    cold, warm = (pdflow.max_rate(it, "ttft=100ms@p90", requests=200) for it in (pdflow.load(SMALL), scenario))
    assert warm == pytest.approx(cold, rel=0.25)


def test_a_scenario_without_bounds_needs_a_level() -> None:
    with pytest.raises(pdflow.ScenarioError, match="say what must be met"):
        pdflow.max_rate(SMALL)
    assert pdflow.max_rate(pdflow.load(SMALL).with_({"slo.ttft_ms": 60.0})) > 0

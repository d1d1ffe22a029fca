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


def test_a_closed_loop_is_refused_with_what_to_do() -> None:
    scenario = pdflow.load(SMALL).with_({"workload.arrival": {"process": "closed", "concurrency": 4}})
    with pytest.raises(pdflow.ScenarioError, match="a closed loop has no rate to plan for"):
        pdflow.max_rate(scenario, "ttft=1s")


def test_a_scenario_without_bounds_needs_a_level() -> None:
    with pytest.raises(pdflow.ScenarioError, match="say what must be met"):
        pdflow.max_rate(SMALL)
    assert pdflow.max_rate(pdflow.load(SMALL).with_({"slo.ttft_ms": 60.0})) > 0

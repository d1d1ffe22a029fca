"""`pdflow bench` against a real cluster of the same file, beside its simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdflow_sim.run
from pdflow.results.comparison.compare import Comparisons
from pdflow.results.files.read import read_runs
from pdflow.scenario.reading.load import load
from pdflow_runtime.bench.asked import BenchOptions
from tests.runtime.bench.stub import run
from tests.runtime.support.served import ROOT, served

pytestmark = [pytest.mark.slow, pytest.mark.trio]

QUICKSTART = ROOT / "examples/serve-quickstart.toml"
SYNTHETIC = (
    "pool.prefill.engine=synthetic",
    "pool.decode.engine=synthetic",
    "workload.arrival.rate_rps=8.0",
    "workload.requests=24",
)
"""As long as its costs say: no weights, so it is up at once and takes no core."""
SESSIONS = ("workload.sessions.turns=3", "workload.sessions.think_s=0.05", "workload.sessions.new_tokens=20")


async def test_a_cluster_and_its_simulation_serve_the_same_requests(tmp_path: Path) -> None:
    with served(tmp_path, QUICKSTART, *SYNTHETIC) as cluster:
        ran = await run(cluster.port, scenario=str(QUICKSTART), overrides=SYNTHETIC)
        talk = await run(cluster.port, scenario=str(QUICKSTART), overrides=(*SYNTHETIC, *SESSIONS))
    ran.save(BenchOptions(out=str(tmp_path / "live")))
    pdflow_sim.run.simulate(load(str(QUICKSTART), overrides=SYNTHETIC), out=str(tmp_path / "simulated"), quiet=True)
    [one] = Comparisons.of([read_runs(tmp_path / "simulated"), read_runs(tmp_path / "live")]).against_first
    assert one.how == "paired requests"
    for result in (ran, talk):
        records = result.ledger.records
        assert records.outcome == ["completed"] * 24, records.reason
        assert [len(itls) + 1 for itls in result.ledger.itls_ns] == records.output_tokens
    assert max(turn for _, turn in talk.ledger.records.sessions) == 3

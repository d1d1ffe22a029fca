"""Calibration finds the engine that was watched, and says what is wrong with what it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.cost.scale import Factors, scaled
from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.costs.step_costs import step_cost
from pdflow_sim.experiments.calibrate import calibrate, latencies_ms, ran
from pdflow_sim.experiments.seen import MeasuredRequest, read_seen

ALONE = Path(__file__).parents[1] / "alone.toml"
TRAFFIC = {
    "workload.requests": 120,
    "workload.arrival": '{ process = "poisson", rate_rps = 8.0 }',
    "workload.input_tokens": "{ dist = 'uniform', low = 200, high = 3000 }",
    "workload.output_tokens": "{ dist = 'uniform', low = 50, high = 200 }",
    "pool.w.cost": '{ model = "roofline" }',
    "pool.w.kv_tokens": 400_000,
    "pool.w.max_num_batched_tokens": 2048,
}


@pytest.mark.slow
@pytest.mark.parametrize("truth", [Factors(linear=1.25, host_ps=2 * 10**9), Factors(linear=0.8, attention=1.5)])
def test_ten_measured_requests_predict_the_others(lay: Callable[..., Any], truth: Factors) -> None:
    scenario = lay(TRAFFIC, ALONE)
    pool = scenario.pools[0]
    real = ran(scenario, {pool.name: scaled(step_cost(scenario.model, pool, scenario.base_dir), truth)})
    took = [latencies_ms(real, request) for request in range(120)]
    found = calibrate(scenario, pool, [MeasuredRequest(request, *took[request]) for request in range(0, 120, 12)])
    again = ran(scenario, {pool.name: found.cost})
    ratios = [
        (a / b, c / d)
        for (a, c), (b, d) in zip((latencies_ms(again, request) for request in range(120)), took, strict=True)
        if a and b and c and d
    ]
    assert len(ratios) == 120
    # At low load a request's TTFT depends on which step its arrival catches.
    for which, most in ((0, 0.06), (1, 0.03)):
        assert sorted(abs(ratio[which] - 1) for ratio in ratios)[60] < most
    assert found.after.tpot is not None
    assert found.before.tpot is not None
    assert found.after.tpot < found.before.tpot


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected the columns"),
        ("request,ttft_ms\n", "has no requests"),
        ("request,ttft_ms\n7,1\n", "expected a number below 5"),
        ("request,ttft_ms\n1,1\n1,2\n", "occurs twice"),
        ("request,tpot_ms\n1,-4\n", "expected milliseconds above 0"),
        ("request,tpot_ms\n1,nan\n", "expected milliseconds above 0"),
        ("request,tpot_ms\n1,soon\n", "expected milliseconds above 0"),
        ("request,tpot_ms\n1," + "9" * 200_000 + "\n", "cannot be read: field larger"),
    ],
)
def test_an_error_in_a_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "seen.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=message):
        read_seen(path, 5)


def test_the_command_writes_a_cost_that_a_pool_takes(tmp_path: Path) -> None:
    (tmp_path / "seen.csv").write_text("request,ttft_ms,tpot_ms\n0,40,9\n1,,9\n")
    sets = [
        argument
        for key, value in (TRAFFIC | {"workload.requests": 4}).items()
        for argument in ("--set", f"{key}={value}")
    ]
    out = tmp_path / "cost.json"
    done = CliRunner().invoke(cli, ["calibrate", str(ALONE), str(tmp_path / "seen.csv"), "-o", str(out), *sets])
    assert done.exit_code == 0, done.output
    assert "TPOT: median error of these requests" in done.output
    taken = load(ALONE, overrides=[f'pool.w.cost={{ model = "measured", path = "{out}" }}'])
    assert "calibrated on 2 requests" in step_cost(taken.model, taken.pools[0], taken.base_dir).provenance


def test_a_bar_is_no_better_than_the_fit(lay: Callable[..., Any]) -> None:
    scenario = lay(TRAFFIC | {"workload.requests": 3}, ALONE)
    found = calibrate(scenario, scenario.pools[0], [MeasuredRequest(0, None, 9000.0), MeasuredRequest(1, None, 1.0)])
    assert found.cost.rel_error["tpot"].startswith("unknown; the fitted requests differ by")
    assert found.cost.rel_error["ttft"] == "unknown: no measured request"


def test_the_pool_must_be_named_where_there_are_two(tmp_path: Path) -> None:
    (tmp_path / "seen.csv").write_text("request,ttft_ms\n0,40\n")
    small = ALONE.with_name("small.toml")
    done = CliRunner().invoke(
        cli, ["calibrate", str(small), str(tmp_path / "seen.csv"), "-o", str(tmp_path / "c.json")]
    )
    assert done.exit_code == 2
    assert "--pool is missing; this scenario has p, d" in done.output

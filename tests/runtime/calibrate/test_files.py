"""What calibration writes is a scenario that loads, and says what was measured."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs
import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.cost.fit import Misfit
from pdflow.cost.step import LinearTable, StepCost
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.scenario import MeasuredCost
from pdflow_runtime.calibrate.delays import LinkValues
from pdflow_runtime.calibrate.files import Measured, UnlikelyError, write
from pdflow_runtime.calibrate.steps import StepFit
from pdflow_runtime.calibrate.traffic import busy_s, drawn, rate_at

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LINKS = LinkValues(
    bandwidth_bytes_per_s=None,
    latency_s=12e-6,
    per_message_s=34e-6,
    per_descriptor_s=1.5e-9,
    control_latency_s=78e-6,
    handshake_s=None,
    http_latency_s=90e-6,
)


def cost(step_ms: int) -> StepCost:
    return StepCost(linear=LinearTable(tokens=(1, 2), ps=(step_ms * 10**9, step_ms * 10**9)))


def measured() -> Measured:
    fits = {name: StepFit(cost(ms), Misfit(0.02, 0.1, 0.3, 0.0), 500, 40) for name, ms in DECODES_TAKE.items()}
    return Measured(steps=fits, api_server_s={"prefill": 1e-3, "decode": 2e-3}, links=LINKS, requests=9, transfers=8)


DECODES_TAKE = {"prefill": 50, "decode": 10}


def test_a_calibrated_scenario_has_the_measured_values_and_keeps_all_others(tmp_path: Path) -> None:
    before = Scenario.load(EXAMPLES / "serve-quickstart.toml")
    written = write(tmp_path / "out", before, measured(), "pdflow calibrate")
    after = Scenario.load(tmp_path / "out" / "scenario.toml")
    assert {path.name for path in written} == {"scenario.toml", "cost-prefill.json", "cost-decode.json", "links.toml"}
    was, now = before.resolved, after.resolved
    network = now.network
    assert (network.latency_s, network.per_message_s, network.bandwidth_bytes_per_s) == (12e-6, 34e-6, None)
    assert network.handshake_s == was.network.handshake_s
    assert network.coalesce
    assert not network.poll
    assert (was.workload, was.transfer, was.router) == (now.workload, now.transfer, now.router)
    assert (was.base_dir / (was.serve.model or "")).samefile(now.base_dir / (now.serve.model or ""))
    assert was.serve == attrs.evolve(now.serve, model=was.serve.model)
    for pool, expected_s in zip(now.pools, (1e-3, 2e-3), strict=True):
        # Beside it, so that the folder can be sent to somebody.
        assert pool.cost == MeasuredCost(path=f"cost-{pool.name}.json")
        assert pool.api_server_s == expected_s
        assert not pool.async_scheduling


def test_times_that_no_engine_has_are_refused_in_a_sentence(tmp_path: Path) -> None:
    wild = {name: attrs.evolve(fit, cost=attrs.evolve(fit.cost, a2=10**7)) for name, fit in measured().steps.items()}
    with pytest.raises(UnlikelyError, match=r"pool prefill: step_ps\.a2: is 10000000, .*measure again"):
        write(
            tmp_path,
            Scenario.load(EXAMPLES / "serve-quickstart.toml"),
            attrs.evolve(measured(), steps=wild),
            "pdflow calibrate",
        )


def test_links_are_values_of_a_network_table(tmp_path: Path) -> None:
    write(tmp_path, Scenario.load(EXAMPLES / "serve-quickstart.toml"), measured(), "pdflow calibrate")
    links = tomllib.loads((tmp_path / "links.toml").read_text())
    assert links["source"].startswith("pdflow calibrate")
    Network(**links["values"], handshake_s=0.0)


def test_a_rate_is_that_of_the_busiest_pool() -> None:
    """A prompt takes 50 ms of one of two P; answers take 10 ms a token, four at once, of one of two D."""
    scenario = Scenario.load(EXAMPLES / "serve-quickstart.toml").resolved
    costs = {name: cost(ms) for name, ms in DECODES_TAKE.items()}
    tokens = sum(request.output_tokens for request in drawn(scenario, 200, 1.0)) / 200
    assert tokens * 10e-3 / 4 > 50e-3
    assert rate_at(scenario, costs, 0.5) == pytest.approx(0.5 * 2 / (tokens * 10e-3 / 4))


def test_turns_of_sessions_come_one_by_one() -> None:
    scenario = Scenario.load(EXAMPLES / "sessions.toml").resolved
    requests = drawn(scenario, 5, 4.0)
    assert [request.arrival_ns for request in requests] == [0, 250_000_000, 500_000_000, 750_000_000, 10**9]


def test_who_does_both_is_busy_with_both() -> None:
    scenario = Scenario.load(EXAMPLES / "serve-quickstart.toml").resolved
    sample = drawn(scenario, 50, 1.0)
    prefill, decode = scenario.pools
    both = attrs.evolve(prefill, role="aggregated")
    spent = [busy_s(pool, cost(10), sample) for pool in (prefill, decode, both)]
    assert spent[2] == pytest.approx(spent[0] + spent[1])

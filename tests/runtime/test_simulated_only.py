"""A live cluster says at its start which keys only simulations honour, and repeats the scenario's notes."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.scenario.reading.load import load
from pdflow_runtime.process import cluster, component, one_host
from pdflow_runtime.simulated_only import live_notes, simulated_only

REFERENCE = str(Path(__file__).resolve().parents[2] / "examples/reference.toml")
SIMULATED = (
    "transfer.connector=sglang",
    "noise.links=0.2",
    "pool.decode.api_server_s_per_token=1e-6",
)
LISTED = "no effect in a live cluster, in simulations only: "
KEYS = "transfer.connector, noise.links, pool.decode.api_server_s_per_token"


def keys(*overrides: str) -> list[str]:
    return simulated_only(load(REFERENCE, overrides=overrides))


def test_defaults_are_not_listed() -> None:
    assert keys() == []
    assert keys("noise.links=0.4", "pool.decode.api_server_s_per_token=0") == []
    assert list(live_notes(load(REFERENCE))) == []


def test_keys_that_only_simulations_honour_are_listed_once() -> None:
    scenario = load(REFERENCE, overrides=(*SIMULATED, "transfer.num_workers=3"))
    own, listed = live_notes(scenario)
    assert "transfer.num_workers: has no effect: " in own
    assert listed == LISTED + KEYS


def test_a_router_that_weighs_transfers_computes_them_with_the_connector_and_the_api_servers() -> None:
    auto = ("router.disaggregate_above_tokens=auto", "router.dispatch=sequential")
    assert keys(*SIMULATED, *auto) == ["noise.links"]


def test_the_step_times_of_engines_that_compute_a_model_are_simulated_only() -> None:
    cost = 'pool.decode.cost={ model = "constant", decode_step_s = 0.1 }'
    torch = ('pool.decode.engine="torch"', 'pool.prefill.engine="torch"')
    assert keys(cost) == []
    assert keys(cost, *torch) == ["pool.decode.cost"]


def test_the_command_logs_the_notes_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(supervisor: cluster.Cluster, up: Callable[[str], None]) -> None:
        up("http://127.0.0.1:1")

    monkeypatch.setattr(one_host, "log_to_stderr", lambda component: None)
    monkeypatch.setattr(cluster.Cluster, "run", run)
    caplog.set_level(logging.INFO)
    assert one_host.main(REFERENCE, (*SIMULATED, "serve.port=0")) == 0
    assert f"note: {LISTED}{KEYS}" in caplog.messages
    assert caplog.messages[-1].startswith("cluster is up")


@pytest.mark.parametrize(("who", "child", "logs"), [("router", False, 1), ("router", True, 0), ("decode-0", False, 0)])
def test_of_components_that_are_started_one_by_one_the_router_logs_the_notes(
    who: str, child: bool, logs: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(scenario: Any) -> None:
        pass

    monkeypatch.setattr(component, "log_to_stderr", lambda component: None)
    caplog.set_level(logging.INFO)
    asked = Namespace(scenario=REFERENCE, overrides=SIMULATED, child=child)
    assert component.run_component(asked, who, serve) == 0
    assert caplog.messages.count(f"note: {LISTED}{KEYS}") == logs

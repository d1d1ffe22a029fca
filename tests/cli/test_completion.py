"""What a shell completes, through click's own machinery."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from pdflow.cli import cli
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.presets import ALIASES, presets

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples/conversation.toml")


def completed(*words: str) -> list[str]:
    *before, incomplete = words
    shell = ShellComplete(cli, {}, "pdflow", "_PDFLOW_COMPLETE")
    return [item.value for item in shell.get_completions(before, incomplete)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("router.pol", ["router.policy="]),
        ("pool.decode.rep", ["pool.decode.replicas="]),
        ("pool.prefill.gpu.pre", ["pool.prefill.gpu.preset="]),
        ("router.policy=least", ["router.policy=least-loaded"]),
        ("pool.decode.gpu=h100", ["pool.decode.gpu=h100-sxm", "pool.decode.gpu=h100"]),
        ("network.preset=tcp", ["network.preset=tcp-100g", "network.preset=tcp-25g"]),
        ("workload.arrival.process=po", ["workload.arrival.process=poisson"]),
        (
            "pool.decode.enable_prefix_caching=",
            [f"pool.decode.enable_prefix_caching={value}" for value in ("true", "false")],
        ),
        ("transfer.method=nixl-push,nixl-pul", ["transfer.method=nixl-push,nixl-pull"]),
        ("workload.requests=", []),
        ("no.such=", []),
    ],
)
def test_keys_of_set_and_their_values(written: str, expected: list[str]) -> None:
    for command in ("simulate", "validate", "sweep"):
        found = completed(command, EXAMPLE, "--set", written)
        assert found[: len(expected)] == expected
        assert all(value.startswith(written) for value in found)
        assert bool(found) == bool(expected)


def test_pools_are_those_of_the_scenario_that_is_named(tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text('[[pool]]\nname = "big"\n[[pool]]\nname = "small"\n')
    assert completed("simulate", str(scenario), "--set", "pool.big.t") == ["pool.big.tp="]
    assert completed("simulate", str(scenario), "--set", "pool.decode.t") == []
    assert completed("simulate", "absent.toml", "--set", "pool.decode.tp") == ["pool.decode.tp="]


def test_every_key_that_is_completed_can_be_set() -> None:
    """Those of one kind of table need its kind; a key that leads nowhere would be an unknown one."""
    for key in completed("validate", EXAMPLE, "--set", "router."):
        assert key.startswith("router.")
    assert {f"pool.decode.{key}=" for key in ("tp", "pp", "gpu", "cost", "replicas")} <= set(
        completed("validate", EXAMPLE, "--set", "pool.decode.")
    )


def test_presets_and_methods() -> None:
    names = {*presets("models"), *presets("gpus"), *presets("links"), *ALIASES["gpus"]}
    assert set(completed("presets", "")) == names
    assert completed("presets", "b2") == ["b200", "b200-sxm"]
    assert completed("methods", "") == list(METHODS)

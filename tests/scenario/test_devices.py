"""Where the engines of a pool compute: the keys, and what they need from each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/serve-gpu.toml"


def test_the_keys() -> None:
    scenario = load(EXAMPLE, overrides=["pool.decode.devices=[1, 0]"])
    assert [(pool.device, pool.devices) for pool in scenario.pools] == [("cuda", ()), ("cuda", (1, 0))]
    assert scenario.transfer.kv_buffer_device == "cuda"
    reference = load(EXAMPLE.with_name("reference.toml"))
    assert {(pool.device, pool.devices) for pool in reference.pools} == {("cpu", ())}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "pool.decode.engine=synthetic",
            'is "cuda", expected "cpu", or engine = "torch": a synthetic engine computes nothing',
        ),
        (
            "pool.decode.device=cpu",
            'is set, expected it only with device = "cuda": it numbers GPUs',
        ),
        ("pool.decode.device=gpu", 'is "gpu", expected one of cpu, cuda (did you mean cpu?)'),
        ("pool.decode.devices=[0.5, 1]", "is 0.5, expected an integer"),
    ],
)
def test_what_is_refused(override: str, problem: str) -> None:
    numbered = () if "engine" in override else ("pool.decode.devices=[0, 1]",)
    with pytest.raises(ScenarioError) as caught:
        load(EXAMPLE, overrides=[*numbered, override])
    assert [found.message for found in caught.value.problems] == [problem]

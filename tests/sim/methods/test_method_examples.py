"""Every method has an example that runs in both of its dialects, and is the only thing to change in any other file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.scenario import load

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXCEPT_NIXL = [name for name in METHODS if not name.startswith("nixl")]
"""Push and pull are what the other examples are about."""


@pytest.mark.parametrize("dialect", ["strict", "as-published"])
@pytest.mark.parametrize("name", EXCEPT_NIXL)
def test_its_example_runs(name: str, dialect: str, play: Callable[..., Any]) -> None:
    few = {"workload.requests": 25, "transfer.dialect": dialect}
    world = play(few, file=EXAMPLES / "methods" / f"{name}.toml")
    assert set(world.records.outcome) == {"completed"}, world.records.reason
    assert load(EXAMPLES / "methods" / f"{name}.toml").transfer.method == name


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("file", ["reference.toml", "shared-link.toml", "md1.toml"])
def test_swapping_the_method_is_the_only_edit(name: str, file: str, play: Callable[..., Any]) -> None:
    few = {"workload.requests": 12, "transfer.method": name}
    if file == "shared-link.toml":
        few["pool.prefill.replicas"] = 4
    world = play(few, file=EXAMPLES / file)
    assert set(world.records.outcome) == {"completed"}, world.records.reason


@pytest.mark.parametrize("name", EXCEPT_NIXL)
@pytest.mark.parametrize("dialect", ["vllm-compat", "vllm-stock"])
def test_a_dialect_that_a_method_does_not_speak_is_refused_where_it_stands(name: str, dialect: str) -> None:
    file = EXAMPLES / "methods" / f"{name}.toml"
    with pytest.raises(ScenarioError) as caught:
        load(file, overrides=[f"transfer.dialect={dialect}"])
    [problem] = caught.value.problems
    assert problem.path == "transfer.dialect"
    assert f'is "{dialect}", expected strict or as-published' in problem.message

"""Small worlds: one scenario file, overrides as `--set` takes them, run to the last timer under the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pdflow.results.files.write import request_lines
from pdflow.scenario import ResolvedScenario, load
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World

HERE = Path(__file__).parent

Overrides: TypeAlias = dict[str, Any]
Play: TypeAlias = Callable[..., World]


def _texts(overrides: Overrides) -> Iterable[str]:
    for key, value in overrides.items():
        yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _lay(overrides: Overrides, file: Path = HERE / "small.toml") -> ResolvedScenario:
    return load(file, overrides=_texts(overrides))


def _play(
    overrides: Overrides,
    *,
    file: Path = HERE / "small.toml",
    exact: bool = False,
    checked: bool = True,
    prepared: Callable[[World], None] = lambda world: None,
    observe: Callable[..., None] | None = None,
) -> World:
    options = RunOptions(exact=exact, check_invariants=checked, drain=True)
    world, oracle = prepare(_lay(overrides, file), options, [] if observe is None else [observe])
    prepared(world)
    assert not run(world, oracle, drain=True)
    return world


@pytest.fixture(scope="session")
def lay() -> Callable[..., ResolvedScenario]:
    """A scenario from overrides of small.toml, or of `file`."""
    return _lay


@pytest.fixture(scope="session")
def play() -> Play:
    """Run it until nothing is left to happen; the oracle watches, and everything must be empty at the end.

    `prepared(world)` is called before time begins.
    """
    return _play


@pytest.fixture(scope="session")
def lines() -> Callable[[World], bytes]:
    """What requests.jsonl would say."""
    return lambda world: b"".join(request_lines(world.records))

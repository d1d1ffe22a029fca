"""pdflow: prefill/decode-disaggregated LLM serving, one KV-transfer state machine checked, simulated and served.

`pdflow.simulate("scenario.toml")` runs a scenario and gives a Result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from pdflow.errors import PdflowError, ScenarioError
    from pdflow.results.result import Result
    from pdflow.scenario import Scenario, load

__all__ = ["PdflowError", "Scenario", "ScenarioError", "load", "simulate"]

_HOMES = {
    "PdflowError": "pdflow.errors",
    "ScenarioError": "pdflow.errors",
    "Scenario": "pdflow.scenario",
    "load": "pdflow.scenario",
}


def __getattr__(name: str) -> object:
    """What is exported is imported when it is first asked for: `pdflow --help` must stay quick."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pdflow' has no attribute {name!r}")


def simulate(
    scenario: str | Path,
    *,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    exact: bool = False,
    events: bool = False,
    check_invariants: bool = False,
    save_detailed: bool = False,
) -> Result:
    """Run a scenario file in the simulated world.

    Args:
        scenario: path of the TOML file.
        seed: instead of the scenario's own.
        overrides: values by dotted key, as in {"router.policy": "least-loaded", "pool.decode.replicas": 8}.
        out: a folder for results.json and requests.jsonl; nothing is written without it.
        exact: advance token by token; slow, and the same results.
        events: write events.jsonl too; needs `out`.
        check_invariants: hold the safety invariants against every event.
        save_detailed: put each request's lengths and times into results.json; needs `out`.

    Raises:
        ScenarioError: the file is wrong; lists every problem with its line.
        InvariantError: an invariant did not hold.
    """
    from importlib import import_module

    if out is None and (events or save_detailed):
        raise ValueError("events and save_detailed write into a folder: say which with out=...")
    run = import_module("sim.run").load_and_run(
        str(scenario),
        overrides=[f"{key}={_toml(value)}" for key, value in (overrides or {}).items()],
        seed=seed,
        out=None if out is None else str(out),
        exact=exact,
        events=events,
        check_invariants=check_invariants,
        save_detailed=save_detailed,
    )
    result: Result = run.result
    return result


def _toml(value: Any) -> str:
    """A Python value as TOML says it, so that it is read back as what it was."""
    from json import dumps

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return dumps(str(value))

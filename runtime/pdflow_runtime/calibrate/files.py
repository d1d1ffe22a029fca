"""The files that a calibration writes: a scenario that describes the same cluster as the one served, with the measured
times; a cost file for each pool; and the links, for use with other scenarios.

links.toml has the form of the link presets (`scenario/presets/links`): values of a `[network]` table, each with its
source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from pdflow.errors import PdflowError
from pdflow.results.files.write import guarding, make_folder, replacing
from pdflow.scenario.costs.cost_file import CostFile, MadeFrom, MeasuredEngine, RowErrors, cost_file, written
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.toml_text import toml_text
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow.version import version
from pdflow_runtime.calibrate.delays import LinkValues
from pdflow_runtime.calibrate.steps import StepFit

SCENARIO_NAME: Final = "scenario.toml"
LINKS_NAME: Final = "links.toml"


class UnlikelyError(PdflowError):
    """The measurements are beyond what a cost file can hold."""


@attrs.frozen(kw_only=True)
class Measured:
    """The measurements of a cluster: by pool the step times, and the time of an API server; the links between all
    engines."""

    steps: Mapping[str, StepFit]
    api_server_s: Mapping[str, float]
    links: LinkValues
    requests: int
    transfers: int


def write(folder: Path, edited: Scenario, measured: Measured, command: str) -> list[Path]:
    """Write all files, and return their paths. OutputError, ScenarioError, UnlikelyError."""
    make_folder(folder)
    scenario = edited.resolved
    files: dict[Path, str] = {}
    edits: dict[str, Any] = {"network": _network(edited, measured.links)}
    for pool in scenario.pools:
        path = folder / f"cost-{pool.name}.json"
        files[path] = written(cost_of(scenario, pool, measured.steps[pool.name], command))
        edits[f"pool.{pool.name}.cost"] = {"model": "measured", "path": os.path.relpath(path, edited.folder)}
        edits[f"pool.{pool.name}.api_server_s"] = _round(measured.api_server_s[pool.name])
        # A live engine composes a step when the one before it has ended.
        edits[f"pool.{pool.name}.async_scheduling"] = False
    files[folder / LINKS_NAME] = links_text(scenario, measured, command)
    for path, text in files.items():
        with replacing(path) as file, guarding(path):
            file.write(text.encode())
    where = folder / SCENARIO_NAME
    with guarding(where):
        edited.with_(edits).save(where)
    return [where, *files]


def _network(edited: Scenario, links: LinkValues) -> dict[str, Any]:
    """Return the scenario's table with the measured values: its switches and paths cannot be measured from here."""
    table = edited.document().get("network", {})
    return {key: value for key, value in table.items() if key not in ("nics_per_rank", "slice_bytes")} | values_of(
        links
    )


def values_of(links: LinkValues) -> dict[str, Any]:
    """Return the values as in a scenario file. A live transfer joins blocks that follow each other, and nothing in it
    waits for a poll."""
    measured = {name: value for name, value in attrs.asdict(links).items() if value is not None}
    rounded = {name: value if isinstance(value, int) else _round(value) for name, value in measured.items()}
    return {"bandwidth_bytes_per_s": float("inf")} | rounded | {"coalesce": True, "poll": False}


def _round(seconds: float) -> float:
    """Round to the nanosecond."""
    return round(seconds, 9)


def links_text(scenario: ResolvedScenario, measured: Measured, command: str) -> str:
    moves = f"{scenario.serve.transport}, {scenario.transfer.method}"
    seen = f"means of {measured.transfers} transfers and {measured.requests} requests"
    return toml_text(
        {
            "summary": f"{moves}, as pdflow {version()} moves KV on one host",
            "source": f"{command}: {seen}",
            "values": {key: value for key, value in values_of(measured.links).items() if key != "coalesce"},
        }
    )


def cost_of(scenario: ResolvedScenario, pool: Pool, fit: StepFit, command: str) -> CostFile:
    """Return the cost file of a pool. Its error bar is that of steps that were not fitted; it says nothing of TTFT."""
    off = fit.kept_out
    cost = attrs.evolve(
        fit.cost,
        provenance=f"measured: {fit.steps} steps of a running cluster, {pool.engine} engines",
        rel_error={"all": f"single steps ±{off.median:.0%} in the median, ±{off.p95:.0%} of 95 %"},
    )
    engine = MeasuredEngine(
        gpu=pool.gpu.name,
        model=scenario.model.name,
        tp=pool.tp,
        weight_bytes_per_param=scenario.model.weight_bytes_per_param,
        kv_bytes_per_value=scenario.model.kv_bytes_per_value,
        software=f"pdflow {version()}, {pool.engine}",
        kv_tokens=kv_tokens_of(scenario.model, pool),
    )
    made_from = MadeFrom(
        source="steps that the engines logged while they were probed",
        command=command,
        fitted_on=(f"{fit.kinds} kinds of steps, the median of each",),
        held_out=("every other step",),
        notes=("a step lasts from its composition until the engine has reported all its tokens",),
    )
    rows = RowErrors(of="every other step", rows=fit.steps // 2, **attrs.asdict(off))
    try:
        return cost_file(cost, engine, made_from, (rows,))
    except ValueError as error:
        raise UnlikelyError(
            f"pool {pool.name}: {error}: implausible measurements; measure again on an otherwise idle machine"
        ) from None

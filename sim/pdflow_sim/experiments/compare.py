"""`pdflow compare` where scenario files are among the paths to compare: they are simulated first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pdflow.errors import EXIT_DONE
from pdflow.results.comparison.runs import OneRun, Runs, SeedRuns
from pdflow.results.files.read import read_runs
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.seeds import run_seeds
from pdflow_sim.observe.live_table import watching
from pdflow_sim.run import RunOptions, conclude, prepare, run, stderr_console


def gathered(paths: Sequence[Path], overrides: Sequence[str], seeds: int | None) -> list[Runs]:
    """Return the runs that each path names, in their order: folders are read, and scenario files are run once all has
    been read.

    Raises ScenarioError, UnreadableRunError; KeyboardInterrupt if a run is interrupted: part of a run is not compared.
    """
    named = [load(str(path), overrides=overrides) if path.suffix == ".toml" else read_runs(path) for path in paths]
    return [
        _simulated(it, path, seeds) if isinstance(it, ResolvedScenario) else it
        for it, path in zip(named, paths, strict=True)
    ]


def _simulated(scenario: ResolvedScenario, path: Path, seeds: int | None) -> Runs:
    if seeds is not None:
        several = run_seeds(scenario, seeds, watched=True)
        if several.exit_code != EXIT_DONE:
            raise KeyboardInterrupt
        return SeedRuns(path=path, report=several.report)
    console = stderr_console()
    world, _ = prepare(scenario, RunOptions(), [])
    with watching(console, scenario, world) if console.is_terminal else contextlib.nullcontext():
        if run(world, None, drain=False):
            raise KeyboardInterrupt
    return OneRun.of(conclude(scenario, world, (), False), path)

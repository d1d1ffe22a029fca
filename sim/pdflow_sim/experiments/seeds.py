"""`pdflow simulate --seeds N`: one scenario with N seeds in a row, and one report of all of them.

Each run is what `pdflow simulate --seed K` does, into a folder of its own; only its summary is kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from pdflow.errors import EXIT_DONE, InvariantError
from pdflow.results.comparison.seeds import SeedsReport
from pdflow.results.files.bench_json import statements
from pdflow.results.files.write import SEEDS_NAME, write_results
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.counting import counting
from pdflow_sim.run import print_report, simulate, stderr_console


@attrs.define
class SeedsRun:
    """The runs of all seeds, in one report."""

    report: SeedsReport
    exit_code: int


def simulate_seeds(
    scenario: ResolvedScenario,
    seeds: int,
    *,
    command: Sequence[str] = (),
    out: str | None = None,
    written: Scenario | None = None,
    quiet: bool = False,
    **flags: bool,
) -> SeedsRun:
    """Run the command: seeds from the scenario's on, with progress, then the report.

    Raises what `run_seeds` raises.
    """
    several = run_seeds(scenario, seeds, command=command, out=out, written=written, watched=not quiet, **flags)
    if out is not None:
        write_results(Path(out) / SEEDS_NAME, several.report.as_dict())
    if not quiet:
        print_report(several.report)
        if out is not None:
            stderr_console().print(f"written to {out}", style="dim", soft_wrap=True)
    return several


def run_seeds(
    scenario: ResolvedScenario,
    seeds: int,
    *,
    command: Sequence[str] = (),
    out: str | None = None,
    written: Scenario | None = None,
    watched: bool,
    **flags: bool,
) -> SeedsRun:
    """Run all seeds, with progress if `watched`. Ends with the first run that is interrupted, whose partial figures are
    in its folder and in no mean.

    Raises what `simulate` raises; of an invariant that does not hold, with the seed.
    """
    summaries: dict[int, dict[str, Any]] = {}
    costs: tuple[str, ...] = ()
    exit_code = EXIT_DONE
    with counting(stderr_console(), "seeds", watched=watched) as progress:
        task = progress.add_task(scenario.name, total=seeds)
        for seed in range(scenario.seed, scenario.seed + seeds):
            folder = None if out is None else str(Path(out) / f"seed-{seed}")
            arguments = [*_without_seeds(command), "--seed", str(seed)] if command else ()
            try:
                run = simulate(
                    attrs.evolve(scenario, seed=seed),
                    command=arguments,
                    out=folder,
                    written=None if written is None else written.with_({"scenario.seed": seed}),
                    quiet=True,
                    **flags,
                )
            except InvariantError as broken:
                raise InvariantError(f"seed {seed}: {broken}") from broken
            exit_code = run.exit_code
            if exit_code != EXIT_DONE:
                break
            summaries[seed] = run.result.summary
            costs = statements(run.result.header.costs)
            progress.advance(task)
    return SeedsRun(SeedsReport.of(scenario.name, seeds, summaries, costs), exit_code)


def _without_seeds(command: Sequence[str]) -> Iterator[str]:
    """Yield the words without the options that name seeds, so that one run's own can be added."""
    skip = False
    for argument in command:
        if skip:
            skip = False
        elif argument in ("--seed", "--seeds"):
            skip = True
        elif not argument.startswith(("--seed=", "--seeds=")):
            yield argument

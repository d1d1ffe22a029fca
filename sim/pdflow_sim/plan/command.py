"""`pdflow plan` from the command line: progress with the best design so far, the verdict, and the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pdflow.errors import (
    EXIT_BUDGET,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_SO,
    Problem,
    ScenarioError,
    before_simulating,
)
from pdflow.results import formatting
from pdflow.results.files.write import make_folder
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.overrides import parse_override
from pdflow_sim.experiments.executors import executor_of
from pdflow_sim.plan.files import PLAN_NAME, write_plan
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import INTERRUPTED, Planner
from pdflow_sim.plan.request import PlanOptions, request_of
from pdflow_sim.plan.verdict import PlanVerdict
from pdflow_sim.run import print_report, stderr_console

ROWS_FOLDER: Final = "runs"
"""The folder in DIR that keeps the figures of each run, so that a plan can go on where it ended."""


def plan(
    path: str,
    options: PlanOptions,
    *,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    executor: str = "process",
    budget_s: float | None = None,
    out: str | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> int:
    """Run the command, and return its exit code: 1 if no design meets the service level, 3 if the time was over first,
    130 if it was interrupted.

    Raises ScenarioError for bad input, MissingBackendError, OutputError.
    """
    folder = None if out is None else Path(out)
    with before_simulating():
        edits = {".".join(map(str, parsed.key)): parsed.value for parsed in map(parse_override, overrides)}
        scenario = Scenario.load(path, edits)
        request = request_of(scenario, options)
        chosen = executor_of(executor, jobs)
        if folder is not None:
            _check_folder(folder, resume)
            make_folder(folder)
    console = stderr_console()
    for note in scenario.resolved.notes if not quiet else ():
        console.print(f"note: {note}", style="dim")
    watched = console.is_terminal and not quiet
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not watched) as progress:
        task = progress.add_task("plan")
        stage = ""

        def on_stage(name: str) -> None:
            nonlocal stage
            stage = name
            if not watched and not quiet:
                console.print(f"{name} ...", style="dim")

        planner = Planner(
            scenario,
            request,
            executor=chosen,
            cache=None if folder is None else folder / ROWS_FOLDER,
            budget_s=budget_s,
            on_stage=on_stage,
            on_run=lambda it: progress.update(task, description=_progress_text(stage, it)),
        )
        outcome = planner.run()
    written = "" if folder is None else _write(folder, outcome)
    if not quiet:
        print_report(PlanVerdict(outcome))
        if written:
            console.print(written, style="dim", soft_wrap=True)
    return _exit_code(outcome)


def _write(folder: Path, outcome: PlanOutcome) -> str:
    """Write the files, unless the search ended earlier than that of the plan in the folder; return which it was."""
    if outcome.unfinished and outcome.runs < _runs_of_plan(folder):
        return f"{folder} keeps the plan that it has, which is of more runs"
    if outcome.unfinished and not outcome.rows:
        return ""
    write_plan(folder, outcome)
    return f"written to {folder}"


def _runs_of_plan(folder: Path) -> int:
    """Return the runs of the plan that a folder has; 0 if there is none, or none that can be read."""
    try:
        runs = json.loads((folder / PLAN_NAME).read_bytes())["runs"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return runs if isinstance(runs, int) else 0


def _check_folder(folder: Path, resume: bool) -> None:
    """Raise ScenarioError if a plan is in the folder already, and is not to be continued."""
    if not resume and ((folder / PLAN_NAME).exists() or (folder / ROWS_FOLDER).exists()):
        message = "has a plan already; add --resume to go on with it, or choose another folder"
        raise ScenarioError([Problem(f"--out {folder}", "", message)])


def _progress_text(stage: str, planner: Planner) -> str:
    runs = f"{stage}: {planner.prober.runs:,} runs"
    best = planner.best_so_far()
    if best is None:
        return runs
    return f"{runs}, best so far {best.design.shape_text} at {formatting.number(best.rate)}/s"


def _exit_code(outcome: PlanOutcome) -> int:
    if outcome.unfinished:
        return EXIT_INTERRUPTED if outcome.unfinished == INTERRUPTED else EXIT_BUDGET
    return EXIT_DONE if outcome.meets else EXIT_NOT_SO

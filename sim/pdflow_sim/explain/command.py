"""`pdflow explain` from the command line: reads a run, simulates it again where it can, and returns what to print.

The scenario is the one that `simulate --out` has saved next to the results. It is trusted only if the request comes
out of it as it was recorded: a changed trace, cost file or version of pdflow shows there, and then there are no
what-ifs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pdflow.errors import EXIT_BAD_INPUT, PdflowError, ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.results.explanation.inter_token import WorstItl
from pdflow.results.explanation.path import path_of
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.explanation.request_view import RequestExplanation
from pdflow.results.explanation.simulated import LeftOut, SimulatedRequest, WhatIf, differences
from pdflow.results.explanation.slow import counted, slow_requests
from pdflow.results.explanation.slow_view import RunExplanation
from pdflow.results.files.bench_json import content_sha256
from pdflow.results.files.read import read_recorded
from pdflow.results.files.write import SCENARIO_NAME
from pdflow.results.records import stages_seen
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.reading.editable import Scenario
from pdflow.version import version
from pdflow_sim.experiments.counting import counting
from pdflow_sim.experiments.rows import SweepRow, SweepTask
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.explain.changes import ScenarioChange, changes_of
from pdflow_sim.explain.window import TargetRequest, WholeRunTask, WindowTask
from pdflow_sim.run import stderr_console


class UnknownRequestError(PdflowError):
    """The run has no request of that id."""

    exit_code = EXIT_BAD_INPUT


class NoStagesError(PdflowError):
    """The records of the run have no stages."""

    exit_code = EXIT_BAD_INPUT


class NoAgainError(Exception):
    """The run cannot be simulated again; the message is the reason, and how to get what needs it."""


def explain(folder: Path, request_id: str | None, *, itl: bool, jobs: int) -> RequestExplanation | RunExplanation:
    """Return the explanation of a request, or of the run's slowest requests.

    Raises UnreadableRunError, UnknownRequestError, NoStagesError and NoFirstTokenError.
    """
    run = read_recorded(folder)
    if not stages_seen(run.records):
        raise NoStagesError(
            f"{folder}: its requests have no stages, for a client measures only their sum; give the folder of "
            "`pdflow simulate --out`, or of `pdflow serve --out`"
        )
    if request_id is None:
        return _explain_run(run)
    return _explain_request(run, _request_of(run, request_id), itl, jobs)


def _request_of(run: RecordedRun, request_id: str) -> int:
    """Return the index of a request: 17, or r17, as timelines and reports name it."""
    digits = request_id.removeprefix("r")
    number = int(digits) if digits.isascii() and digits.isdigit() else -1
    if not 0 <= number < len(run.records):
        raise UnknownRequestError(
            f"{run.folder} has no request {request_id!r}; expected 0 to {len(run.records) - 1}, in order of arrival"
        )
    return number


def _scenario_of(run: RecordedRun) -> Scenario:
    """Return the scenario of a run. Raises NoAgainError."""
    if run.world != "simulated":
        raise NoAgainError("this is a live run, and only `pdflow simulate` can run again what it ran")
    file = run.folder / SCENARIO_NAME
    again = _again(run)
    try:
        scenario = Scenario.load(file)
    except ScenarioError as error:
        missing = "cannot be read" in str(error.problems[0].message)
        why = f"{run.folder} has no {SCENARIO_NAME}" if missing else f"{SCENARIO_NAME} is wrong ({error.problems[0]})"
        raise NoAgainError(f"{why}; {again}") from None
    changed = content_sha256(content_of(scenario.resolved)) != run.scenario_sha256
    if changed and not scenario.names_files:  # paths are seen from the folder of each file, so these differ anyway
        raise NoAgainError(f"{SCENARIO_NAME} has changed since the run; {again}")
    return scenario


def _again(run: RecordedRun) -> str:
    """Return how to get what a run that cannot be simulated again lacks."""
    command = f": {run.command_line} --out {run.folder}" if run.command_line else f" with --out {run.folder}"
    return f"to get it, simulate the scenario again{command}"


def _explain_request(run: RecordedRun, request: int, itl: bool, jobs: int) -> RequestExplanation:
    try:
        scenario = _scenario_of(run)
        unchanged, what_ifs, left_out = _simulated(run, scenario, request, jobs)
    except NoAgainError as reason:
        return RequestExplanation(run=run, path=path_of(run, request), itl=itl, no_what_ifs=str(reason))
    pulls = METHODS[scenario.resolved.transfer.method].pulls
    return RequestExplanation(
        run=run,
        path=path_of(run, request, unchanged.memory, pulls),
        itl=itl,
        unchanged=unchanged,
        what_ifs=what_ifs,
        left_out=left_out,
    )


def _simulated(
    run: RecordedRun, scenario: Scenario, request: int, jobs: int
) -> tuple[SimulatedRequest, list[WhatIf], list[LeftOut]]:
    """Return the request as it comes out of the unchanged scenario, and of each change. Raises NoAgainError if the
    first of these is not as it was recorded."""
    records = run.records
    engines = (records.prefill_engine[request], records.decode_engine[request])
    listed = list(changes_of(scenario.resolved, engines))
    changes = [each for each in listed if isinstance(each, ScenarioChange)]
    target = TargetRequest.of(records, request)
    tasks = [WindowTask(scenario, dict(edits), 0, None, target=target) for edits in ({}, *(c.edits for c in changes))]
    rows = _rows(tasks, jobs)
    unchanged = _checked(run, request, rows[0])
    left_out = [each for each in listed if isinstance(each, LeftOut)]
    what_ifs = []
    for change, row in zip(changes, rows[1:], strict=True):
        if row.error is not None:
            left_out.append(LeftOut(change.name, row.error))
        else:
            what_ifs.append(WhatIf(change.name, change.text, row.figures["simulated"]))
    return unchanged, what_ifs, left_out


def _checked(run: RecordedRun, request: int, row: SweepRow) -> SimulatedRequest:
    """Return the request of the unchanged scenario. Raises NoAgainError if it is not as it was recorded."""
    if row.error is not None:
        raise NoAgainError(f"{SCENARIO_NAME} cannot be simulated: {row.error}")
    unchanged: SimulatedRequest = row.figures["simulated"]
    different = differences(run.records, request, unchanged)
    if different:
        versions = f"it was run with pdflow {run.version}, and this is {version()}"
        raise NoAgainError(
            f"simulated again, the request is not as it was recorded ({', '.join(different)} differ): "
            f"{SCENARIO_NAME}, a file that it names, or pdflow has changed ({versions}); {_again(run)}"
        )
    return unchanged


def _explain_run(run: RecordedRun) -> RunExplanation:
    counted(run)
    itl, no_itl = None, ""
    try:
        itl = _worst(run, _scenario_of(run))
        no_itl = "" if itl is not None else "no request has more than one token"
    except NoAgainError as reason:
        no_itl = str(reason)
    return RunExplanation(run=run, found=slow_requests(run, itl, no_itl))


def _worst(run: RecordedRun, scenario: Scenario) -> WorstItl | None:
    """Return the worst ITL of the run: where the records have it, by a simulation until that request's end."""
    records = run.records
    if not records.itl_max_ns:
        row = _rows([WholeRunTask(scenario, {}, 0, None, warmup_ns=run.warmup_ns)], 1)[0]
        if row.error is not None:
            raise NoAgainError(f"{SCENARIO_NAME} cannot be simulated: {row.error}")
        worst: WorstItl | None = row.figures["worst"]
        return worst
    request = max(counted(run).tolist(), key=lambda each: records.itl_max_ns[each])
    target = TargetRequest.of(records, request)
    return _checked(run, request, _rows([WindowTask(scenario, {}, 0, None, target=target)], 1)[0]).itl


def _rows(tasks: Sequence[SweepTask], jobs: int) -> list[SweepRow]:
    """Return the rows of all tasks, in their order, with a bar on a terminal."""
    rows = [SweepRow()] * len(tasks)
    with counting(stderr_console(), "simulations", watched=True) as progress, WorkerPool(min(jobs, len(tasks))) as pool:
        bar = progress.add_task("explain", total=len(tasks))
        with closing(pool.rows(tasks)) as found:
            for position, row in found:
                rows[position] = row
                progress.advance(bar)
    return rows

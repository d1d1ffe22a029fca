"""pdflow: prefill/decode-disaggregated LLM serving, one KV-transfer state machine checked, simulated and served.

`pdflow.simulate("scenario.toml")` runs a scenario and gives a Result; `pdflow.sweep` runs many, and gives a table;
`pdflow.plan` finds the best cluster for its traffic.
docs/python.md shows how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from os import PathLike
    from typing import Any

    import pandas as pd
    from ipywidgets import VBox

    from pdflow.errors import MissingBackendError, PdflowError, ScenarioError
    from pdflow.results.result import Result
    from pdflow.scenario.reading.editable import Scenario
    from pdflow_sim.plan.result import Plan

__all__ = [
    "MissingBackendError",
    "PdflowError",
    "Result",
    "Scenario",
    "ScenarioError",
    "load",
    "max_rate",
    "plan",
    "simulate",
    "sweep",
    "whatif",
]

_HOMES = {
    "MissingBackendError": "pdflow.errors",
    "PdflowError": "pdflow.errors",
    "Result": "pdflow.results.result",
    "Scenario": "pdflow.scenario.reading.editable",
    "ScenarioError": "pdflow.errors",
}


def __getattr__(name: str) -> object:
    """Import an exported name when it is first accessed, so that `pdflow --help` stays quick."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pdflow' has no attribute {name!r}")


def load(path: str | PathLike[str], overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Load a scenario file: `Scenario.load`."""
    from pdflow.scenario.reading.editable import Scenario

    return Scenario.load(path, overrides or {})


def simulate(
    scenario: Scenario | str | PathLike[str],
    *,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    out: str | PathLike[str] | None = None,
    exact: bool = False,
    events: bool = False,
    check_invariants: bool = False,
    save_detailed: bool = False,
    timeline: bool = False,
    html: bool = False,
) -> Result:
    """Simulate a scenario.

    Ctrl-C ends the run early, and the result is of what happened until then: `result.summary["interrupted"]` says so.

    Args:
        scenario: a Scenario, or the path of a TOML file.
        seed: instead of the scenario's own.
        overrides: values by dotted key, as in {"router.policy": "least-loaded", "pool.decode.replicas": 8}.
        out: a folder for results.json, requests.jsonl and scenario.toml; nothing is written without it.
        exact: advance token by token; slow, and the same results.
        events: write events.jsonl too; needs `out`.
        check_invariants: hold the safety invariants against every event.
        save_detailed: put each request's lengths and times into results.json; needs `out`.
        timeline: write timeline.json.gz, which ui.perfetto.dev opens; needs `out`.
        html: write report.html, one page with figures and curves; needs `out`.

    Raises:
        ScenarioError: the scenario is wrong; lists every problem with its line.
        InvariantError: an invariant did not hold.
    """
    from importlib import import_module
    from os import fspath

    from pdflow.scenario.reading.editable import Scenario

    if out is None and (events or save_detailed or timeline or html):
        raise ValueError("events, save_detailed, timeline and html write files: set out to a folder")
    edits = {**(overrides or {}), **({} if seed is None else {"scenario.seed": seed})}
    if not isinstance(scenario, Scenario):
        scenario = Scenario.load(scenario, edits)
    elif edits:
        scenario = scenario.with_(edits)
    result: Result = (
        import_module("pdflow_sim.run")
        .simulate(
            scenario.resolved,
            written=scenario,
            out=None if out is None else fspath(out),
            exact=exact,
            events=events,
            check_invariants=check_invariants,
            save_detailed=save_detailed,
            timeline=timeline,
            html=html,
            quiet=True,
        )
        .result
    )
    return result.made_by(scenario)


def sweep(
    scenario: Scenario | str | PathLike[str],
    points: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    *,
    jobs: int = 1,
    executor: str = "process",
    seeds: int = 1,
    cache: str | PathLike[str] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run a scenario at many points and return their figures as a table. Needs `pip install "pdflow[notebook]"`.

    A row per point and seed, in the order of the points: the values of the point, `seed`, `error` (None, or what was
    wrong with a point that could not be run, whose figures are missing), then the figures of `Result.summary`, and the
    GPUs of all engines and of each role. Rows are functions of scenario and seed: `jobs` changes how long it takes.

    Ctrl-C ends the sweep and keeps what is done: rows that were not run say so in `error`, and
    `frame.attrs["interrupted"]` is True. With `cache`, what was finished is not run again.

    Args:
        scenario: a Scenario, or the path of a TOML file.
        points: lists of values by dotted key, of which every combination is run, the last key changing fastest:
            {"transfer.method": ["nixl-push", "nixl-pull"], "pool.decode.replicas": range(1, 9)}. Or the points
            themselves: [{"pool.decode.replicas": 2}, {"slo": {}}].
        jobs: how many processes; with 1 all is run in this one.
        executor: "process", or "ray": as tasks of the Ray cluster that RAY_ADDRESS names or that this machine belongs
            to, or else of a local one with `jobs` workers.
        seeds: runs of each point, with its seed and those after it.
        cache: a folder that keeps each row, under a hash of the scenario, the files that it names and pdflow's version.
        progress: show a bar.

    Raises:
        ScenarioError: the scenario cannot be loaded; what is wrong with a point raises nothing.
        MissingBackendError: pandas, tqdm or Ray is not installed.
    """
    from importlib import import_module

    scenario = _loaded(scenario)
    run = import_module("pdflow_sim.experiments.sweep").sweep
    frame: pd.DataFrame = run(
        scenario, points, jobs=jobs, executor=executor, seeds=seeds, cache=cache, progress=progress
    )
    return frame


def plan(
    scenario: Scenario | str | PathLike[str],
    *,
    slo: str | None = None,
    gpus: int | None = None,
    rate: float | None = None,
    gpu: Mapping[str, float | None] | Iterable[str] = (),
    search: Iterable[str] | None = None,
    values: Mapping[str, Iterable[Any]] | None = None,
    kind: str | None = None,
    target: str | None = None,
    seeds: int = 3,
    requests: int | None = None,
    robust: bool = True,
    jobs: int = 1,
    executor: str = "process",
    budget_s: float | None = None,
    cache: str | PathLike[str] | None = None,
) -> Plan:
    """Find the best cluster for a scenario's traffic within a service level: `pdflow plan`, whose options these are.

    Ctrl-C, and the end of `budget_s`, end the search with the best so far.

    Args:
        scenario: a Scenario, or the path of a TOML file.
        slo: what must be met, as in "ttft=500ms@p99,itl=50ms@p99,attainment=95%"; default: the scenario's [slo].
        gpus: find the best cluster of so many GPUs.
        rate: or the smallest cluster that serves so many requests per second.
        gpu: types of GPUs to use, with their prices in $ per hour: {"h100-sxm": 2.80}; default: the scenario's.
        search: what to search: tp, ep, xpyd, chunk, policy, method, block_size, dispatch, conditional; default: all.
        values: the values of some of these: {"tp": [2, 4]}.
        kind: "aggregated" or "disaggregated", to search clusters of one kind only.
        target: what to compare by: goodput-per-gpu, cost or min-gpus.
        seeds: runs of each finalist.
        requests: of a whole run; default: the scenario's.
        robust: whether to put the finalists under stress.
        jobs: how many processes; with 1 all is run in this one.
        executor: "process" or "ray", as in `sweep`.
        cache: a folder that keeps the figures of each run.

    Raises:
        ScenarioError: the scenario or what is asked is wrong; lists every problem.
        MissingBackendError: Ray is not installed.
    """
    from importlib import import_module

    scenario = _loaded(scenario)
    prices = gpu.items() if hasattr(gpu, "items") else ((name, None) for name in gpu)
    options = import_module("pdflow_sim.plan.request").PlanOptions(
        slo=slo,
        gpus=gpus,
        rate=rate,
        gpu=[name if price is None else f"{name}={price}" for name, price in prices],
        search=None if search is None else ",".join(search),
        values=[f"{key}={','.join(map(str, those))}" for key, those in (values or {}).items()],
        kind=kind,
        target=target,
        seeds=seeds,
        requests=requests,
        robust=robust,
    )
    found: Plan = import_module("pdflow_sim.plan.result").planned(
        scenario, options, jobs=jobs, executor=executor, budget_s=budget_s, cache=cache
    )
    return found


def max_rate(
    scenario: Scenario | str | PathLike[str],
    slo: str | None = None,
    *,
    seeds: int = 1,
    requests: int | None = None,
    jobs: int = 1,
) -> float:
    """Return the highest rate at which a scenario's own cluster meets a service level, 0 if it meets it at none.

    The mean over `seeds`, found to 2 %, in requests per second (of sessions: sessions per second). `slo` and
    `requests` are as in `plan`.

    Raises:
        ScenarioError: the scenario is wrong, or it has no rate that could be changed.
    """
    from importlib import import_module

    rate: float = import_module("pdflow_sim.plan.own_rate").max_rate(
        _loaded(scenario), slo, seeds=seeds, requests=requests, jobs=jobs
    )
    return rate


def whatif(scenario: Scenario | str | PathLike[str], *, requests: int = 300) -> VBox:
    """Show sliders in a notebook that simulate a scenario again: its rate, engines, links and block size.

    A table has the figures next to those of the unchanged scenario, and the edits for `Scenario.with_`. Needs `pip
    install "pdflow[notebook]"`.

    Args:
        scenario: a Scenario, or the path of a TOML file.
        requests: the most requests of a run; more take longer, and their percentiles are better.

    Raises:
        ScenarioError: the scenario is wrong.
        MissingBackendError: ipywidgets is not installed.
    """
    from importlib import import_module

    home = import_module("pdflow_sim.whatif")
    shown: VBox = home.panel(home.WhatIfRuns(_loaded(scenario), requests))
    return shown


def _loaded(scenario: Scenario | str | PathLike[str]) -> Scenario:
    from pdflow.scenario.reading.editable import Scenario

    return scenario if isinstance(scenario, Scenario) else Scenario.load(scenario)

"""`pdflow check` without WHAT: a part of `all` that takes about 30 s on 2 cores, and the list of what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from pdflow.errors import Problem, ScenarioError
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.routers.catalogue import SETTINGS as ROUTERS
from pdflow_sim.check.suites.scopes import chosen, matching
from pdflow_sim.check.suites.suite import CheckOptions

SUITES = ("scopes", "methods", "walk")
"""Mutants and races check the checker, and need one process for minutes. The settings of routers take 20 s."""
MAX_STATES = 26_000
RUNS = 500
"""Random walks of each dialect."""


def narrowed(options: CheckOptions) -> CheckOptions:
    """Return the options of a quick check. Raises ScenarioError for options that it has no use for."""
    for name, given in (("--only", options.only is not None), ("--large", options.large)):
        if given:
            what = "WHAT, such as scopes, methods, mutants or races" if name == "--only" else "WHAT: scopes or all"
            raise ScenarioError([Problem(name, "", f"needs {what}")])
    runs = RUNS if options.runs is None else options.runs
    return evolve(options, max_states=MAX_STATES, runs=runs)


def left_out(options: CheckOptions, runs_of_all: int) -> Iterator[str]:
    """Yield the lines that say what `narrowed` options left out, and which commands run it."""
    scopes = matching(options)
    nightly = sum(named.nightly for named in scopes)
    larger = len(scopes) - nightly - len(chosen(options))
    walked = options.runs or 0
    walks = f", random walks {walked:,} to {runs_of_all:,} of each dialect" if walked < runs_of_all else ""
    yield "This was the quick check. It left out:"
    yield f"  {larger} scopes of more than {MAX_STATES:,} states or of a pair of faults, {len(MUTANTS)} mutants,"
    yield f"  {len(RACES)} races, {len(ROUTERS)} settings of a router alone{walks}:"
    yield "    `pdflow check all`, about 6 CPU minutes"
    yield f"  {nightly} nightly scopes:"
    yield "    `pdflow check all --large`, up to 6 GB"

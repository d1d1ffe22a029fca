"""The start of a process of a live cluster: what the commands of all of them share.

A component without --child has been started by itself, perhaps on a host of its own: no supervisor sees it start and
end, so engines report to the router, by the rule of [router] heartbeat_s, whether the scenario says how often or not.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import attrs

from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_runtime.observe.record import Record
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.process.devices import Environment, gpu_environments
from pdflow_runtime.process.logs import log_to_stderr
from pdflow_runtime.process.processes import run_to_exit_code
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.simulated_only import live_notes

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 3.0
"""Time between two reports, if the scenario has none: PR #18242's, as in `routing/heartbeats.py`."""


def arguments(module: str, docstring: str | None) -> ArgumentParser:
    """Return the parser of the options that all components share. `docstring` is the module's docstring."""
    parser = ArgumentParser(prog=module, description=(docstring or "").partition("\n")[0])
    parser.add_argument("scenario", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the event log of this component to DIR")
    parser.add_argument(
        "--events", action="store_true", help="also write every event into and effect out of its endpoints"
    )
    parser.add_argument("--child", action="store_true", help="read addresses from stdin; exit when stdin closes")
    return parser


def record_of(asked: Namespace) -> Record:
    """Return the record of this component, by its options."""
    return Record(out=asked.out, events=asked.events)


def run_component(asked: Namespace, who: str, serve: Callable[[ResolvedScenario], Awaitable[None]]) -> int:
    """Run a component until it ends; returns the exit code."""
    log_to_stderr(who)

    async def run() -> None:
        scenario = load(asked.scenario, overrides=asked.overrides)
        refuse_what_is_not_served(scenario)
        if not asked.child and who == ROUTER:
            for note in live_notes(scenario):
                log.info("note: %s", note)
        elif not asked.child:
            # Before torch is imported. The supervisor has set it for the processes that it starts.
            os.environ.update(own_environment(scenario, who))
        await serve(scenario if asked.child else reporting(scenario))

    return run_to_exit_code(run)


def own_environment(scenario: ResolvedScenario, who: str) -> Environment:
    """Return what the environment of this engine or node must contain. ScenarioError if this host lacks something. On
    loopback all others are on this host, too, and are checked with it."""
    names = None if is_loopback(scenario.serve.engine_host) else [who]
    return gpu_environments(scenario, names).get(who, {})


def reporting(scenario: ResolvedScenario) -> ResolvedScenario:
    """Return the same scenario, with engines that report."""
    router = scenario.router
    if router.reports_every_s(scenario.transfer) is not None:
        return scenario
    return attrs.evolve(scenario, router=attrs.evolve(router, heartbeat_s=HEARTBEAT_S))

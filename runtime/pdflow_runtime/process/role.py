"""The command `pdflow serve FILE --role ROLE --name NAME`: one process of a cluster on this host, with the others
elsewhere.

It is the process that the supervisor of one host would have started, which reports to the router instead. Its restart
after an end is left to the service manager of this host.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pdflow.errors import EXIT_BAD_INPUT, EXIT_DONE, PdflowError, Problem, ScenarioError
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.observe.record import Record
from pdflow_runtime.process import worker
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.process.processes import end_process
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.router import front
from pdflow_runtime.router.routing import seats_of


def main(file: str, overrides: tuple[str, ...], role: str, name: str | None, **kept: Any) -> int:
    """Run the command; return the exit code. `kept` are the fields of a Record."""
    try:
        scenario = load(file, overrides=overrides)
        name = named(scenario, role, name)
    except PdflowError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_INPUT
    arguments = [
        file,
        *(arg for override in overrides for arg in ("--set", override)),
        *Record(**kept).component_arguments(),
    ]
    if role == ROUTER:
        return front.main(arguments)
    # torch and UCX look at these when they are imported.
    os.environ["OMP_NUM_THREADS"] = str(scenario.serve.threads)
    if is_loopback(scenario.serve.engine_host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    code = worker.main([*arguments, "--name", name])
    return end_process(code) if code == EXIT_DONE else code


def named(scenario: ResolvedScenario, role: str, name: str | None) -> str:
    """Return the name of the process to run. ScenarioError if there is none of that role and name."""
    names = [ROUTER] if role == ROUTER else seats_of(scenario, role)
    if name is None and role == ROUTER:
        return ROUTER
    if name in names:
        assert name is not None
        return name
    wrong = "--name is missing" if name is None else f"--name {name}: no component of role {role} has this name"
    raise ScenarioError([Problem(scenario.path, "", f"{wrong}; known: {', '.join(names)}")])

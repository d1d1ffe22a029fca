"""The command `pdflow calibrate` of a running cluster: probes it, fetches the event logs of its processes, and writes a
scenario of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio
from rich.console import Console
from rich.table import Table

from pdflow.errors import EXIT_DONE, PdflowError
from pdflow.results.command_line import command_line
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.load import read, resolve
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.sender import RequestTarget
from pdflow_runtime.bench.target import model_of, server_of
from pdflow_runtime.build import engines_of, refuse_what_is_not_served
from pdflow_runtime.calibrate.delays import api_server_s, delays, link_values
from pdflow_runtime.calibrate.files import Measured, values_of, write
from pdflow_runtime.calibrate.probe import NOTES, NotesSource, Probe, ProbeError, rounds
from pdflow_runtime.calibrate.steps import StepFit, TooFewStepsError, fit_steps, steps_seen
from pdflow_runtime.calibrate.traffic import drawn, rate_at
from pdflow_runtime.clock import now_ns, wall_offset_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import is_synthetic, open_prompts
from pdflow_runtime.observe.event_log import Moved, Page, RequestReceived
from pdflow_runtime.process.addresses import reached_at, url_of
from pdflow_runtime.process.processes import leaves
from pdflow_runtime.security.client_tls import uses_tls
from pdflow_runtime.security.tls import cluster_client, tls_of
from pdflow_runtime.tls_socket import client_context

BUSY: Final = 0.35
"""Share of the time for which engines are busy while hops and messages are measured."""
PLAYED_S: Final = 25.0
LEAST: Final = 30
MOST: Final = 300
"""Requests of that traffic, which lasts about so long."""


def main(file: str, overrides: Sequence[str], url: str | None, out: Path, command: Sequence[str]) -> int:
    """Run the command; return the exit code. PdflowError for bad input, and where no cluster answers."""
    edited = edited_of(file, overrides)
    scenario = edited.resolved
    refuse_what_is_not_served(scenario)
    at = url or url_of(Coordinates(reached_at(scenario.serve.host), scenario.serve.port), uses_tls(scenario))
    try:
        measured = trio.run(probed, scenario, BenchOptions(base_url=at))
    except BaseExceptionGroup as group:
        raise next((error for error in leaves(group) if isinstance(error, PdflowError)), group) from None
    written = write(out, edited, measured, command_line(command))
    show(scenario, measured, written)
    return EXIT_DONE


def edited_of(file: str, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with its `--set`s, in the form in which it is written down again. ScenarioError."""
    draft = read(file)
    draft.override(overrides, None)
    return Scenario(draft, resolve(draft), {})


async def probed(scenario: ResolvedScenario, asked: BenchOptions) -> Measured:
    """Probe the cluster, and return what was measured: first what steps take, then, with traffic of the scenario, the
    rest."""
    server = server_of(asked)
    client = HttpClient(connect_s=10.0, tls=client_context() if server.tls else None)
    notes = notes_source(scenario, server)
    try:
        model = await model_of(client, server, asked)
        probe = Probe(client, server, model, scenario.seed, notes)
        await probe.fetch()
        await probe.send_all(rounds(scenario, open_prompts(scenario).context_tokens))
        steps = steps_of(scenario, probe.pages())
        rate_rps = rate_at(scenario, {name: fit.cost for name, fit in steps.items()}, BUSY)
        since = now_ns() + wall_offset_ns()
        await probe.play(drawn(scenario, max(LEAST, min(MOST, round(PLAYED_S * rate_rps))), rate_rps))
        return measured_of(scenario, probe.pages(), since)
    finally:
        client.close()
        if notes is not None:
            notes.client.close()


def notes_source(scenario: ResolvedScenario, server: RequestTarget) -> NotesSource | None:
    """Return where to fetch notes from a router that answers operators at its cluster port; None for one that does so
    at its port for clients. ScenarioError if the certificates of [serve] cannot be used."""
    port = scenario.serve.cluster_port
    if not port:
        return None
    return NotesSource(RequestTarget(server.host, port, NOTES, tls=True), cluster_client(tls_of(scenario)))


def steps_of(scenario: ResolvedScenario, pages: Sequence[Page]) -> dict[str, StepFit]:
    """Fit the step times of each pool. ProbeError if there are too few steps."""
    steps = {}
    for pool in scenario.pools:
        engines = engines_of([pool])
        try:
            steps[pool.name] = fit_steps(steps_seen(page for page in pages if page.node in engines))
        except TooFewStepsError as error:
            raise ProbeError(f"pool {pool.name}: {error}") from None
    return steps


def measured_of(scenario: ResolvedScenario, pages: Sequence[Page], since_ns: int) -> Measured:
    """Return the measurements: of steps from all that was noted, of hops and messages from the notes since
    `since_ns`."""
    lately = [page.since(since_ns) for page in pages]
    links = link_values(delays(pages), delays(lately), is_synthetic(scenario))
    api_servers = {
        pool.name: api_server_s(delays(lately), engines_of([pool]), links.http_latency_s) for pool in scenario.pools
    }
    return Measured(
        steps=steps_of(scenario, pages),
        api_server_s=api_servers,
        links=links,
        requests=sum(isinstance(note, RequestReceived) for page in pages for note in page.notes),
        transfers=sum(isinstance(note, Moved) for page in pages for note in page.notes),
    )


def show(scenario: ResolvedScenario, measured: Measured, written: Sequence[Path]) -> None:
    """Print what was measured, and which files were written."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table("pool", "steps", "kinds", "median error", "p95", "API server, ms", box=None)
    for pool in scenario.pools:
        fit = measured.steps[pool.name]
        api_server = f"{measured.api_server_s[pool.name] * 1e3:.2f}"
        off = fit.kept_out
        table.add_row(pool.name, f"{fit.steps:,}", f"{fit.kinds}", f"{off.median:.1%}", f"{off.p95:.1%}", api_server)
    console.print(table)
    for key, value in values_of(measured.links).items():
        console.print(f"  {key} = {value}")
    for path in written:
        console.print(f"written: {path}", style="dim", soft_wrap=True)

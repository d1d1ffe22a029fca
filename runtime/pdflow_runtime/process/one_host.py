"""The command `pdflow serve FILE`: the checks before a cluster of one host starts, the file for its operators, and what
is swept when it has ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import trio

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import config_of, folder_of, is_synthetic, need_torch
from pdflow_runtime.observe.record import Record
from pdflow_runtime.observe.spans import check_traces
from pdflow_runtime.process.addresses import (
    is_loopback,
    reached_at,
    url_of,
)
from pdflow_runtime.process.cluster import Cluster
from pdflow_runtime.process.devices import gpu_environments
from pdflow_runtime.process.logs import log_to_stderr
from pdflow_runtime.process.processes import run_to_exit_code
from pdflow_runtime.process.reports import other_routers
from pdflow_runtime.process.router_sockets import RouterSockets, opened
from pdflow_runtime.security.api_keys import api_keys_of
from pdflow_runtime.security.client_tls import client_tls_of, uses_tls
from pdflow_runtime.security.local_secret import written_for_operators
from pdflow_runtime.security.secret import LOCAL_VARIABLE, secret_of
from pdflow_runtime.security.tls import KEYS, tls_of
from pdflow_runtime.simulated_only import live_notes
from pdflow_runtime.store.build import stores_of
from pdflow_runtime.store.server import check_server
from pdflow_runtime.transports.named import caution_of, transport_named
from pdflow_runtime.transports.region import sweep

log = logging.getLogger(__name__)


def prepare(scenario: ResolvedScenario) -> RouterSockets:
    """Check once what every process would complain of, and make what they share. Returns the sockets at which the
    router accepts."""
    serve_config = scenario.serve
    transport_named(serve_config.transport)
    if (caution := caution_of(serve_config.transport)) is not None:
        log.warning("%s", caution)
    if not is_synthetic(scenario):
        need_torch()
        config_of(scenario, folder_of(scenario))
    if secret_of(scenario) is None and other_routers(scenario):
        problem = (
            "names a router that this command does not start, so both need a shared secret: set serve.secret_file or "
            "PDFLOW_SECRET (docs/hosts.md)"
        )
        raise ScenarioError([Problem(scenario.path, "serve.router", problem)])
    tls_of(scenario)
    check_traces(scenario)
    api_keys_of(scenario)
    client_tls_of(scenario)
    if stores_of(scenario):
        check_server(scenario)
    if not is_loopback(serve_config.engine_host):
        problem = (
            f"is {serve_config.engine_host}, expected loopback: without --role all engines run on this host; for "
            "several hosts start each component with --role (docs/hosts.md)"
        )
        raise ScenarioError([Problem(scenario.path, "serve.engine_host", problem)])
    return opened(scenario)


@contextmanager
def operators_file_of(cluster: Cluster, sockets: RouterSockets) -> Iterator[None]:
    """Keep the file with the cluster's own secret, if it has one, for operators of this host."""
    text = cluster.secret.get(LOCAL_VARIABLE)
    if text is None:
        yield
        return
    serve_config = cluster.scenario.serve
    host, port, options = reached_at(serve_config.host), sockets.port, ""
    if sockets.cluster_port is not None:
        port = sockets.cluster_port
        files = zip(("--cert", "--key", "--cacert"), (getattr(serve_config, key) for key in KEYS), strict=True)
        options = "".join(f"{option} {cluster.scenario.base_dir / file} " for option, file in files)
    with ExitStack() as stack:
        try:
            path = stack.enter_context(written_for_operators(host, port, text))
            at = url_of(Coordinates(host, port), bool(options) or uses_tls(cluster.scenario))
            log.info("operators: curl %s-H @%s %s/admin/state", options, path, at)
        except OSError as error:
            log.warning(
                "/admin and pdflow top cannot be used: the file with the secret cannot be written (%s): set "
                "XDG_RUNTIME_DIR to a directory of your own, or PDFLOW_SECRET",
                error,
            )
        yield


async def kill(processes: Collection[trio.Process]) -> None:
    """Kill the processes that still run, and remove the files of those that had no time to do it themselves."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        # Reaped, a process is gone, and what it has left is swept. One that had ended before may not be reaped yet.
        await process.wait()
    sweep()


async def serve(scenario: ResolvedScenario, file: str, overrides: tuple[str, ...], record: Record) -> None:
    """Run a cluster, from the first process to the last. Its URL is the first line on stdout."""
    refuse_what_is_not_served(scenario)
    environments = gpu_environments(scenario)
    sockets = prepare(scenario)
    if is_synthetic(scenario):
        log.info(
            "engines are synthetic: they compute no model; each step lasts as long as the scenario's cost model says"
        )
    for note in live_notes(scenario):
        log.info("note: %s", note)
    record.begin()
    cluster = Cluster(scenario, file, overrides, record, environments, sockets)

    def up(url: str) -> None:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        log.info("cluster is up: serving model %s with %s", scenario.model.name, ", ".join(cluster.engines))

    sweep()  # what a cluster has left that was killed itself
    try:
        with operators_file_of(cluster, sockets):
            await cluster.run(up)
    finally:
        sockets.close()
        with trio.CancelScope(shield=True):
            await kill(cluster.processes.values())
        if record.conclude(scenario) is not None:
            log.info("results written to %s", record.out)


def main(file: str, overrides: tuple[str, ...], **kept: Any) -> int:
    """Run `pdflow serve FILE`; return the exit code. `kept` are the fields of a Record."""
    log_to_stderr("cluster")

    async def run() -> None:
        await serve(load(file, overrides=overrides), file, overrides, Record(**kept))

    return run_to_exit_code(run)

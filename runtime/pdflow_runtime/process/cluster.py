"""The cluster on this host: the router and every engine, each a process of its own, started, watched and stopped; and
every node of a store, which is treated as one more engine here.

An engine whose process ends is reported to the router at once, and started again, with memory and an incarnation of its
own. An engine that ends again and again is restarted after longer pauses; one that ends with exit code 0 was ordered
to. The router says which engines are to be added. If its process ends, so does the cluster.

To stop, the router is drained first, then the decode engines: no new prompt comes by then, and what they still hold has
an end. Then the others end, whatever they hold.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from pdflow.errors import EXIT_BAD_INPUT, PdflowError, Problem, ScenarioError
from pdflow.protocol.values import S
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.wiring.router import heartbeat_ns
from pdflow_runtime.build import engines_of, refuse_what_is_not_served
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import config_of, folder_of, is_synthetic, need_torch, weights_bytes
from pdflow_runtime.observe.record import Record
from pdflow_runtime.process.addresses import EngineAddress, EngineGone, News, RouterAddress, is_loopback, reached_at
from pdflow_runtime.process.devices import Environment, gpu_environments
from pdflow_runtime.process.logs import log_to_stderr
from pdflow_runtime.process.processes import drain_on_signal, exit_text, run_to_exit_code
from pdflow_runtime.router.front import listening
from pdflow_runtime.security.secret import secret_of
from pdflow_runtime.security.tls import tls_of
from pdflow_runtime.simulated_only import live_notes
from pdflow_runtime.store.build import stores_of
from pdflow_runtime.store.server import check_server
from pdflow_runtime.transports.named import caution_of, transport_named
from pdflow_runtime.transports.region import sweep

log = logging.getLogger(__name__)

ROUTER: Final = "router"
UP_S: Final = 120.0
"""Time for a process to report that it is up, besides the time to read and hash a model."""
SLOWEST_BYTES_PER_S: Final = 100e6
"""The rate at which a model is read: a disk in a network."""
AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Pause between the end of a process and its restart, by how many have ended one after the other."""
BACKOFF_RESET_S: Final = 60.0
"""A process that ran so long did not end for the reason for which the one before did."""


class StartError(PdflowError):
    """A process of the cluster did not come up; its messages are on stderr."""

    exit_code = EXIT_BAD_INPUT


class ComponentProcess:
    """The process of a component. `first_line` is the first line of its standard output."""

    def __init__(self, name: str, process: trio.Process, first_line: bytes) -> None:
        self.name: Final = name
        self.process: Final = process
        self.first_line: Final = first_line


class Cluster:
    """The processes of a cluster. Args: those that every process is started with: the scenario, its file, and what
    replaces values of it; and variables of the environment, by process."""

    def __init__(
        self,
        scenario: ResolvedScenario,
        file: str,
        overrides: tuple[str, ...],
        record: Record,
        environments: Mapping[str, Environment],
    ) -> None:
        self.scenario: Final = scenario
        self.environments: Final = environments
        set_options = [arg for override in overrides for arg in ("--set", override)]
        self.common: Final = [file, *set_options, *record.component_arguments(), "--child"]
        self.engines: Final = [*engines_of(scenario.pools), *stores_of(scenario)]
        self.roles: Final = {pool.name: pool.role for pool in scenario.pools}
        self.reports: Final = heartbeat_ns(scenario) is not None
        """Whether engines report to the router themselves, too."""
        self.processes: dict[str, trio.Process] = {}
        """The latest process of each component."""
        self.up_s: Final = UP_S + weights_bytes(scenario) / SLOWEST_BYTES_PER_S
        """Time for a process to report that it is up."""
        self.stopping = False
        self._send_lock: Final = trio.Lock()
        """Two engines may end at once, and only one may write."""

    async def run(self, up: Callable[[str], None]) -> None:
        """Run until ordered to stop. `up` is called with the router's URL once requests can be served."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            components = await self._start_all()
            self.router = components.pop(ROUTER)
            nursery.start_soon(self._read_router)
            for component in components.values():
                await self._live(component)
            grace_s = 2 * self.scenario.serve.drain_s + 5
            nursery.start_soon(drain_on_signal, self.stop, grace_s, nursery.cancel_scope)
            up(self.router.first_line.decode().strip())
            await self.router.process.wait()
            if not self.stopping:
                raise StartError(f"the router {exit_text(self.router.process.returncode)}; shutting down")
            await self._end_engines()
            nursery.cancel_scope.cancel()

    async def _end_engines(self) -> None:
        """End all engines, once no request can come. Decode engines end first: what they hold may wait for a message of
        a prefill engine. KV that the other engines hold then is not wanted by any engine, and none of its leases is
        waited for."""
        engines = [name for name in self.processes if name != ROUTER]
        decode, others = (
            [self.processes[name] for name in engines if (self._role(name) in ("decode", "aggregated")) is decodes]
            for decodes in (True, False)
        )
        for process in decode:
            end(process)
        for process in decode:
            await process.wait()
        for process in others:
            assert process.stdin is not None
            await process.stdin.aclose()
        for process in others:
            await process.wait()

    def _role(self, engine: str) -> str | None:
        return self.roles.get(engine.rpartition("-")[0])

    async def _start_all(self) -> dict[str, ComponentProcess]:
        components: dict[str, ComponentProcess] = {}
        begun = now_ns()
        log.info("starting %d processes: %s, %s", 1 + len(self.engines), ROUTER, ", ".join(self.engines))

        async def begin(name: str, module: str, *args: str) -> None:
            components[name] = await self._start(name, module, *args)
            ready, after_s = len(components), (now_ns() - begun) / S
            log.info("%s is ready (%d of %d), after %.1f s", name, ready, 1 + len(self.engines), after_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin, ROUTER, "pdflow_runtime.router.front")
            for name in self.engines:
                nursery.start_soon(begin, name, "pdflow_runtime.process.worker", "--name", name)
        return {name: components[name] for name in (ROUTER, *self.engines)}

    def stop(self) -> None:
        self.stopping = True
        end(self.router.process)

    async def _start(self, name: str, module: str, *args: str) -> ComponentProcess:
        """Start a process, and wait for the line in which it reports that it is up. StartError if none comes."""
        command = [sys.executable, "-m", module, *self.common, *args]
        # Engines keep to this host, so UCX does.
        environment = {
            "UCX_NET_DEVICES": "lo",
            **os.environ,
            "OMP_NUM_THREADS": str(self.scenario.serve.threads),
            **self.environments.get(name, {}),
        }
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self.processes[name] = process
        assert process.stdout is not None
        first_line = b""
        with trio.move_on_after(self.up_s):
            while b"\n" not in first_line and (data := await process.stdout.receive_some()):
                first_line += data
        if b"\n" not in first_line:
            process.kill()
            await process.wait()
            raise StartError(
                f"{name} did not start: it exited, or took more than {self.up_s:.0f} s; its messages are above"
            )
        return ComponentProcess(name, process, first_line)

    async def _live(self, component: ComponentProcess, deaths: int = 0) -> None:
        """Report an engine that is up to the router, and watch its process."""
        await self._send_to_router(msgspec.json.decode(component.first_line, type=EngineAddress))
        if self.reports:
            assert component.process.stdin is not None
            with suppress(trio.BrokenResourceError):
                await component.process.stdin.send_all(msgspec.json.encode(RouterAddress(self._router_at())) + b"\n")
        self._nursery.start_soon(self._watch, component, deaths)

    async def _watch(self, component: ComponentProcess, deaths: int) -> None:
        begun = now_ns()
        await component.process.wait()
        if self.stopping:
            return
        for_good = component.process.returncode == 0
        await self._send_to_router(EngineGone(component.name, for_good=for_good))
        if for_good:
            log.info("%s exited, as ordered; not restarted", component.name)
            return
        deaths = 0 if now_ns() - begun > BACKOFF_RESET_S * S else deaths
        pause_s = AGAIN_S[min(deaths, len(AGAIN_S) - 1)]
        log.error("%s %s; restarting it in %g s", component.name, exit_text(component.process.returncode), pause_s)
        await trio.sleep(pause_s)
        await self._begin(component.name, deaths + 1)

    async def _begin(self, name: str, deaths: int = 0) -> None:
        """Start an engine, and try again until it comes up."""
        while True:
            try:
                component = await self._start(name, "pdflow_runtime.process.worker", "--name", name)
            except StartError as error:
                log.error("%s", error)
                await trio.sleep(AGAIN_S[min(deaths, len(AGAIN_S) - 1)])
                deaths += 1
                continue
            await self._live(component, deaths)
            return

    async def _read_router(self) -> None:
        """Start the engines that the router names, one on each line of its output."""
        stdout = self.router.process.stdout
        assert stdout is not None
        rest = b""
        async for data in stdout:
            *names, rest = (rest + bytes(data)).split(b"\n")
            for name in names:
                self._nursery.start_soon(self._begin, name.decode())

    def _router_at(self) -> Coordinates:
        at = urlsplit(self.router.first_line.decode().strip())
        return Coordinates(reached_at(at.hostname or ""), at.port or 0)

    async def _send_to_router(self, news: News) -> None:
        stdin = self.router.process.stdin
        assert stdin is not None
        try:
            async with self._send_lock:
                await stdin.send_all(msgspec.json.encode(news) + b"\n")
        except trio.BrokenResourceError:
            log.warning("could not report %s to the router: the router's process has closed its stdin", news.engine)


def prepare(scenario: ResolvedScenario) -> None:
    """Check once what every process would complain of, and make what they share."""
    serve_config = scenario.serve
    transport_named(serve_config.transport)
    if (caution := caution_of(serve_config.transport)) is not None:
        log.warning("%s", caution)
    if not is_synthetic(scenario):
        need_torch()
        config_of(scenario, folder_of(scenario))
    secret_of(scenario)
    tls_of(scenario)
    if stores_of(scenario):
        check_server(scenario)
    if not is_loopback(serve_config.engine_host):
        problem = (
            f"is {serve_config.engine_host}, expected loopback: without --role all engines run on this host; for "
            "several hosts start each component with --role (docs/hosts.md)"
        )
        raise ScenarioError([Problem(scenario.path, "serve.engine_host", problem)])
    listening(scenario).close()


def end(process: trio.Process) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)


async def kill_all(processes: Collection[trio.Process]) -> None:
    """Kill those that still run, and wait for their end."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        await process.wait()


async def serve(scenario: ResolvedScenario, file: str, overrides: tuple[str, ...], record: Record) -> None:
    """Run a cluster, from the first process to the last. Its URL is the first line on stdout."""
    refuse_what_is_not_served(scenario)
    environments = gpu_environments(scenario)
    prepare(scenario)
    if is_synthetic(scenario):
        log.info(
            "engines are synthetic: they compute no model; each step lasts as long as the scenario's cost model says"
        )
    for note in live_notes(scenario):
        log.info("note: %s", note)
    record.begin()
    cluster = Cluster(scenario, file, overrides, record, environments)

    def up(url: str) -> None:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        log.info("cluster is up: serving model %s with %s", scenario.model.name, ", ".join(cluster.engines))

    sweep()  # what a cluster has left that was killed itself
    try:
        await cluster.run(up)
    finally:
        with trio.CancelScope(shield=True):
            await kill_all(cluster.processes.values())
        # After a failed start, too. A process is reaped by now: what it has left is that of no process.
        sweep()
        if record.conclude(scenario) is not None:
            log.info("results written to %s", record.out)


def main(file: str, overrides: tuple[str, ...], **kept: Any) -> int:
    """Run `pdflow serve FILE`; return the exit code. `kept` are the fields of a Record."""
    log_to_stderr("cluster")

    async def run() -> None:
        await serve(load(file, overrides=overrides), file, overrides, Record(**kept))

    return run_to_exit_code(run)

"""The cluster on this host: the router and every engine, each a process of its own, started, watched and stopped; and
every node of a store, which is treated as one more engine here.

An engine whose process ends is reported to the router at once, and started again, with memory and an incarnation of its
own. An engine that ends again and again is restarted after longer pauses; one that ends with exit code 0 was ordered
to. The router says which engines are to be added.

A router whose process ends is started again. The engines stay, with their KV: they cancel the requests of the router's
closed connections, and KV that no engine fetches any more is free when its lease ends. The supervisor owns the sockets
at which the router accepts: the next router has the same ports, and a client that connects in between waits for it. A
router that ends ROUTER_STARTS times in a row before it is ready, or soon after, ends the cluster (EXIT_ROUTER_LOST).

To stop, the router is drained first, then the decode engines: no new prompt comes by then, and what they still hold has
an end. Then the others end, whatever they hold.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import trio

from pdflow.errors import EXIT_BAD_INPUT, PdflowError, RouterLostError
from pdflow.protocol.values import S
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.wiring.router import heartbeat_ns
from pdflow_runtime.build import engines_of
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import weights_bytes
from pdflow_runtime.observe.record import Record
from pdflow_runtime.process.addresses import (
    DrainOrder,
    EngineAddress,
    EngineGone,
    Order,
    RouterAddress,
    StartOrder,
    reached_at,
    read_order,
)
from pdflow_runtime.process.devices import Environment
from pdflow_runtime.process.processes import drain_on_signal, exit_text
from pdflow_runtime.process.router_pipe import RouterPipe
from pdflow_runtime.process.router_sockets import RouterSockets
from pdflow_runtime.security.local_secret import new_secret
from pdflow_runtime.security.secret import LOCAL_VARIABLE, secret_of
from pdflow_runtime.store.build import stores_of

log = logging.getLogger(__name__)

ROUTER: Final = "router"
UP_S: Final = 120.0
"""Time for a process to report that it is up, besides the time to read and hash a model."""
SLOWEST_BYTES_PER_S: Final = 100e6
"""The rate at which a model is read: a disk in a network."""
AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Pause between the end of a process and its restart, by how many have ended one after the other."""
ROUTER_STARTS: Final = 5
"""Attempts to start a router again, one after the other, before the cluster is ended."""
SHORT_LIFE_S: Final = 10.0
"""A router that ends sooner after it was ready could as well not have started."""
BACKOFF_RESET_S: Final = 60.0
"""A process that ran so long did not end for the reason for which the one before did."""


def pause_after_s(deaths: int) -> float:
    """Return how long to wait before a process is started again, of which so many have ended before."""
    return AGAIN_S[min(deaths, len(AGAIN_S) - 1)]


class StartError(PdflowError):
    """A process of the cluster did not come up; its messages are on stderr."""

    exit_code = EXIT_BAD_INPUT


class ComponentProcess:
    """The process of a component. `first_line` is the first line of its standard output, and `rest` what was read
    after it."""

    def __init__(self, name: str, process: trio.Process, first_line: bytes, rest: bytes = b"") -> None:
        self.name: Final = name
        self.process: Final = process
        self.first_line: Final = first_line
        self.rest: Final = rest


class Cluster:
    """The processes of a cluster. Args: those that every process is started with: the scenario, its file, and what
    replaces values of it; variables of the environment, by process; and the sockets at which the router accepts."""

    def __init__(
        self,
        scenario: ResolvedScenario,
        file: str,
        overrides: tuple[str, ...],
        record: Record,
        environments: Mapping[str, Environment],
        sockets: RouterSockets,
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
        self.secret: Final[dict[str, str]] = {} if secret_of(scenario) else {LOCAL_VARIABLE: new_secret()}
        """A secret that was made for this cluster, in the environment of its processes."""
        self.link: Final = RouterPipe()
        self._sockets: Final = sockets
        self._started: Final[set[str]] = set(self.engines)
        """Engines that run or are being started."""
        self._restarting_router: Final = trio.CancelScope()

    async def run(self, up: Callable[[str], None]) -> None:
        """Run until ordered to stop. `up` is called with the router's URL once requests can be served."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            components = await self._start_all()
            self.router = components.pop(ROUTER)
            nursery.start_soon(self._read_router, self.router)
            for component in components.values():
                await self._live(component)
            grace_s = 2 * self.scenario.serve.drain_s + 5
            nursery.start_soon(drain_on_signal, self.stop, grace_s, nursery.cancel_scope)
            up(self.router.first_line.decode().strip())
            try:
                with self._restarting_router:
                    await self._keep_router()
            finally:
                self.stopping = True
                with trio.move_on_after(grace_s):
                    await self._end_engines()
            nursery.cancel_scope.cancel()

    async def _keep_router(self) -> None:
        """Start the router again whenever it has ended, until the cluster is stopped. RouterLostError."""
        deaths = short_lives = 0
        while True:
            begun = now_ns()
            await self.router.process.wait()
            await self.link.disconnect()
            if self.stopping:
                return
            lived_s = (now_ns() - begun) / S
            deaths = 0 if lived_s > BACKOFF_RESET_S else deaths
            short_lives = short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            if short_lives == ROUTER_STARTS:
                raise RouterLostError(
                    f"the router ended {ROUTER_STARTS} times in a row within {SHORT_LIFE_S:g} s of its start: the "
                    "cluster stops; the router's messages are above"
                )
            pause_s = pause_after_s(deaths)
            how = exit_text(self.router.process.returncode)
            log.error("%s %s; restarting it in %g s; the engines stay up, open requests are lost", ROUTER, how, pause_s)
            await trio.sleep(pause_s)
            self.router = await self._router_again()
            deaths += 1
            self._nursery.start_soon(self._read_router, self.router)
            log.info("the router is up again, with %d engines", len(self.link.up))

    async def _router_again(self) -> ComponentProcess:
        """Start a router, and try again a few times. RouterLostError."""
        for attempt in range(1, ROUTER_STARTS + 1):
            try:
                return await self._start_router()
            except StartError as error:
                log.error("%s (attempt %d of %d)", error, attempt, ROUTER_STARTS)
                await self.link.disconnect()
            if attempt < ROUTER_STARTS:
                await trio.sleep(pause_after_s(attempt - 1))
        raise RouterLostError(
            f"the router ended, and {ROUTER_STARTS} attempts to start it again failed: the cluster stops; the router's "
            "messages are above"
        )

    async def _start_router(self) -> ComponentProcess:
        descriptors = self._sockets.descriptors
        arguments = [argument for descriptor in descriptors for argument in ("--listener", str(descriptor))]
        return await self._start(ROUTER, "pdflow_runtime.router.front", *arguments, inherits=descriptors)

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

        async def begin(name: str) -> None:
            components[name] = await (self._start_router() if name == ROUTER else self._start_engine(name))
            ready, after_s = len(components), (now_ns() - begun) / S
            log.info("%s is ready (%d of %d), after %.1f s", name, ready, 1 + len(self.engines), after_s)

        async with trio.open_nursery() as nursery:
            for name in (ROUTER, *self.engines):
                nursery.start_soon(begin, name)
        return {name: components[name] for name in (ROUTER, *self.engines)}

    def stop(self) -> None:
        """Stop the router, and after it the engines. Clients that connect from now on are refused."""
        self.stopping = True
        self._sockets.close()
        if self.router.process.poll() is None:
            end(self.router.process)
        else:
            self._restarting_router.cancel()

    async def _start_engine(self, name: str) -> ComponentProcess:
        return await self._start(name, "pdflow_runtime.process.worker", "--name", name)

    async def _start(self, name: str, module: str, *args: str, inherits: Sequence[int] = ()) -> ComponentProcess:
        """Start a process, and wait for the line in which it reports that it is up. StartError if none comes. Args:
        `inherits`, file descriptors that the process gets."""
        command = [sys.executable, "-m", module, *self.common, *args]
        # Engines keep to this host, so UCX does.
        environment = {
            "UCX_NET_DEVICES": "lo",
            **os.environ,
            **self.secret,
            "OMP_NUM_THREADS": str(self.scenario.serve.threads),
            **self.environments.get(name, {}),
        }
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=inherits,
        )
        self.processes[name] = process
        assert process.stdin is not None
        assert process.stdout is not None
        first_line = b""
        with trio.move_on_after(self.up_s):
            if name == ROUTER:
                await self.link.connect(process.stdin)
            while b"\n" not in first_line and (data := await process.stdout.receive_some()):
                first_line += data
        if b"\n" not in first_line:
            process.kill()
            await process.wait()
            raise StartError(
                f"{name} did not start: it exited, or took more than {self.up_s:.0f} s; its messages are above"
            )
        first_line, _, rest = first_line.partition(b"\n")
        return ComponentProcess(name, process, first_line, rest)

    async def _live(self, component: ComponentProcess, deaths: int = 0) -> None:
        """Report an engine that is up to the router, and watch its process."""
        await self.link.report(msgspec.json.decode(component.first_line, type=EngineAddress))
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
        await self.link.report(EngineGone(component.name, for_good=for_good))
        if for_good:
            self._started.discard(component.name)
            log.info("%s exited, as ordered; not restarted", component.name)
            return
        deaths = 0 if now_ns() - begun > BACKOFF_RESET_S * S else deaths
        pause_s = pause_after_s(deaths)
        log.error("%s %s; restarting it in %g s", component.name, exit_text(component.process.returncode), pause_s)
        await trio.sleep(pause_s)
        await self._begin(component.name, deaths + 1)

    async def _begin(self, name: str, deaths: int = 0) -> None:
        """Start an engine, and try again until it comes up."""
        while True:
            try:
                component = await self._start_engine(name)
            except StartError as error:
                log.error("%s", error)
                await trio.sleep(pause_after_s(deaths))
                deaths += 1
                continue
            await self._live(component, deaths)
            return

    async def _read_router(self, router: ComponentProcess) -> None:
        """Follow the router's orders, one on each line of its output, until it ends."""
        stdout, rest = router.process.stdout, router.rest
        assert stdout is not None
        async with stdout:
            while True:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    self._follow(read_order(line))
                data = await stdout.receive_some()
                if not data:
                    return
                rest += data

    def _follow(self, order: Order) -> None:
        match order:
            case DrainOrder():
                self.link.ordered(order)
            case StartOrder(name) if name not in self._started:
                self._started.add(name)
                self._nursery.start_soon(self._begin, name)

    def _router_at(self) -> Coordinates:
        """Return where engines report."""
        port = self._sockets.port if self._sockets.cluster_port is None else self._sockets.cluster_port
        return Coordinates(reached_at(self.scenario.serve.host), port)


def end(process: trio.Process) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)

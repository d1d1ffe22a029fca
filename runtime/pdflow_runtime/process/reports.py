"""The reports of an engine to the router, that it is there, and where: when it comes up, again and again, and when it
ends.

No answer changes what an engine does: a router that is not there yet, or has restarted, knows the engine after the next
report. Whether it is drained stands in the answer, and the next report repeats it: a router that has restarted takes it
from there. An engine that has not reported for too long is no member; that is decided in `pdflow.routing.heartbeats`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.values import S
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.clock import deadline_of, now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import (
    EngineAddress,
    EngineGone,
    EngineLeaving,
    EngineNews,
    reached_at,
    read_report_answer,
)
from pdflow_runtime.security.client_tls import reporting_context
from pdflow_runtime.security.signed import Signer
from pdflow_runtime.security.tls import REMEDY, Tls, cluster_client

log = logging.getLogger(__name__)

PATH: Final = "/admin/engines"
ROUTER: Final = "router"
"""The name of the router, for which requests to it are signed."""
BY_CERTIFICATE: Final = f"; serve.router must name the router's serve.cluster_port, and {REMEDY}"
"""What an operator has to know when a report to the cluster port fails for want of TLS."""


class Reporter:
    """Sends the reports of one engine. Args: `address` is the report that is sent, every `every_s`. Nothing is sent
    before the router is set; `client`, of this reporter alone, sends it; `tls_remedy` follows a report's failure for
    want of TLS in the log."""

    def __init__(
        self,
        address: EngineAddress,
        signer: Signer,
        every_s: float,
        client: HttpClient | None = None,
        tls_remedy: str = "",
    ) -> None:
        self.address = address
        self.router: Coordinates | None = None
        self._router_known: Final = trio.Event()
        self._signer: Final = signer
        self._every_s: Final = every_s
        self._client: Final = HttpClient() if client is None else client
        self._tls_remedy: Final = tls_remedy
        self._last_result = "nothing"
        """The result of the last report; logged when it changes."""
        self._leaving = False
        self._running: Final = trio.CancelScope()

    def set_router(self, router: Coordinates) -> None:
        """Set the address of the router, to which reports go from now on."""
        self.router = router
        self._router_known.set()

    async def run(self) -> None:
        """Report again and again, until the end is reported."""
        with self._running:
            await self._router_known.wait()
            due_ns = now_ns()
            while True:
                await self._report(self.address)
                if self._leaving:
                    await self.leave()  # a router that has begun anew has not heard of it
                due_ns = max(due_ns + int(self._every_s * S), now_ns())
                await trio.sleep_until(deadline_of(due_ns))

    async def leave(self) -> None:
        """Report that the engine drains: it wants no new requests."""
        self._leaving = True
        await self._report(EngineLeaving(self.address.engine, self.address.incarnation))

    async def end(self) -> None:
        """Report that the engine is gone; no later report says that it is there."""
        self._running.cancel()
        await self._report(EngineGone(self.address.engine, self.address.incarnation))
        self._client.close()

    async def _report(self, news: EngineNews) -> None:
        """Send one report; give up when the next one is due."""
        at = self.router
        if at is None:
            return
        body = msgspec.json.encode(news)
        result = f"no answer within {self._every_s:g} s"
        try:
            with trio.move_on_after(self._every_s):
                headers = (JSON, *self._signer.sign(ROUTER, "POST", PATH, body))
                async with self._client.request("POST", at.host, at.port, PATH, headers, body) as response:
                    answer = await response.read()
                    error = OpenAIError.from_response(response.status, answer) if response.status != 200 else None
                    result = "" if response.status == 200 else str(error or response.status)
                    if not result:
                        self.address = msgspec.structs.replace(self.address, drained=read_report_answer(answer).drained)
        except UpstreamError as error:
            result = f"{error}{self._tls_remedy}" if error.kind == "tls" else str(error)
        except msgspec.DecodeError as error:
            result = str(error)
        if result != self._last_result:
            self._last_result = result
            if result:
                log.warning(
                    "report to the router at %s:%d failed: %s; retrying; without reports this engine gets no requests",
                    at.host,
                    at.port,
                    result,
                )
            else:
                log.info("registered with the router at %s:%d", at.host, at.port)


def reporter_of(
    scenario: ResolvedScenario, tls: Tls | None, address: EngineAddress, signer: Signer, every_s: float
) -> Reporter:
    """Return a reporter that connects to routers as the scenario says: to their cluster ports by the certificates of
    `tls`, to their ports for clients as clients do."""
    if scenario.serve.cluster_port is None:
        return Reporter(address, signer, every_s, HttpClient(tls=reporting_context(scenario)))
    return Reporter(address, signer, every_s, cluster_client(tls), BY_CERTIFICATE)


class RouterReporters:
    """The reports of one engine to every router in front of it. Each router answers for itself: an engine that an
    operator has drained at one router gets requests of the others."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters: Final = reporters

    async def run(self) -> None:
        await self._all([reporter.run for reporter in self._reporters])

    async def leave(self) -> None:
        await self._all([reporter.leave for reporter in self._reporters])

    async def end(self) -> None:
        await self._all([reporter.end for reporter in self._reporters])

    async def _all(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Call all at once: a router that does not answer delays no report to another one."""
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(call)


def routers_at(scenario: ResolvedScenario) -> list[Coordinates]:
    """Return the addresses at which engines that are started by themselves find the routers. ScenarioError if the
    scenario does not say it."""
    serve_config = scenario.serve
    if serve_config.router is None:
        own = own_router(scenario)
        return [_router_at(scenario, f"{serve_config.host}:{own.port}", own)]
    return [_router_at(scenario, text, _split(text)) for text in map(str.strip, serve_config.router.split(","))]


def other_routers(scenario: ResolvedScenario) -> list[Coordinates]:
    """Return the addresses of routers besides the one that the supervisor of this scenario's engines starts."""
    if scenario.serve.router is None:
        return []
    return [at for at in routers_at(scenario) if at != own_router(scenario)]


def own_router(scenario: ResolvedScenario) -> Coordinates:
    """Return the address to which engines report at the router of this scenario's own keys."""
    serve_config = scenario.serve
    port = serve_config.port if serve_config.cluster_port is None else serve_config.cluster_port
    return Coordinates(reached_at(serve_config.host), port)


def _split(text: str) -> Coordinates:
    try:
        split = urlsplit(f"//{text}")
        return Coordinates(split.hostname or "", split.port or 0)
    except ValueError:
        return Coordinates("", 0)


def _router_at(scenario: ResolvedScenario, shown: str, at: Coordinates) -> Coordinates:
    if not at.host or not at.port:
        raise ScenarioError([Problem(scenario.path, "serve.router", f"is {shown}, expected HOST:PORT")])
    return at

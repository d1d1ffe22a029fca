"""Reports to a router's cluster port: with certificates, renewed ones on new connections, and what is logged where one
is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
import trustme

from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.http.connection import Connection
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import Server, serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.process.reports import Reporter, other_routers, own_router, reporter_of, routers_at
from pdflow_runtime.security.signed import UNSIGNED
from pdflow_runtime.security.tls import KEYS
from pdflow_runtime.tls_socket import TlsSocket
from tests.runtime.http.world import LOCAL, echo, serving
from tests.runtime.process.test_cluster_port import failed_reports
from tests.runtime.security.test_tls import Member, unchecked
from tests.runtime.support.live_pair import cluster

__all__ = ["unchecked"]

EVERY_S = 0.5
"""A report that takes longer is given up: on a busy machine a handshake may take a tenth of this."""
ADDRESS = EngineAddress("decode-0", Coordinates(LOCAL, 1), Coordinates(LOCAL, 2), 1, 1)


def scenario_of(folder: Path, *overrides: str) -> ResolvedScenario:
    return cluster("serve.cluster_port=8443", *(f"serve.{key}={folder / key}" for key in KEYS), *overrides)


class RouterPort:
    """A cluster port that accepts every report. `certificates` are the serial numbers of those that sent one."""

    def __init__(self) -> None:
        self.certificates: list[str] = []
        self.server: Server

    async def answer(self, request: HttpRequest, responder: Responder) -> None:
        assert (request.method, request.path) == ("POST", "/admin/engines")
        assert msgspec.json.decode(request.body)["engine"] == "decode-0"
        (connection,) = [each for each in self.server.connections if each._answering is responder]
        self.certificates.append(serial_of(connection))
        await responder.reply(200, (JSON,), b"{}")


def serial_of(connection: Connection) -> str:
    sock = connection._sock
    assert isinstance(sock, TlsSocket)
    found = sock.session.getpeercert()
    assert found
    assert sock.session.version() == "TLSv1.3"
    return str(found["serialNumber"])


@asynccontextmanager
async def reporting(router: Member, engine: Member) -> AsyncIterator[tuple[RouterPort, Reporter]]:
    """A reporter that runs, as an engine with these files has it, and the port to which it reports."""
    port = RouterPort()
    async with trio.open_nursery() as nursery:
        answering = partial(serve_http, listen(LOCAL, 0), port.answer, tls=router.tls().accepting)
        port.server = await nursery.start(answering)
        reporter = reporter_of(scenario_of(engine.folder), engine.tls(), ADDRESS, UNSIGNED, EVERY_S)
        reporter.set_router(Coordinates(LOCAL, port.server.port))
        nursery.start_soon(reporter.run)
        try:
            yield port, reporter
        finally:
            reporter._client.close()
        nursery.cancel_scope.cancel()


async def more(port: RouterPort, count: int = 2) -> str:
    """The certificate of the reports from now on."""
    known = len(port.certificates)
    with trio.fail_after(30):
        while len(port.certificates) < known + count:
            await trio.sleep(0.01)
    return port.certificates[-1]


async def reconnecting(reporter: Reporter) -> None:
    """Close the connection between two reports: the next report opens another one."""
    with trio.fail_after(30):
        while not any(reporter._client._idle.values()):
            await trio.sleep(0.001)
    reporter._client.close()


@pytest.mark.trio
async def test_a_renewed_certificate_is_used_on_the_next_connection(tmp_path: Path) -> None:
    authority = trustme.CA()
    router, engine = (Member(tmp_path / name, authority) for name in ("router", "engine"))
    async with reporting(router, engine) as (port, reporter):
        first = await more(port)
        assert len(port.server.connections) == 1, "reports use one connection"
        engine.certify(authority)
        assert await more(port) == first, "a connection keeps its certificate"
        await reconnecting(reporter)
        renewed = await more(port)
        assert renewed != first
    assert set(port.certificates) == {first, renewed}


@pytest.mark.trio
async def test_a_new_authority_is_used_by_both_sides_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    router, engine = (Member(tmp_path / name, authority) for name in ("router", "engine"))
    async with reporting(router, engine) as (port, reporter):
        await more(port)
        router.certify(other)
        await reconnecting(reporter)
        with trio.fail_after(30):
            while "certificate verify failed" not in caplog.text:
                await trio.sleep(0.01)
        engine.certify(other)
        await more(port)
    (reason,) = failed_reports(caplog.text)
    assert "serve.tls_ca names the file with its authority" in reason
    assert "serve.router must name the router's serve.cluster_port" in reason


@pytest.mark.trio
@pytest.mark.usefixtures("unchecked")
async def test_an_engine_whose_certificate_is_refused_logs_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    router, engine = Member(tmp_path / "router", authority), Member(tmp_path / "engine", trustme.CA())
    authority.cert_pem.write_to_path(engine.folder / "tls_ca")
    async with reporting(router, engine) as (port, _):
        with trio.fail_after(30):
            while "; retrying" not in caplog.text or f"rejected a connection from {LOCAL}" not in caplog.text:
                await trio.sleep(0.01)  # the router logs one line a second
    assert port.certificates == []
    assert "the server refuses this side's certificate: unknown ca; serve.router must name" in caplog.text
    assert "serve.tls_cert, tls_key and tls_ca (docs/hosts.md)" in caplog.text


@pytest.mark.trio
async def test_a_report_to_a_port_without_tls_says_which_port_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Member(tmp_path / "engine", trustme.CA())
    async with serving(echo) as plain, trio.open_nursery() as nursery:
        reporter = reporter_of(scenario_of(engine.folder), engine.tls(), ADDRESS, UNSIGNED, 1.0)
        reporter.set_router(Coordinates(LOCAL, plain.port))
        nursery.start_soon(reporter.run)
        with trio.fail_after(30):
            while "; retrying" not in caplog.text:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert "the server does not use TLS; serve.router must name the router's serve.cluster_port" in caplog.text


def test_routers_are_found_at_their_cluster_ports(tmp_path: Path) -> None:
    assert routers_at(scenario_of(tmp_path)) == [Coordinates(LOCAL, 8443)]
    assert own_router(scenario_of(tmp_path, "serve.host=0.0.0.0")) == Coordinates(LOCAL, 8443)
    both = scenario_of(tmp_path, "serve.router=127.0.0.1:8443, 127.0.0.1:8444")
    assert other_routers(both) == [Coordinates(LOCAL, 8444)]

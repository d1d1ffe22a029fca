"""TLS within the cluster: who has no certificate of its authority is refused, and learns why; the server serves on."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from pdflow.errors import ScenarioError
from pdflow.protocol.values import Instant
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.server import Server, serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.security import tls
from pdflow_runtime.security.reloaded import EVERY_NS
from pdflow_runtime.security.tls import KEYS, Tls, cluster_client, log_tls_failure, tls_of
from pdflow_runtime.tls_socket import TlsSocket, failure_text
from tests.runtime.http.world import LOCAL, echo, response_to, serving
from tests.runtime.support.certificates import certify
from tests.runtime.support.live_pair import cluster

PAST = datetime.now(UTC) - timedelta(days=1)


class Member:
    """The files of a component. Args: where they are, and who certifies it."""

    def __init__(self, folder: Path, authority: trustme.CA, not_after: datetime | None = None) -> None:
        self.folder = folder
        self.now: Instant = 0
        folder.mkdir()
        self.certify(authority, not_after)

    def certify(self, authority: trustme.CA, not_after: datetime | None = None) -> None:
        certify(self.folder, authority, not_after=not_after)
        self.now += EVERY_NS

    def tls(self) -> Tls:
        files = (f"serve.{key}={self.folder / key}" for key in KEYS)
        made = tls_of(cluster(*files), lambda: self.now)
        assert made
        return made


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def engine(tmp_path: Path, authority: trustme.CA) -> Member:
    return Member(tmp_path / "engine", authority)


@pytest.fixture
def router(tmp_path: Path, authority: trustme.CA) -> Member:
    return Member(tmp_path / "router", authority)


@asynccontextmanager
async def served(tls: Tls) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(serve_http, listen(LOCAL, 0), echo, tls=tls.accepting))
        nursery.cancel_scope.cancel()


async def asked(client: HttpClient, server: Server) -> bytes:
    """The answer on a new connection."""
    client.forget(LOCAL, server.port)
    async with client.request("POST", LOCAL, server.port, "/", (), b"x") as response:
        return await response.read()


ANSWER = b"POST /  x"


@pytest.mark.trio
async def test_components_of_one_authority_serve_each_other(engine: Member, router: Member) -> None:
    client = cluster_client(router.tls())
    async with served(engine.tls()) as server:
        assert await asked(client, server) == ANSWER
        (connection,) = server.connections
        sock = connection._sock
        assert isinstance(sock, TlsSocket)
        assert (sock.session.version(), bool(sock.session.getpeercert())) == ("TLSv1.3", True)
    client.close()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates that became wrong after they were read."""
    monkeypatch.setattr(tls, "_try", lambda contexts: None)


@pytest.mark.trio
@pytest.mark.usefixtures("unchecked")
async def test_a_client_without_a_certificate_of_the_authority_is_refused(
    engine: Member, router: Member, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    authority.configure_trust(nobody)
    other, expired = Member(tmp_path / "other", trustme.CA()), Member(tmp_path / "expired", authority, PAST)
    for member in (other, expired):
        authority.cert_pem.write_to_path(member.folder / "tls_ca")
    friend = cluster_client(router.tls())
    clients = {
        "certificate required": HttpClient(tls=nobody),
        "unknown ca": cluster_client(other.tls()),
        "certificate expired": cluster_client(expired.tls()),
    }
    async with served(engine.tls()) as server:
        for reason, client in clients.items():
            with pytest.raises(UpstreamError, match=f"the server refuses this side's certificate: {reason}") as caught:
                await asked(client, server)
            assert caught.value.kind == "tls"
            assert await asked(friend, server) == ANSWER
            client.close()
        assert len(server.connections) <= 1
    friend.close()
    assert f"rejected a connection from {LOCAL}: " in caplog.text
    assert "peer did not return a certificate" in caplog.text


@pytest.mark.trio
async def test_plain_http_is_refused_with_what_to_do(engine: Member, router: Member) -> None:
    friend = cluster_client(router.tls())
    async with served(engine.tls()) as server:
        answer = await response_to(server.port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"set serve.tls_cert, tls_key and tls_ca where the request comes from" in answer
        assert await asked(friend, server) == ANSWER
    friend.close()


@pytest.mark.trio
@pytest.mark.usefixtures("unchecked")
async def test_a_server_without_a_valid_certificate_gets_no_request(
    router: Member, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {
        "certificate verify failed: .*; serve.tls_ca names the file": Member(tmp_path / "other", trustme.CA()),
        "certificate has expired: renew the server's": Member(tmp_path / "expired", authority, PAST),
    }
    client = cluster_client(router.tls())
    for reason, member in others.items():
        async with served(member.tls()) as server:
            with pytest.raises(UpstreamError, match=reason):
                await asked(client, server)
    async with serving(echo) as plain:
        with pytest.raises(UpstreamError, match=rf"no TLS with {LOCAL}:\d+: the server does not use TLS") as caught:
            await asked(client, plain)
    client.close()
    with caplog.at_level(logging.ERROR):
        log_tls_failure("decode-0", caught.value)
        log_tls_failure("decode-1", UpstreamError("refused", "not of TLS"))
    assert "a request to decode-0 failed: no TLS with" in caplog.text
    assert "decode-1" not in caplog.text


@pytest.mark.trio
async def test_renewed_certificates_are_used_without_a_restart(
    engine: Member, router: Member, caplog: pytest.LogCaptureFixture
) -> None:
    client = cluster_client(router.tls())
    async with served(engine.tls()) as server:
        assert await asked(client, server) == ANSWER
        renewed = trustme.CA()
        engine.certify(renewed)
        with pytest.raises(UpstreamError):
            await asked(client, server)
        router.certify(renewed)
        assert await asked(client, server) == ANSWER
        (router.folder / "tls_key").write_text("half of a fi")
        router.now += EVERY_NS
        assert await asked(client, server) == ANSWER
    client.close()
    assert "certificate of the cluster: the changed file is refused" in caplog.text


def test_a_key_of_another_certificate_is_bad_input(engine: Member, router: Member) -> None:
    (engine.folder / "tls_key").write_bytes((router.folder / "tls_key").read_bytes())
    with pytest.raises(ScenarioError, match=r"serve\.tls_cert: .*key values mismatch"):
        engine.tls()


@pytest.mark.parametrize(("valid", "reason"), [(False, "certificate has expired"), (True, "certificate verify failed")])
def test_files_with_which_nobody_could_connect_are_refused_at_once(
    valid: bool, reason: str, authority: trustme.CA, tmp_path: Path
) -> None:
    member = Member(tmp_path / "member", authority, None if valid else PAST)
    if valid:
        trustme.CA().cert_pem.write_to_path(member.folder / "tls_ca")
    with pytest.raises(ScenarioError, match=reason):
        member.tls()


def test_only_an_alert_about_a_certificate_is_called_so() -> None:
    error = ssl.SSLError(1, "")
    error.reason = "TLSV1_ALERT_PROTOCOL_VERSION"
    assert failure_text(error) == "the server ended the connection: protocol version"
    error.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    assert failure_text(error) == "the server refuses this side's certificate: certificate expired"

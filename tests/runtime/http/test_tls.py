"""TLS at the server and the client: what is relayed, streamed, refused, and given way."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from pdflow.errors import ScenarioError
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import EVENT_STREAM, HttpLimits, HttpRequest
from pdflow_runtime.http.pump import carry
from pdflow_runtime.http.relay import relay
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import RequestHandler, Server, serve_http
from pdflow_runtime.http.sockets import listen, receive, send_all, silent
from pdflow_runtime.security.client_tls import client_tls_of, server_context
from pdflow_runtime.security.reloaded import EVERY_NS
from pdflow_runtime.tls_socket import TlsSocket, accepted_with, client_context, is_buffered, opened_with
from tests.runtime.http.world import LOCAL, echo, response_to, serving
from tests.runtime.support.live_pair import cluster

LARGE = bytes(range(256)) * 12_345


class Authority:
    """It certifies a server at 127.0.0.1, with files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / name for name in ("router.crt", "router.key", "ca.crt"))
        self.renew()

    def renew(self) -> None:
        """Another authority, and a certificate of it, in the same files."""
        self.made = trustme.CA()
        issued = self.made.issue_cert(LOCAL)
        self.made.cert_pem.write_to_path(self.ca)
        issued.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))

    def client(self) -> HttpClient:
        context = client_context()
        self.made.configure_trust(context)
        return HttpClient(tls=context)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def secured(
    authority: Authority, handler: RequestHandler, limits: HttpLimits | None = None
) -> AsyncIterator[Server]:
    context = server_context(authority.cert, authority.key)
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(serve_http, listen(LOCAL, 0), handler, limits, tls=lambda: context))
        nursery.cancel_scope.cancel()


async def asked(client: HttpClient, port: int, path: str = "/", body: bytes = b"") -> bytes:
    async with client.request("POST", LOCAL, port, path, (), body) as response:
        return await response.read()


@pytest.mark.trio
async def test_requests_and_answers_of_any_size_over_one_connection(authority: Authority) -> None:
    client = authority.client()
    async with secured(authority, echo, HttpLimits(body_bytes=8 << 20)) as server:
        for size in (0, 1, 16_383, 16_384, 16_385, len(LARGE)):
            assert await asked(client, server.port, "/x", LARGE[:size]) == b"POST /x  " + LARGE[:size]
        assert len(server.connections) == 1
    client.close()


@pytest.mark.trio
async def test_a_client_that_reads_slowly_gets_every_byte_in_order(authority: Authority) -> None:
    async def stream(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        for at in range(0, len(LARGE), 100_000):
            await responder.send(LARGE[at : at + 100_000])
        await responder.end()

    context = ssl.create_default_context()
    authority.made.configure_trust(context)
    async with secured(authority, stream) as server:
        plain = socket.create_connection((LOCAL, server.port))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        stream_of = trio.SocketStream(trio.socket.from_stdlib_socket(plain))
        peer = trio.SSLStream(stream_of, context, server_hostname=LOCAL, https_compatible=True)
        await peer.send_all(b"GET / HTTP/1.0\r\n\r\n")
        got = b""
        while data := await peer.receive_some(70_000):
            got += data
            await trio.sleep(0)
        assert got.partition(b"\r\n\r\n")[2] == LARGE
        await trio.aclose_forcefully(peer)


@pytest.mark.trio
async def test_a_stream_of_an_engine_is_relayed_to_a_client_with_tls(authority: Authority) -> None:
    events = [b"data: %d\n\n" % number for number in range(200)]

    async def engine(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        for event in events:
            await responder.send(event)
        await responder.end()

    inner, client = HttpClient(), authority.client()
    async with serving(engine) as upstream:

        async def router(request: HttpRequest, responder: Responder) -> None:
            async with inner.request("GET", LOCAL, upstream.port, "/") as response:
                await relay(response, responder)

        async with secured(authority, router) as server:
            for _ in range(3):
                assert await asked(client, server.port) == b"".join(events)
    inner.close()
    client.close()


async def pair(authority: Authority) -> tuple[TlsSocket, TlsSocket]:
    """A server's end and its client's."""
    ours, theirs = socket.socketpair()
    context = server_context(authority.cert, authority.key)
    trusting = client_context()
    authority.made.configure_trust(trusting)
    for end in (ours, theirs):
        end.setblocking(False)
    server, client = accepted_with(context, ours), opened_with(trusting, theirs, LOCAL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.handshake)
        nursery.start_soon(client.handshake)
    return server, client


@pytest.mark.trio
async def test_records_that_have_come_are_received_together_and_the_end_after_them(authority: Authority) -> None:
    server, client = await pair(authority)
    for number in range(10):
        assert server.send(b"%d" % number) == 1
    server.shutdown(socket.SHUT_WR)
    assert client.recv(9) == b"012345678"
    assert is_buffered(client)
    taken: list[bytes] = []
    with trio.fail_after(5):
        await carry(client, lambda data: taken.append(data) or bool(data))
    assert taken == [b"9", b""]
    client.close()
    server.close()


@pytest.mark.trio
async def test_a_full_connection_takes_nothing_until_its_peer_reads(authority: Authority) -> None:
    server, client = await pair(authority)
    sent = 0
    while sent < len(LARGE):
        try:
            sent += server.send(LARGE[sent:])
        except BlockingIOError:
            break
    assert 0 < sent < len(LARGE)
    with pytest.raises(ssl.SSLError, match="fewer bytes"):
        server.send(b"others")
    got = b""
    while len(got) < len(LARGE):
        with suppress(BlockingIOError):
            got += client.recv(10_000)
        if sent < len(LARGE):
            with suppress(BlockingIOError):
                sent += server.send(LARGE[sent:])
    assert got == LARGE
    client.close()
    server.close()


@pytest.mark.trio
async def test_nothing_passes_tls_by(authority: Authority) -> None:
    server, client = await pair(authority)
    with pytest.raises(NotImplementedError):
        server.sendall(b"x")
    with pytest.raises(NotImplementedError):
        client.recvfrom(1)
    client.close()
    server.close()


@pytest.mark.trio
async def test_bytes_that_are_not_tls_end_their_connection_only(authority: Authority) -> None:
    server, client = await pair(authority)
    socket.socket.send(client, b"\x17\x03\x03\x00\x20" + bytes(32))
    with trio.fail_after(5), pytest.raises(ssl.SSLError):
        await receive(server)
    with pytest.raises(ssl.SSLError):
        server.recv(1)
    server.close()
    with trio.fail_after(5), pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        await receive(client)
    client.close()


@pytest.mark.trio
async def test_bytes_that_are_decrypted_already_are_received_without_waiting(authority: Authority) -> None:
    """A receiver that takes less than a record must not wait for the next record."""
    server, client = await pair(authority)
    assert silent(server)
    await send_all(client, b"0123456789")
    with trio.fail_after(5):
        await trio.lowlevel.wait_readable(server)
        assert not silent(server)
        assert server.recv(4) == b"0123"
        assert not silent(server)
        assert await receive(server) == b"456789"
    client.close()
    with trio.fail_after(5):
        assert await receive(server) == b""
    server.close()


@pytest.mark.trio
async def test_a_client_without_tls_learns_why_it_is_refused(authority: Authority) -> None:
    async with secured(authority, echo) as server:
        answer = await response_to(server.port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"this port uses TLS" in answer


def test_tls_begins_at_1_2(authority: Authority) -> None:
    context = server_context(authority.cert, authority.key)
    assert context.minimum_version == client_context().minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.trio
async def test_a_client_refuses_a_server_that_it_cannot_verify(authority: Authority) -> None:
    client = HttpClient(tls=client_context())
    async with secured(authority, echo) as server:
        with pytest.raises(UpstreamError, match=r"certificate verify failed.*SSL_CERT_FILE"):
            await asked(client, server.port)
    client.close()


@pytest.mark.trio
async def test_a_handshake_that_is_not_completed_ends_at_its_deadline(
    authority: Authority, autojump_clock: trio.testing.MockClock
) -> None:
    async with secured(authority, echo, HttpLimits(handshake_s=3)) as server:
        begun = trio.current_time()
        stream = await trio.open_tcp_stream(LOCAL, server.port)
        await stream.send_all(b"\x16\x03\x01")
        assert await stream.receive_some() == b""
        assert trio.current_time() - begun >= 3
        await stream.aclose()


@pytest.mark.trio
async def test_a_handshake_that_stands_still_does_not_delay_the_drain(authority: Authority) -> None:
    async with secured(authority, echo, HttpLimits(handshake_s=60)) as server:
        stream = await trio.open_tcp_stream(LOCAL, server.port)
        await stream.send_all(b"\x16\x03\x01")
        while not server.connections:
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.drain()
        with trio.fail_after(10):
            assert await stream.receive_some() == b""
        await stream.aclose()


@pytest.mark.trio
async def test_handshakes_that_wait_give_way_to_other_clients(authority: Authority) -> None:
    client = authority.client()
    async with secured(authority, echo, HttpLimits(connections=4, new_connections=4, fresh_s=0.0)) as server:
        idle = [await trio.open_tcp_stream(LOCAL, server.port) for _ in range(4)]
        with trio.fail_after(10):
            assert await asked(client, server.port, "/", b"x") == b"POST /  x"
        assert len(server.connections) <= 4
        for stream in idle:
            await stream.aclose()
    client.close()


@pytest.mark.trio
async def test_a_server_that_drains_ends_idle_connections(authority: Authority) -> None:
    client = authority.client()
    async with secured(authority, echo) as server:
        await asked(client, server.port)
        server.drain()
        with trio.fail_after(10):
            while server.connections:
                await trio.sleep(0)
    client.close()


@pytest.mark.trio
async def test_a_renewed_certificate_is_used_without_a_restart(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0
    files = [f"serve.client_tls_cert={authority.cert}", f"serve.client_tls_key={authority.key}"]
    tls = client_tls_of(cluster(*files), lambda: now)
    assert tls
    tls.current()

    async def trusts() -> bool:
        client = authority.client()
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(serve_http, listen(LOCAL, 0), echo, tls=tls.current))
            try:
                answer = await asked(client, server.port)
            except UpstreamError:
                answer = b""
            nursery.cancel_scope.cancel()
        client.close()
        return answer == b"POST /  "

    assert await trusts()
    authority.renew()
    assert not await trusts(), "files are looked at once a second"
    now += EVERY_NS
    assert await trusts()
    good, key = authority.key.read_bytes(), trustme.CA().issue_cert(LOCAL).private_key_pem.bytes()
    authority.key.write_bytes(key)
    now += EVERY_NS
    assert await trusts(), "a key that does not belong to the certificate is refused"
    assert "the previous content stays in use" in caplog.text
    authority.key.write_bytes(good)
    now += EVERY_NS
    assert await trusts()


def test_files_that_are_missing_or_wrong_are_bad_input(authority: Authority, tmp_path: Path) -> None:
    assert client_tls_of(cluster()) is None
    with pytest.raises(ScenarioError, match=r"serve\.client_tls_key: is missing"):
        client_tls_of(cluster(f"serve.client_tls_cert={authority.cert}"))
    with pytest.raises(ScenarioError, match=r"serve\.client_tls_cert: is missing"):
        client_tls_of(cluster(f"serve.client_tls_key={authority.key}"))
    for cert, key in ((authority.cert, tmp_path / "absent"), (authority.key, authority.key)):
        with pytest.raises(ScenarioError, match=r"serve\.client_tls_cert: "):
            client_tls_of(cluster(f"serve.client_tls_cert={cert}", f"serve.client_tls_key={key}"))

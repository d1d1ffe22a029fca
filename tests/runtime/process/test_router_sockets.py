"""The router's two ports: their sockets, and that clients of one of them take no places at the other."""

from __future__ import annotations

import resource
import socket
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from pdflow.errors import ScenarioError
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import HttpLimits
from pdflow_runtime.http.server import Server, serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.process.router_sockets import cluster_limits_of, connections_allowed, inherited, limits_of, opened
from pdflow_runtime.security.tls import cluster_client
from tests.runtime.http.world import LOCAL, echo
from tests.runtime.security.test_tls import Member
from tests.runtime.support.live_pair import cluster

TLS = ("serve.tls_cert=a.crt", "serve.tls_key=a.key", "serve.tls_ca=ca.crt")
FREE = ("serve.port=0", "serve.cluster_port=0", *TLS)


def test_both_ports_are_opened_and_inherited() -> None:
    made = opened(cluster(*FREE))
    assert made.cluster_port not in (None, 0, made.port)
    copies = inherited([socket.dup(descriptor) for descriptor in made.descriptors])
    assert (copies.port, copies.cluster_port) == (made.port, made.cluster_port)
    for sockets in (made, copies):
        sockets.close()
    with closing(listen(LOCAL, made.port)):
        pass


def test_without_the_key_there_is_one_port() -> None:
    made = opened(cluster("serve.port=0"))
    with closing(made):
        assert (made.cluster_port, len(made.descriptors)) == (None, 1)


@pytest.mark.parametrize("key", ["port", "cluster_port"])
def test_a_port_that_is_taken_is_bad_input_and_the_other_one_is_free_again(key: str) -> None:
    with closing(listen(LOCAL, 0)) as taken, closing(listen(LOCAL, 0)) as other:
        ports = {"port": other.getsockname()[1], "cluster_port": other.getsockname()[1]}
        other.close()
        ports[key] = taken.getsockname()[1]
        settings = [f"serve.{name}={port}" for name, port in ports.items()]
        with pytest.raises(ScenarioError, match=rf"serve\.{key}: .*:{ports[key]} cannot be listened on: Address"):
            opened(cluster(*settings, *TLS))
        free = next(port for name, port in ports.items() if name != key)
        with closing(listen(LOCAL, free)):
            pass


def test_the_ports_share_what_descriptors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert connections_allowed() == 330
    clients = limits_of(cluster(*FREE), 1000)
    inside = cluster_limits_of(clients)
    assert (clients.connections, inside.connections, inside.new_connections) == (264, 66, 16)
    assert clients.connections + inside.connections <= connections_allowed()
    assert inside.connections_per_address == 0, "all engines may have one address"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    clients = limits_of(cluster(*FREE), 1000)
    assert (clients.connections, cluster_limits_of(clients).connections) == (4096, 1024)


@pytest.mark.trio
async def test_connections_without_a_certificate_take_no_places_of_engines(tmp_path: Path) -> None:
    """A flood of them replaces its own, and an engine's connection and a new engine's stay."""
    authority = trustme.CA()
    router, engine = (Member(tmp_path / name, authority).tls() for name in ("router", "engine"))
    limits = cluster_limits_of(HttpLimits(connections=64))
    assert (limits.connections, limits.new_connections) == (16, 4)
    async with trio.open_nursery() as nursery, AsyncExitStack() as sockets:
        serving = partial(serve_http, listen(LOCAL, 0), echo, limits, tls=router.accepting)
        server: Server = await nursery.start(serving)
        clients = [cluster_client(engine) for _ in range(8)]

        async def report(client: HttpClient) -> socket.socket:
            async with client.request("POST", LOCAL, server.port, "/admin/engines", (), b"x") as response:
                assert response.status == 200
                await response.read()
            return client._idle[LOCAL, server.port][0]

        kept = [await report(client) for client in clients]
        for _ in range(40):
            await sockets.enter_async_context(await trio.open_tcp_stream(LOCAL, server.port))
        await trio.sleep(0.5)
        assert len(server.connections) <= len(clients) + limits.new_connections
        assert [await report(client) for client in clients] == kept, "no engine's connection was closed"
        late = cluster_client(engine)
        with trio.fail_after(10):
            await report(late)
        for client in (*clients, late):
            client.close()
        server.drain()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_handshake_that_fails_leaves_no_connection(tmp_path: Path) -> None:
    authority = trustme.CA()
    router, other = Member(tmp_path / "router", authority), Member(tmp_path / "other", trustme.CA())
    limits = cluster_limits_of(HttpLimits(connections=64))
    async with trio.open_nursery() as nursery:
        serving = partial(serve_http, listen(LOCAL, 0), echo, limits, tls=router.tls().accepting)
        server: Server = await nursery.start(serving)
        client = cluster_client(other.tls())
        for _ in range(8):
            with pytest.raises(Exception, match="certificate verify failed"):
                await client.dial((LOCAL, server.port))
        with trio.fail_after(limits.handshake_s / 2):
            while server.connections:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()

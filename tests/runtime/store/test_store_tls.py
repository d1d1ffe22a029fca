"""TLS to a store's server: who is accepted, who is refused, and the error texts. In front of a real Valkey,
and with the servers on PATH that are built with TLS."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeAlias

import pytest
import trustme

pytest.importorskip("valkey", reason="needs pip install 'pdflow[valkey]'")

from pdflow.errors import ScenarioError
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.security.tls import KEYS
from pdflow_runtime.store.server import MAX_ERROR_CHARS, ServerError, ServerTlsError, ValkeyServer, server_of
from tests.runtime.store.test_store import BY_BLOCK, asked
from tests.runtime.store.test_store_outlived import KEPT, LOADED, PROMPT, backing, looked_for, put
from tests.runtime.store.test_store_server import STORE, line_of
from tests.runtime.support.certificates import certify
from tests.runtime.support.live_pair import cluster, live_pair
from tests.runtime.support.tls_front import accepting, tls_front
from tests.runtime.support.value_server import KINDS, kept_server, program

Start: TypeAlias = Callable[..., int]
FRONT = "front"
LARGE = bytes(range(256)) * 12_000


@pytest.fixture(autouse=True)
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that serves is waited for, however busy the machine is."""
    monkeypatch.setattr("pdflow_runtime.store.server.ANSWER_S", 20.0)


@pytest.fixture(params=(FRONT, *KINDS))
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a server with the certificates of a folder; returns the port that has TLS. Args: whether it demands
    certificates."""
    kind = request.param
    real = KINDS[0] if kind == FRONT else kind
    with ExitStack() as stack:

        def start(folder: Path, *, demands: bool = True) -> int:
            if kind == FRONT:
                kept = stack.enter_context(kept_server(real, tmp_path))
                return stack.enter_context(tls_front(kept.port, accepting(folder, demands=demands)))
            with listen("127.0.0.1", 0) as free:
                port: int = free.getsockname()[1]
            names = (("tls-cert-file", "tls_cert"), ("tls-key-file", "tls_key"), ("tls-ca-cert-file", "tls_ca"))
            files = [argument for option, name in names for argument in (f"--{option}", str(folder / name))]
            clients = "yes" if demands else "no"
            options = ("--tls-port", str(port), "--tls-auth-clients", clients, *files)
            stack.enter_context(kept_server(kind, tmp_path, *options))
            return port

        yield start


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def certified(folder: Path, authority: trustme.CA, name: str = "any.name", accepts: trustme.CA | None = None) -> Path:
    """A folder with certificates. Args: `name` of the server, if it matters; whose certificates it accepts besides its
    own."""
    folder.mkdir(exist_ok=True)
    certify(folder, authority, name)
    if accepts is not None:
        accepts.cert_pem.write_to_path(folder / "tls_ca", append=True)
    return folder


def settings(port: int, folder: Path | None = None, scheme: str = "valkeys", host: str = "127.0.0.1") -> list[str]:
    files = [] if folder is None else [f"serve.{key}={folder / key}" for key in KEYS]
    return [f"serve.store_url={scheme}://{host}:{port}", *files]


def client(port: int, folder: Path | None = None, scheme: str = "valkeys", host: str = "127.0.0.1") -> ValkeyServer:
    """As a node has it. Args: the folder of its certificates, if any."""
    made = server_of(cluster(*STORE, *settings(port, folder, scheme, host)))
    assert made is not None
    return made


def trusted(monkeypatch: pytest.MonkeyPatch, folder: Path, authority: trustme.CA) -> None:
    """Make it the one authority of the system."""
    authority.cert_pem.write_to_path(folder / "system.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "system.pem"))


def refusal(server: ValkeyServer) -> str:
    """The error by which a node learns of it; no call succeeds."""
    with closing(server):
        with pytest.raises(ServerTlsError) as caught:
            server.run_id()
        for call in (lambda: server.put([("a", memoryview(LARGE))]), lambda: server.get([("a", 9)])):
            with pytest.raises(ServerTlsError):
                call()
        return str(caught.value)


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_values_are_saved_and_found_over_mutual_tls(
    scheme: str, start: Start, authority: trustme.CA, tmp_path: Path
) -> None:
    port = start(certified(tmp_path / "server", authority))
    with closing(client(port, certified(tmp_path / "node", authority), scheme)) as server:
        run_id = server.run_id()
        assert run_id
        server.put([("a", memoryview(LARGE)), ("b", memoryview(b"\0\xff\r\n"))])
        assert server.get([("b", 9), ("c", 9), ("a", len(LARGE))]) == [b"\0\xff\r\n", b"", LARGE]
        assert server.run_id() == run_id
        (connection,) = server._client.connection_pool._available_connections
        assert connection._sock.version() == "TLSv1.3"


def test_a_client_without_a_certificate_is_refused(
    start: Start, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = start(certified(tmp_path / "server", authority, "localhost"))
    trusted(monkeypatch, tmp_path, authority)
    message = refusal(client(port, host="localhost"))
    assert message == (
        "the server refuses this side's certificate: certificate required; if it demands a certificate "
        "(tls-auth-clients), set serve.tls_cert, tls_key and tls_ca"
    )


def test_a_client_of_another_authority_is_refused(start: Start, authority: trustme.CA, tmp_path: Path) -> None:
    port = start(certified(tmp_path / "server", authority))
    message = refusal(client(port, certified(tmp_path / "node", trustme.CA(), accepts=authority)))
    assert message == (
        "the server refuses this side's certificate: unknown ca; the server's tls-ca-cert-file must name the authority "
        "of serve.tls_cert"
    )


@pytest.mark.parametrize("of_the_system", [False, True])
def test_a_server_of_another_authority_is_refused(
    of_the_system: bool, start: Start, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that the system trusts, too: anybody gets a certificate of such an authority."""
    other = trustme.CA()
    if of_the_system:
        trusted(monkeypatch, tmp_path, other)
    port = start(certified(tmp_path / "server", other, "127.0.0.1", accepts=authority))
    message = refusal(client(port, certified(tmp_path / "node", authority)))
    assert "certificate verify failed" in message
    assert message.endswith("; serve.tls_ca names the file with its authority")


def test_without_an_authority_of_the_cluster_the_system_s_counts_and_the_name(
    start: Start, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = start(certified(tmp_path / "server", authority, "localhost"), demands=False)
    assert refusal(client(port, host="localhost")).endswith("; SSL_CERT_FILE names the file with its authority")
    trusted(monkeypatch, tmp_path, authority)
    with closing(client(port, host="localhost")) as server:
        server.put([("a", memoryview(LARGE))])
        assert server.get([("a", len(LARGE))]) == [LARGE]
    message = refusal(client(port, host="127.0.0.1"))
    assert "IP address mismatch, certificate is not valid for '127.0.0.1'; use a name that the server's" in message


def test_a_plain_client_of_a_port_with_tls_is_refused(start: Start, authority: trustme.CA, tmp_path: Path) -> None:
    port = start(certified(tmp_path / "server", authority))
    message = refusal(client(port, scheme="redis"))
    assert message.endswith("; if its port requires TLS, write valkeys:// or rediss://")
    assert len(message) <= MAX_ERROR_CHARS + 60


def test_a_server_that_was_there_is_not_suspected_of_tls(tmp_path: Path) -> None:
    """One that dies closes connections as one does that expects TLS."""
    kind = next((kind for kind in KINDS if program(kind) is not None), KINDS[0])
    with kept_server(kind, tmp_path) as kept, closing(client(kept.port, scheme="valkey")) as server:
        server.run_id()
        kept.pause()
        kept.process.kill()
        kept.process.wait()
        with pytest.raises(ServerError) as caught:
            server.run_id()
    assert not isinstance(caught.value, ServerTlsError)


def test_renewed_certificates_are_used_without_a_new_client(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdflow_runtime.security.reloaded.EVERY_NS", 0)
    home, other = certified(tmp_path / "server", authority), trustme.CA()
    node = certified(tmp_path / "node", authority)
    with kept_server(KINDS[0], tmp_path) as kept, ExitStack() as stack:
        first, second = (accepting(certified(home, by), demands=True) for by in (authority, other))
        with tls_front(kept.port, first) as port, closing(client(port, node)) as server:
            run_id = server.run_id()
        port = stack.enter_context(tls_front(kept.port, second))
        server = stack.enter_context(closing(client(port, node)))
        with pytest.raises(ServerTlsError, match="certificate verify failed"):
            server.run_id()
        certified(node, other)
        assert server.run_id() == run_id


def test_refused_connections_leave_nothing_behind(authority: trustme.CA, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    context = accepting(certified(tmp_path / "server", trustme.CA()), demands=True)
    node = certified(tmp_path / "node", authority)
    with listen("127.0.0.1", 0) as nothing, tls_front(nothing.getsockname()[1], context) as port:
        server = client(port, node)
        with closing(server), pytest.raises(ServerTlsError):
            server.run_id()
        before = descriptors()
        for _ in range(100):
            with pytest.raises(ServerTlsError):
                server.run_id()
        deadline = time.monotonic() + 10  # the front closes its ends a little later
        while descriptors() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descriptors() <= before
        assert len(server._client.connection_pool._available_connections) == 1
        assert not server._client.connection_pool._in_use_connections


def test_a_handshake_that_is_not_answered_has_a_limit(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdflow_runtime.store.server.ANSWER_S", 0.2)
    with listen("127.0.0.1", 0) as silent:
        began = time.monotonic()
        server = client(silent.getsockname()[1], certified(tmp_path / "node", authority))
        with closing(server), pytest.raises(ServerTlsError) as caught:
            server.run_id()
        assert 0.2 <= time.monotonic() - began < 10
    assert str(caught.value) == (
        "the server does not answer the TLS handshake within 0.2 s; if its port has no TLS, write valkey:// or redis://"
    )


def test_an_older_tls_is_refused(authority: trustme.CA, tmp_path: Path) -> None:
    context = accepting(certified(tmp_path / "server", authority), demands=True)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with tls_front(1, context) as port:
        message = refusal(client(port, certified(tmp_path / "node", authority)))
    assert (
        message == "the server ended the connection: protocol version; it must offer TLS 1.3 or later (tls-protocols)"
    )


def test_certificates_are_complete_or_absent(authority: trustme.CA, tmp_path: Path) -> None:
    node = certified(tmp_path / "node", authority)
    only = [f"serve.{key}={node / key}" for key in KEYS[:2]]
    with pytest.raises(ScenarioError, match=r"serve\.tls_ca: is missing"):
        server_of(cluster(*STORE, "serve.store_url=valkeys://127.0.0.1", *only))


def test_what_is_wrong_is_one_line_and_exit_2(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = certified(tmp_path / "node", authority)
    context = accepting(certified(tmp_path / "server", trustme.CA()), demands=True)
    with tls_front(1, context) as port:
        line = line_of(settings(port, node), monkeypatch)
    assert f"serve.store_url: valkeys://127.0.0.1:{port} is unavailable: certificate verify failed: " in line
    assert line.endswith("; serve.tls_ca names the file with its authority")
    line = line_of(settings(1, node), monkeypatch)
    assert line.endswith("Connection refused.; start the server, or remove the key")


@pytest.mark.slow
@pytest.mark.trio
async def test_a_restarted_node_finds_its_objects_over_tls(
    model: TorchModel, start: Start, authority: trustme.CA, tmp_path: Path
) -> None:
    port = start(certified(tmp_path / "server", authority))
    overrides = (*BY_BLOCK, *settings(port, certified(tmp_path / "node", authority)))
    await put(model, *overrides)
    assert (await looked_for(model, LOADED, *overrides))["found"] == KEPT


@pytest.mark.slow
@pytest.mark.trio
async def test_no_request_fails_by_a_server_that_is_refused(
    model: TorchModel, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = accepting(certified(tmp_path / "server", trustme.CA()), demands=True)
    with tls_front(1, context) as port:
        overrides = (*BY_BLOCK, *settings(port, certified(tmp_path / "node", authority)))
        async with live_pair(cluster(*overrides), model) as home:
            assert await asked(home, "a", PROMPT) == len(PROMPT)
            await home.quiet()
            assert not backing(home).up
    lines = [record.message for record in caplog.records if "is unavailable" in record.message]
    assert len(lines) == 1, lines
    assert "certificate verify failed" in lines[0]
    assert "serve.tls_ca names the file with its authority; requests continue without it" in lines[0]

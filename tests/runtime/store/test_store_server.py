"""The client of a store's server: what is no answer of a server's is an error of one kind; and who cannot be served
with what a scenario says hears it in one line, exit 2."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("valkey", reason="needs pip install 'pdflow[valkey]'")

from pdflow.cli import cli
from pdflow.errors import ScenarioError
from pdflow.scenario.store_url import StoreUrl
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.store.server import MAX_ERROR_CHARS as ERROR_CHARS
from pdflow_runtime.store.server import RefusedError, ServerError, ValkeyServer, server_of
from tests.runtime.support.live_pair import cluster
from tests.runtime.support.threaded_server import threaded_server
from tests.runtime.support.value_server import KINDS, kept_server

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/methods/kv-store.toml"
STORE = ("transfer.method=kv-store", "transfer.store_granularity=block")


def client(port: int) -> ValkeyServer:
    return ValkeyServer(StoreUrl("valkey", "127.0.0.1", port, None, 0), None, 100)


def answering(answer: bytes) -> AbstractContextManager[int]:
    """The port of a server that sends this to each client after its first request, and closes the connection."""

    def serve(connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            connection.settimeout(5)
            connection.recv(65536)
            connection.sendall(answer)

    return threaded_server(serve)


CALLS: list[Callable[[ValkeyServer], object]] = [
    lambda server: server.get([("a", 10), ("b", 10)]),
    lambda server: server.put([("a", memoryview(b"x"))]),
    lambda server: server.run_id(),
]
TERMS = [b"$", b"*", b":", b"+", b"-", b"\r\n", b"2", b"-1", b"OK", b"abc", b"99999999999999999999", b"\xff"]


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=40, deadline=None)
@given(answer=st.lists(st.sampled_from(TERMS), max_size=12).map(b"".join) | st.binary(max_size=30))
def test_any_bytes_of_the_server_give_an_answer_or_an_error(
    call: Callable[[ValkeyServer], object], answer: bytes
) -> None:
    with answering(answer) as port:
        message = ""
        with closing(client(port)) as server:
            try:
                call(server)
            except ServerError as error:
                message = str(error)
        assert "\n" not in message
        assert len(message) <= ERROR_CHARS


def test_a_web_server_is_none() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, closing(client(port)) as server:
        for call in CALLS:
            with pytest.raises(ServerError, match=r"400 Bad Request|Broken pipe|reset by peer|closed"):
                call(server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_one_keeps_what_it_is_given(kind: str, tmp_path: Path) -> None:
    with kept_server(kind, tmp_path) as kept, closing(client(kept.port)) as server:
        run_id = server.run_id()
        assert server.get([("a", 4), ("b", 4)]) == [b"", b""]
        server.put([("a", memoryview(bytearray(b"\0\xff\r\n"))), ("b", memoryview(b"123456"))])
        assert server.get([("a", 4), ("b", 4)]) == [b"\0\xff\r\n", b"12345"]
        assert server.run_id() == run_id
        kept.kill()
        with pytest.raises(ServerError):
            server.run_id()
        kept.start()
        assert server.run_id() != run_id


@pytest.mark.parametrize("kind", KINDS)
def test_an_unprivileged_client_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    """A user who may read: lives are not told to him, and nothing is taken from him."""
    with kept_server(kind, tmp_path) as kept:
        with kept.asked() as admin:
            admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+ping", "+getrange")
        with closing(ValkeyServer(StoreUrl("valkey", "127.0.0.1", kept.port, "reader", 0), "pw", 100)) as server:
            assert server.run_id() == ""
            assert server.get([("a", 4)]) == [b""]
            with pytest.raises(RefusedError, match="no permissions"):
                server.put([("a", memoryview(b"x"))])


def test_beyond_this_host_values_are_known_by_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    overrides = (*STORE, "serve.store_url=valkey://192.0.2.1")
    with pytest.raises(ScenarioError, match="is on another host"):
        server_of(cluster(*overrides))
    file = tmp_path / "secret"
    file.write_text("a secret of the tests, long enough")
    file.chmod(0o600)
    assert server_of(cluster(*overrides, f"serve.secret_file={file}")) is not None
    assert server_of(cluster(*STORE)) is None


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (["serve.store_url=valkey://127.0.0.1:{busy}"], "serve.store_url: valkey://127.0.0.1:{busy} is unavailable:"),
        (["serve.store_url=valkey://127.0.0.1:1"], "Connection refused"),
        (["serve.store_url=valkey://127.0.0.1:1"], "start the server, or remove the key"),
        (
            ["serve.store_url=valkey://127.0.0.1", "serve.store_password_file=nowhere"],
            "serve.store_password_file: {here}/nowhere cannot be read",
        ),
        (["serve.store_url=valkey://127.0.0.1", "serve.store_password_file={open}"], "is readable by other users"),
        (["serve.store_url=valkey://127.0.0.1", "serve.store_password_file={empty}"], "expected a password of 1 to"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    edits: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode in (("open", 0o644), ("empty", 0o600)):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    with closing(listen("127.0.0.1", 0)) as silent:
        paths = {"busy": silent.getsockname()[1], "here": EXAMPLE.parent}
        paths |= {name: tmp_path / name for name in ("open", "empty")}
        assert message.format(**paths) in line_of([argument.format(**paths) for argument in edits], monkeypatch)


def test_a_missing_client_library_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    message = line_of(["serve.store_url=valkey://127.0.0.1"], monkeypatch)
    assert "serve.store_url needs the Valkey client: pip install 'pdflow[valkey]'" in message


def line_of(edits: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `pdflow serve` says then."""
    monkeypatch.setattr("pdflow_runtime.process.one_host.log_to_stderr", lambda who: None)
    overrides = [arg for argument in edits for arg in ("--set", argument)]
    ran = CliRunner().invoke(cli, ["serve", str(EXAMPLE), *overrides])
    lines = ran.stderr.splitlines()
    assert ran.exit_code == 2, ran.stderr
    assert len(lines) == 1, ran.stderr
    return lines[0]

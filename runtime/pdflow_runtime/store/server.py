"""The Valkey or Redis server that a store's nodes keep copies in: values by name, which expire.

Calls block, and are for threads. The client is valkey-py (MIT, the Valkey project's own, without dependencies): one on
trio (coredis) was looked at, and would parse replies of megabytes in the loop that moves KV.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

from pdflow.errors import MissingBackendError, Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.store_url import StoreUrl, read_store_url
from pdflow_runtime.clock import stopwatch_ns
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.secret import MOST_BYTES, private_text, secret_of
from pdflow_runtime.security.tls import tls_of
from pdflow_runtime.store.server_tls import ServerTls

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
VARIABLE: Final = "PDFLOW_STORE_PASSWORD"
INSTALL: Final = "pip install 'pdflow[valkey]'"
ANSWER_S: Final = 0.5
"""The time limit of an answer's next bytes; less than a lookup may take in all."""
MAX_ERROR_CHARS: Final = 200
"""The most characters of a server's error that are repeated."""
CLOSED: Final = "Connection closed by server."
"""The library's message."""
WITH_TLS: Final = "; if its port requires TLS, write valkeys:// or rediss://"


class ServerError(Exception):
    """Raised when the server is not there, or its answer is not one of such a server."""


class ServerTlsError(ServerError):
    """Raised when there is no TLS with the server. Its message says what to do."""


class RefusedError(ServerError):
    """Raised when the server is there, and refuses: it is full, or this user may not."""


class ValueServer(Protocol):
    """The interface of a server of values. All calls raise ServerError."""

    @property
    def name(self) -> str:
        """The name for people."""

    def run_id(self) -> str:
        """Return the id of the server's process: a restart has another."""

    def get(self, requested: Sequence[tuple[str, int]]) -> list[bytes]:
        """Return the values of these names, each cut one byte behind the length given; b"" if there is none."""

    def put(self, values: Sequence[tuple[str, memoryview]]) -> None: ...

    def close(self) -> None: ...


class ValkeyServer:
    """A client of a Valkey or Redis server, with TLS if `tls` is given. MissingBackendError without the library."""

    def __init__(self, at: StoreUrl, password: str | None, ttl_s: float, tls: ServerTls | None = None) -> None:
        try:
            self._library: Final[Any] = import_module("valkey")
        except ImportError:
            raise MissingBackendError(f"serve.store_url needs the Valkey client: {INSTALL}") from None
        self.name: Final = str(at)
        self._ttl_ms: Final = int(ttl_s * 1000)
        self._tls: Final = tls
        self._has_answered = False
        """Whether there was an answer since the start: if so, the URL's scheme is right."""
        connections = self._library.ConnectionPool(
            connection_class=self._library.Connection if tls is None else tls.connections(self._library),
            host=at.host,
            port=at.port,
            db=at.database,
            username=at.user,
            password=password,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            lib_name=None,
            lib_version=None,
        )
        self._client: Final[Any] = self._library.Valkey.from_pool(connections)

    def run_id(self) -> str:
        def ask() -> str:
            self._client.ping()
            try:
                return str(self._client.info("server").get("run_id", ""))
            except self._library.ResponseError:
                return ""  # a user who may not ask

        return self._call(ask)

    def get(self, requested: Sequence[tuple[str, int]]) -> list[bytes]:
        """Get values by GETRANGE: nobody can make us read more than is expected, whatever has been put there."""

        def ask() -> list[Any]:
            lines = self._client.pipeline(transaction=False)
            for name, nbytes in requested:
                lines.getrange(name, 0, nbytes)
            answers: list[Any] = lines.execute(raise_on_error=False)
            return answers

        values: list[bytes] = []
        for answer in self._call(ask):
            if isinstance(answer, bytes):
                values.append(answer)
            elif "WRONGTYPE" in str(answer):
                values.append(b"no text")
            else:
                raise RefusedError(_brief(answer))
        return values

    def put(self, values: Sequence[tuple[str, memoryview]]) -> None:
        def ask() -> list[Any]:
            lines = self._client.pipeline(transaction=False)
            for name, value in values:
                lines.set(name, value, px=self._ttl_ms)
            answers: list[Any] = lines.execute(raise_on_error=False)
            return answers

        for answer in self._call(ask):
            if answer is not True:
                raise RefusedError(_brief(answer))

    def close(self) -> None:
        self._client.close()

    def _call(self, ask: Callable[[], T]) -> T:
        try:
            answer = ask()
        except self._library.ResponseError as error:
            self._has_answered = True
            raise RefusedError(_brief(error)) from None
        except Exception as error:
            # Not only its own errors: what it makes of bytes that no server says may be any. It closes that connection.
            raise self._failure(error) from None
        self._has_answered = True
        return answer

    def _may_lack_tls(self, error: Exception) -> bool:
        """Whether the error may be a server's that expects TLS, or another certificate: it hangs up, or sends what is
        no answer."""
        library = self._library
        if isinstance(error, library.InvalidResponse):
            return True
        broken = (ConnectionResetError, BrokenPipeError)
        return type(error) is library.ConnectionError and (str(error) == CLOSED or _cause(error, broken) is not None)

    def _failure(self, error: Exception) -> ServerError:
        if self._tls is not None and (of_tls := _cause(error, ssl.SSLError)) is not None:
            return ServerTlsError(self._tls.problem(of_tls))
        text = _brief(error)
        if self._has_answered or not self._may_lack_tls(error):
            return ServerError(text)
        return ServerTlsError(text + WITH_TLS) if self._tls is None else ServerTlsError(f"{text}; {self._tls.remedy}")


def _cause(error: BaseException | None, kinds: type[E] | tuple[type[E], ...]) -> E | None:
    """Return the first error of these kinds among this one and those that it was raised for."""
    while error is not None and not isinstance(error, kinds):
        error = error.__context__
    return error


def _brief(value: object) -> str:
    """Return a value as text in one line, whatever it is."""
    return " ".join(ascii(str(value))[1:-1].split())[:MAX_ERROR_CHARS] or type(value).__name__


def server_of(scenario: ResolvedScenario) -> ValkeyServer | None:
    """Return the client of the server that the scenario names, not connected yet; None if it names none. ScenarioError,
    MissingBackendError."""
    url = scenario.serve.store_url
    if url is None:
        return None
    at = read_store_url(url)
    if not is_loopback(at.host) and secret_of(scenario) is None:
        problem = "is on another host, which requires a cluster secret: set serve.secret_file or PDFLOW_SECRET"
        raise ScenarioError([Problem(scenario.path, "serve.store_url", problem)])
    # Its files are looked at in threads, where trio has no clock.
    tls = ServerTls.of(tls_of(scenario, stopwatch_ns)) if at.tls else None
    return ValkeyServer(at, _password(scenario), scenario.serve.store_ttl_s, tls)


def check_server(scenario: ResolvedScenario) -> None:
    """Raise ScenarioError if the server is not there, or refuses us."""
    server = server_of(scenario)
    if server is None:
        return
    try:
        server.run_id()
    except ServerError as error:
        problem = f"{scenario.serve.store_url} is unavailable: {error}"
        if not isinstance(error, ServerTlsError):
            problem += "; start the server, or remove the key"
        raise ScenarioError([Problem(scenario.path, "serve.store_url", problem)]) from None
    finally:
        server.close()


def _password(scenario: ResolvedScenario) -> str | None:
    named = scenario.serve.store_password_file
    if named is None:
        return os.environ.get(VARIABLE)
    text = private_text(scenario, "store_password_file", named).strip()
    if not 0 < len(text) <= MOST_BYTES:
        problem = f"has {len(text)} bytes, expected a password of 1 to {MOST_BYTES:,}"
        raise ScenarioError([Problem(scenario.path, "serve.store_password_file", problem)])
    return os.fsdecode(text)

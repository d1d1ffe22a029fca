"""The Valkey or Redis server that a store's nodes keep copies in: values by name, which expire.

Calls block, and are for threads. The client is valkey-py (MIT, the Valkey project's own, without dependencies): one on
trio (coredis) was looked at, and would parse replies of megabytes in the loop that moves KV.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

from pdflow.errors import MissingBackendError, Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.store_url import StoreUrl, read_store_url
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.secret import MOST_BYTES, private_text, secret_of

T = TypeVar("T")
VARIABLE: Final = "PDFLOW_STORE_PASSWORD"
INSTALL: Final = "pip install 'pdflow[valkey]'"
ANSWER_S: Final = 0.5
"""The time limit of an answer's next bytes; less than a lookup may take in all."""
MAX_ERROR_CHARS: Final = 200
"""The most characters of a server's error that are repeated."""


class ServerError(Exception):
    """Raised when the server is not there, or its answer is not one of such a server."""


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
    """A client of a Valkey or Redis server. MissingBackendError without the library."""

    def __init__(self, at: StoreUrl, password: str | None, ttl_s: float) -> None:
        try:
            self._library: Final[Any] = import_module("valkey")
        except ImportError:
            raise MissingBackendError(f"serve.store_url needs the Valkey client: {INSTALL}") from None
        self.name: Final = str(at)
        self._ttl_ms: Final = int(ttl_s * 1000)
        self._client: Final[Any] = self._library.Valkey(
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
            return ask()
        except self._library.ResponseError as error:
            raise RefusedError(_brief(error)) from None
        except Exception as error:
            # Not only its own errors: what it makes of bytes that no server says may be any. It closes that connection.
            raise ServerError(_brief(error)) from None


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
    return ValkeyServer(at, _password(scenario), scenario.serve.store_ttl_s)


def check_server(scenario: ResolvedScenario) -> None:
    """Raise ScenarioError if the server is not there, or refuses us."""
    server = server_of(scenario)
    if server is None:
        return
    try:
        server.run_id()
    except ServerError as error:
        problem = f"{scenario.serve.store_url} is unavailable: {error}; start the server, or remove the key"
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

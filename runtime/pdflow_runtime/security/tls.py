"""TLS within the cluster, between ranks and between router and engines: both sides have a certificate of the cluster's
own authority. The files are read again when they change, for connections that begin then.

A process with a certificate of that authority is a peer, at whatever address: give one to nothing else. Which requests
it may send is decided by the secret (`signed.py`): a certificate alone orders nothing.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import trio

from pdflow.errors import PdflowError, Problem, ScenarioError
from pdflow.protocol.values import Instant
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.schema.serve import TLS_KEYS
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.descriptors import LineASecond
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.security.reloaded import Reloaded

log = logging.getLogger(__name__)

KEYS: Final = TLS_KEYS
AUTHORITY: Final = "serve.tls_ca"
REMEDY: Final = "both sides need certificates of one authority: serve.tls_cert, tls_key and tls_ca (docs/hosts.md)"
"""What an operator has to do when two components have no TLS with each other."""
_failures: Final = LineASecond()


class Contexts(NamedTuple):
    """What connections are opened and accepted with."""

    opens: ssl.SSLContext
    accepts: ssl.SSLContext


class Tls:
    """Args: `contexts`, by the files of now."""

    def __init__(self, contexts: Reloaded[Contexts]) -> None:
        self._contexts: Final = contexts

    def opening(self) -> ssl.SSLContext:
        return self._contexts.current().opens

    def accepting(self) -> ssl.SSLContext:
        return self._contexts.current().accepts

    def opened(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        return trio.SSLStream(stream, self.opening(), https_compatible=True)

    def accepted(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        return trio.SSLStream(stream, self.accepting(), server_side=True, https_compatible=True)


def tls_of(scenario: ResolvedScenario, clock: Callable[[], Instant] = now_ns) -> Tls | None:
    """Return TLS by the files of [serve]; None if it names none. ScenarioError if only some are named, or a file cannot
    be used."""

    def failure(key: str, problem: str) -> ScenarioError:
        return ScenarioError([Problem(scenario.path, f"serve.{key}", problem)])

    given = {key: getattr(scenario.serve, key) for key in KEYS}
    return tls_by({key: value and scenario.base_dir / value for key, value in given.items()}, failure, clock)


def tls_by(
    files: Mapping[str, Path | None], failure: Callable[[str, str], PdflowError], clock: Callable[[], Instant] = now_ns
) -> Tls | None:
    """Return TLS by these files, one for each of KEYS; None if there are none. Args: `failure` makes the error that is
    raised if only some are given, or one cannot be used, of its key and the problem."""
    named = [path for key in KEYS if (path := files[key]) is not None]
    if not named:
        return None
    for key in KEYS:
        if files[key] is None:
            raise failure(key, "is missing: TLS needs tls_cert, tls_key and tls_ca")

    def read() -> Contexts:
        try:
            contexts = Contexts(*(_context(kind, named) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)))
            _try(contexts)
            return contexts
        except OSError as error:
            raise failure(KEYS[0], f"{', '.join(map(str, named))}: {error}") from None

    return Tls(Reloaded("certificate of the cluster", named, read, clock))


def cluster_client(tls: Tls | None) -> HttpClient:
    """Return a client for requests to components of the cluster."""
    return HttpClient() if tls is None else HttpClient(tls=tls.opening, authority=AUTHORITY)


def operators_client(cert: Path, key: Path, authority: Path) -> HttpClient:
    """Return a client with that certificate, for the cluster port of a router. OSError if a file cannot be used."""
    return HttpClient(tls=_context(ssl.PROTOCOL_TLS_CLIENT, (cert, key, authority)), authority="--ca")


def log_tls_failure(component: str, error: UpstreamError) -> None:
    """Log, at most once a second, that a request to the component failed for want of TLS, if it did: an operator must
    change files, which no retry does."""
    if error.kind == "tls" and (more := _failures.more()) is not None:
        log.error("a request to %s failed: %s%s; %s", component, error, more, REMEDY)


def _try(contexts: Contexts) -> None:
    """Let both contexts meet in memory. OSError if they refuse each other: if the certificate has expired, or is of
    another authority, no component could connect to any."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.opens.wrap_bio(to_client, to_server)
    server = contexts.accepts.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(2):  # of each end, as TLS 1.3 needs
        for end in (client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _context(kind: int, files: Sequence[Path]) -> ssl.SSLContext:
    cert, key, authority = files
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers are known by their authority: their addresses may change from one incarnation to the next.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # With an empty password: one that is needed would else be asked for at the terminal.
    context.load_cert_chain(cert, key, password="")
    context.load_verify_locations(authority)
    if kind is ssl.PROTOCOL_TLS_SERVER:
        # A client that closes before it has read them would reset the connection, and lose what it has just sent.
        context.num_tickets = 0
    return context
